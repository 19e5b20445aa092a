"""However unevenly the data lie, no rank waits for ever, and every row is trained exactly once."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from pipeline.splicing import num_low_rate_frames
from tests.training.data.uneven_run import Lengths, write_uneven_run
from tests.training.fit.small_fits import fit, small_fit
from training.algorithms.learning_rates import exponential_decay
from training.data.sub_epochs import scheduled_learning_sub_epochs
from training.distributed.simulated_group import simulate_ranks
from training.models.acoustic_model import AcousticModel
from training.settings.trainers import TRAINERS

UNEVEN: dict[str, Lengths] = {
    "one utterance for four ranks": [[90]],
    "a partition is a hundred times the others": [[60] * 60, *([[10]] * 20)],
    "one utterance is longer than all others": [[900], *([[9]] * 9)],
    "rows run out at once on two ranks": [[60] * 5, [60] * 4, [30, 30]],
}
LABELLED = [[45, 90, 200]]
SUB_EPOCHS = scheduled_learning_sub_epochs(exponential_decay(0.05, 0.03, 2), 2, 1, 1.2, 2)


@pytest.fixture
def frames_seen() -> Iterator[Counter[int]]:
    """Low-rate frames that any rank's model has been given in training, by utterance."""
    seen: Counter[int] = Counter()

    def count(module: nn.Module, inputs: tuple[Tensor, Tensor | None]) -> None:
        if isinstance(module, AcousticModel) and module.training:
            numbers = inputs[0][..., 0].round().int()
            seen.update(numbers[numbers > 0].tolist())

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    yield seen
    handle.remove()


@pytest.mark.parametrize(("trainer", "lengths"), zip(sorted(TRAINERS), cycle(UNEVEN), strict=False))
def test_every_row_is_trained_once(
    tmp_path: Path, frames_seen: Counter[int], trainer: str, lengths: str
) -> None:
    """A student's two sub-epochs, chunks and then whole utterances, on four ranks and groups of 2.

    Ranks in one process: where one would wait for ever, all end with an error that says so.
    """
    unlabelled = UNEVEN[lengths]
    write_uneven_run(tmp_path, LABELLED, unlabelled)
    what = replace(small_fit(trainer, student=True, group_size=2), sub_epochs=SUB_EPOCHS)
    results = simulate_ranks(4, fit, tmp_path, what)
    assert len({model for _, model in results}) == 1
    numbered = enumerate([*np.concatenate(LABELLED), *np.concatenate(unlabelled)], 1)
    assert frames_seen == {
        number: num_low_rate_frames(int(num_frames), 0) + what.model.delay
        for number, num_frames in numbered
    }
