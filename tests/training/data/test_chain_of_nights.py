"""Training reads the partitions of a chain of nights as those of one run, and resumes in them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit.provenance import read_provenance
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import PARTITIONS_STEP
from tests.pipeline.steps.increments.nights import Nights
from training.certificate import ProvenanceReader
from training.data.partition_dataset import PartitionDataset, ReadingSettings
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks

SETTINGS = ReadingSettings(minibatch_frames=64, num_sub_epochs=2, seed=5)
Heard = Counter[tuple[float, ...]]


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


def read_some(
    group: ProcessGroup, run_uri: str, most: int, state: dict[str, Any] | None
) -> tuple[Heard, dict[str, Any]]:
    """Count the frames with a target in at most so many minibatches from a place on."""
    dataset = PartitionDataset(run_uri, group, SETTINGS)
    if state is not None:
        dataset.load_state_dict(state)
    heard = Heard()
    for number, minibatch in enumerate(dataset, 1):
        has_target = minibatch.targets.probabilities[..., 0] > 0
        heard.update(tuple(row.tolist()) for row in minibatch.features[has_target])
        if number == most:
            break
    return heard, dataset.state_dict()


def test_an_epoch_has_the_frames_of_all_nights(nights: Nights) -> None:
    """Each frame once, as in one run over both nights; its store reaches the base."""
    chain = simulate_ranks(1, read_some, nights.run_uri("night-2"), 10_000, None)[0][0]
    assert chain == simulate_ranks(1, read_some, nights.run_uri("whole"), 10_000, None)[0][0]
    assert set(chain.values()) == {1}


def test_training_on_a_chain_resumes_exactly(nights: Nights) -> None:
    """Two ranks stop within a sub-epoch, and one continues: no frame is lost or read twice."""
    run_uri = nights.run_uri("night-2")
    found = simulate_ranks(2, read_some, run_uri, 2, None)
    rest = simulate_ranks(1, read_some, run_uri, 10_000, found[0][1])
    total = sum((heard for heard, _ in (*found, *rest)), Heard())
    assert total == simulate_ranks(1, read_some, run_uri, 10_000, None)[0][0]


def test_rows_of_all_nights_have_a_provenance(nights: Nights) -> None:
    """The certificate finds each row's file and line, also of a base's partition."""
    run_uri = nights.run_uri("night-2")
    reader = ProvenanceReader(nights.store, run_uri, read_provenance(nights.store, run_uri))
    outputs = read_manifest(nights.store, run_uri, PARTITIONS_STEP).outputs
    assert sum(len(reader.read(each).files) for each in outputs) == 12
