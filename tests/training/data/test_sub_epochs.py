"""Sub-epochs of supervised training and of scheduled learning, however unevenly the data lie."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.splicing import num_low_rate_frames
from tests.training.data.uneven_run import Lengths, write_uneven_run
from tests.training.fit.small_fits import fit, small_fit
from training.algorithms.learning_rates import exponential_decay
from training.data.sub_epochs import scheduled_learning_sub_epochs, supervised_sub_epochs
from training.distributed.simulated_group import simulate_ranks
from training.models.acoustic_model import AcousticModel
from training.settings.trainers import TRAINERS


def test_supervised_training_rotates_offsets_and_ends_on_whole_utterances() -> None:
    """The paper's recipe: ten chunked epochs, two on whole utterances (003 II-B)."""
    sub_epochs = supervised_sub_epochs([0.1] * 12, 10)
    assert [sub_epoch.offset for sub_epoch in sub_epochs] == [0, 1, 2] * 4
    assert [sub_epoch.whole_utterances for sub_epoch in sub_epochs] == [False] * 10 + [True] * 2
    assert all(sub_epoch.labelled and sub_epoch.num_shares == 1 for sub_epoch in sub_epochs)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_each_pass_reads_every_unlabelled_share_once(subs: int, passes: int, shares: int) -> None:
    """Unlabelled and labelled sub-epochs alternate, the labelled ones at the higher rate (V-D)."""
    rates = [1 / (step + 1) for step in range(subs * passes)]
    sub_epochs = scheduled_learning_sub_epochs(rates, subs, 1, 1.2, shares)
    unlabelled, labelled = sub_epochs[::2], sub_epochs[1::2]
    assert [sub_epoch.share for sub_epoch in unlabelled] == list(range(subs)) * passes
    assert not any(sub_epoch.labelled for sub_epoch in unlabelled)
    assert [sub_epoch.learning_rate for sub_epoch in unlabelled] == rates
    for first, second in zip(unlabelled, labelled, strict=True):
        assert second.labelled
        assert second.learning_rate == pytest.approx(1.2 * first.learning_rate)
    assert sub_epochs[-1].whole_utterances


def test_labelled_data_is_read_in_turn_with_the_offset_rotating() -> None:
    """After each sub-epoch another share; a new offset once all shares were read (V-D)."""
    sub_epochs = scheduled_learning_sub_epochs([0.1] * 12, 12, 3, 1.5, 2)
    labelled = sub_epochs[1::2]
    assert [sub_epoch.share for sub_epoch in labelled] == [0, 1] * 6
    assert [sub_epoch.offset for sub_epoch in labelled] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert [sub_epoch.whole_utterances for sub_epoch in sub_epochs] == [False] * 18 + [True] * 6


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
