"""The torch dataset gives all ranks as many minibatches, each row once, and resumes on others."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
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
from tests.pipeline.steps.increments.nights import Nights
from tests.training.data.uneven_run import NUM_SENONES, write_uneven_run
from tests.training.forked_programs import Program, run_forked, run_on_ranks
from training.certificate import ProvenanceReader, read_provenance
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
    group: ProcessGroup,
    run_uri: str,
    most: int,
    state: dict[str, Any] | None,
    settings: ReadingSettings = SETTINGS,
) -> tuple[int, Heard, dict[str, Any]]:
    """Read at most so many minibatches of this rank from a place on; return the next place."""
    dataset = PartitionDataset(run_uri, group, settings)
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


def read_thrice(group: ProcessGroup, run_uri: str) -> tuple[list[Minibatch], list[Minibatch]]:
    """Read at once, and in three parts: each resumes where the one before was left."""
    parts: list[Minibatch] = []
    state = PartitionDataset(run_uri, group, SETTINGS).state_dict()
    for most in (3, 4, 10_000):
        dataset = PartitionDataset(run_uri, group, SETTINGS)
        minibatches = iter(DataLoader(dataset, batch_size=None))
        dataset.load_state_dict(state)  # not too late: nothing was read yet
        parts += islice(minibatches, most)
        state = dataset.state_dict()
    return list(PartitionDataset(run_uri, group, SETTINGS)), parts


def test_a_second_resume_goes_on_where_the_first_was_left(run_uri: str) -> None:
    """A loaded place moves on, so both ranks are given the minibatches of one reading, in order."""
    for whole, parts in simulate_ranks(2, read_thrice, run_uri):
        assert len(whole) == len(parts) > 7
        for expected, given in zip(whole, parts, strict=True):
            assert torch.equal(expected.features, given.features)
            assert torch.equal(expected.targets.probabilities, given.targets.probabilities)


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


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Return two nights, and one run over both."""
    folder: Path = tmp_path_factory.mktemp("nights")
    found = Nights.at(str(folder))
    for day, extends in ((1, ""), (2, "night-1")):
        found.add(day, ["ann", "bert"])
        found.select(f"night-{day}", extends)
        found.extract(f"night-{day}")
        found.label(f"night-{day}", extends)
    found.select("whole")
    found.extract("whole")
    found.label("whole")
    return found


def test_an_epoch_has_the_frames_of_all_nights(nights: Nights) -> None:
    """Each frame once, as in one run over both nights; its store reaches the base."""
    once = replace(SETTINGS, num_passes=1)
    chain, whole = (
        simulate_ranks(1, read_some, nights.run_uri(name), 10_000, None, once)[0][1]
        for name in ("night-2", "whole")
    )
    assert chain == whole
    assert set(chain.values()) == {1}


def test_a_place_in_other_partitions_is_refused(nights: Nights) -> None:
    """It would leave out rows of a later night without a word."""
    with process_group.open_world() as group:
        state = PartitionDataset(nights.run_uri("night-1"), group, SETTINGS).state_dict()
        with pytest.raises(ValueError, match="other partitions"):
            PartitionDataset(nights.run_uri("night-2"), group, SETTINGS).load_state_dict(state)


def test_rows_of_all_nights_have_a_provenance(nights: Nights) -> None:
    """The certificate finds each row's file and line, also of a base's partition."""
    run_uri = nights.run_uri("night-2")
    reader = ProvenanceReader(nights.store, run_uri, read_provenance(nights.store, run_uri))
    outputs = read_manifest(nights.store, run_uri, PARTITIONS_STEP).outputs
    assert sum(len(reader.read(each)) for each in outputs) == 12


ROOT = Path(__file__).parents[3]


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    """In thirty lines or so two ranks stop in the middle, one goes on there, and the loss falls."""
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "training/data/README.md").read_text(), re.S
    )
    assert len([line for line in example.splitlines() if line]) <= 35
    lengths = [[90 + 30 * n for n in range(6)] for _ in range(8)]
    _, run_uri = write_uneven_run(tmp_path / "run", [[90]], lengths)
    script, state = tmp_path / "example.py", tmp_path / "state.pt"
    stop = "    for minibatch in DataLoader(dataset, batch_size=None):\n"
    assert stop in example
    first = example.replace(
        stop,
        f"{stop}        if dataset.state_dict()['cursor']['num_steps'] == 3:\n            break\n",
    )
    arguments = (run_uri, str(NUM_SENONES), str(state))
    script.write_text(first)
    run_on_ranks(2, script, arguments, tmp_path)
    cursor = torch.load(state, weights_only=True)["data"]["cursor"]
    assert (cursor["sub_epoch"], cursor["num_steps"], len(cursor["counts"])) == (0, 2, 2)
    script.write_text(example)
    (done,) = run_forked([Program(script, arguments, tmp_path)])
    assert done.code == 0, done.err
    assert float(done.out) < 1.75  # log 6 = 1.79 before any step
    after = torch.load(state, weights_only=True)["data"]["cursor"]
    assert after["sub_epoch"] == 1
