"""The torch dataset gives all ranks as many minibatches, each row once, and resumes on others."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.kbest import best_probabilities
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import read_partition
from tests.training.data.uneven_run import write_uneven_run
from training.data.minibatch import Minibatch
from training.data.partition_dataset import PartitionDataset, ReadingSettings
from training.data.targets import StoredTargets
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks

LENGTHS = [[30 + 60 * n for n in range(4)], [400], [200, 30, 30], [90] * 5, [700]]
SETTINGS = ReadingSettings(minibatch_frames=64, num_passes=2, num_sub_epochs=2, seed=5)
Heard = Counter[tuple[float, ...]]


@pytest.fixture(scope="module")
def run_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_uneven_run(tmp_path_factory.mktemp("uneven"), [[90]], LENGTHS)[1]


def heard(minibatches: Sequence[Minibatch]) -> Heard:
    """Count the frames with a target by their features."""
    frames = Heard()
    for minibatch in minibatches:
        has_target = minibatch.targets.probabilities[..., 0] > 0
        frames.update(tuple(row.tolist()) for row in minibatch.features[has_target])
    return frames


def read_some(
    group: ProcessGroup, run_uri: str, most: int, state: dict[str, Any] | None
) -> tuple[int, Heard, dict[str, Any]]:
    """Read at most so many minibatches of this rank from a place on; return the next place."""
    dataset = PartitionDataset(run_uri, group, SETTINGS)
    if state is not None:
        dataset.load_state_dict(state)
    minibatches = []
    for minibatch in dataset:
        minibatches.append(minibatch)
        if len(minibatches) == most:
            break
    return len(minibatches), heard(minibatches), dataset.state_dict()


def test_ranks_are_given_as_many_and_each_frame_once_a_pass(run_uri: str) -> None:
    """Four ranks of uneven data end together; over both passes each frame is heard twice."""
    alone = simulate_ranks(1, read_some, run_uri, 10_000, None)[0]
    found = simulate_ranks(4, read_some, run_uri, 10_000, None)
    assert len({count for count, _, _ in found}) == 1
    assert sum((frames for _, frames, _ in found), Heard()) == alone[1]
    assert set(alone[1].values()) == {2}
    assert sum(alone[1].values()) == 2 * sum(n // 3 for part in LENGTHS for n in part)


@pytest.mark.parametrize("stops", [(3,), (2, 4), (9,)])
def test_a_place_is_resumed_on_other_ranks(run_uri: str, stops: tuple[int, ...]) -> None:
    """Four ranks, then two, then four: no frame is lost or repeated, in the middle of a pass."""
    whole = simulate_ranks(1, read_some, run_uri, 10_000, None)[0][1]
    total, state = Heard(), None
    for number, most in enumerate((*stops, 10_000)):
        found = simulate_ranks((4, 2)[number % 2], read_some, run_uri, most, state)
        states = [each for _, _, each in found]
        assert all(each == states[0] for each in states)  # any rank's will do
        state = states[-1]
        total += sum((frames for _, frames, _ in found), Heard())
    assert total == whole


def test_targets_are_the_stored_logits_and_log_z(run_uri: str) -> None:
    """exp(logits - log Z) of a whole utterance are the teacher's own probabilities."""
    settings = ReadingSettings(minibatch_frames=100_000, whole_utterances=True)
    with process_group.open_world() as group:
        dataset = PartitionDataset(run_uri, group, settings)
        minibatches = list(DataLoader(dataset, batch_size=None))
    rows = {}
    for output in read_manifest(dataset.dataset.store, run_uri, PARTITIONS_STEP).outputs:
        for row in read_partition(read_output(dataset.dataset.store, run_uri, output)):
            rows[float(row.features[0, 0])] = row
    seen = set()
    for minibatch in minibatches:
        targets = minibatch.targets
        assert isinstance(targets, StoredTargets)
        own = (targets.logits - targets.log_z[..., None]).exp()
        for number, length in enumerate(minibatch.lengths.tolist()):
            row = rows[float(minibatch.features[number, 0, 0])]
            seen.add(row.utterance_id)
            expected = best_probabilities(row.targets)
            np.testing.assert_allclose(own[number, :length], expected, rtol=1e-5)
            assert targets.senones[number, :length].tolist() == row.targets.senones.tolist()
    assert len(seen) == len(rows) == sum(map(len, LENGTHS))


def test_worker_processes_are_refused(run_uri: str) -> None:
    """A worker would read ahead of the place that state_dict names."""
    with process_group.open_world() as group:
        loader = DataLoader(PartitionDataset(run_uri, group), batch_size=None, num_workers=1)
        with pytest.raises(ValueError, match="num_workers of the DataLoader: need 0"):
            next(iter(loader))


def test_a_place_of_other_settings_is_refused(run_uri: str) -> None:
    """Another seed would make another order of the rest."""
    with process_group.open_world() as group:
        state = PartitionDataset(run_uri, group, SETTINGS).state_dict()
        other = PartitionDataset(run_uri, group, ReadingSettings(seed=6))
        with pytest.raises(ValueError, match=r"'seed': 5.*'seed': 6.*need the same"):
            other.load_state_dict(state)


def test_the_state_survives_a_checkpoint(run_uri: str, tmp_path: Path) -> None:
    """torch.save and a load of plain values alone give the same place."""
    with process_group.open_world() as group:
        dataset = PartitionDataset(run_uri, group, SETTINGS)
        for _, _ in zip(range(3), dataset, strict=False):
            pass
        torch.save(dataset.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        again = PartitionDataset(run_uri, group, SETTINGS)
        again.load_state_dict(state)
        rest = [heard([minibatch]) for minibatch in again]
        assert rest == [heard([minibatch]) for minibatch in dataset]
