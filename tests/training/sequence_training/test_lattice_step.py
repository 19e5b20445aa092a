"""The lattice step loses no utterance, repeats its bytes on any ranks, and adds references."""

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.audit.verify import Expectation, verify_run
from pipeline.runs import engine
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.manifest import Manifest, OutputsInParts, read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, BASELINE, task_name
from pipeline.shards import LatticeRow, PartitionRow, read_lattices
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.training.sequence_training.toy_run import (
    CONFIG,
    NUM_ROWS,
    SCALE,
    UNREADABLE,
    rows_of,
    write_toy_run,
)
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.sequence_training import lattices as lattices_module
from training.sequence_training.lattice_paths import has_path
from training.sequence_training.lattices import LatticeTask, generate_lattices
from training.settings.decoding import LatticeConfig

WIDE = LatticeConfig(ngram_order=1, beam=30.0, lattice_beam=8.0)


Place = tuple[ObjectStore, str, str]


def decode(
    group: ProcessGroup, place: tuple, config: LatticeConfig = WIDE, loss_budget: float = 0.2
) -> Manifest:
    return generate_lattices(*place, BASELINE, CONFIG, config, SCALE, loss_budget, group).manifest


def lattices(store: ObjectStore, run_uri: str, manifest: Manifest) -> list[list[LatticeRow]]:
    return [read_lattices(read_output(store, run_uri, each)) for each in manifest.outputs]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A toy run with the lattices that one rank has made, and their manifest."""
    folder = tmp_path_factory.mktemp("toy")
    place = write_toy_run(folder)
    return folder, simulate_ranks(1, partial(decode, place=place))[0]


@pytest.fixture
def place(decoded: tuple[Path, Manifest], tmp_path: Path) -> Place:
    """A copy of that run: the store, the run and the corpus."""
    folder = Path(shutil.copytree(decoded[0], tmp_path / "toy"))
    run_uri, corpus_uri = str(folder / "run"), str(folder / "corpus")
    return ObjectStore((run_uri, corpus_uri)), run_uri, corpus_uri


@pytest.fixture
def undecoded(place: Place) -> Place:
    """The same without lattices."""
    shutil.rmtree(Path(place[1]) / "lattices")
    return place


def test_every_utterance_is_decoded_or_in_the_ledger(
    undecoded: Place, decoded: tuple[Path, Manifest]
) -> None:
    """On fewer and on more ranks than partitions, to the same byte; a lattice has its reference."""
    store, run_uri, _ = undecoded
    (manifest, *others) = simulate_ranks(3, partial(decode, place=undecoded))
    assert manifest.to_bytes() == decoded[1].to_bytes()
    assert all(each == manifest for each in others)
    found = lattices(store, run_uri, manifest)
    for partition, shard in enumerate(found):
        rows = rows_of(partition)
        expected = [number for number, row in enumerate(rows) if row.utterance_id != UNREADABLE]
        assert [each.row for each in shard] == expected
        for each in shard:
            assert each.utterance_id == rows[each.row].utterance_id
            assert has_path(each.lattice, rows[each.row].targets.senones[1::3])
    (ledger,) = manifest.ledgers
    assert UNREADABLE in read_output(store, run_uri, ledger).decode()
    assert manifest.tally_in == read_manifest(store, run_uri, ALIGNMENT_STEP).tally_out
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined
    assert manifest.tally_out.utterances == sum(NUM_ROWS) - 1
    assert manifest.statistics["arcs_per_frame"] > 2


def test_a_density_is_reached_on_any_ranks(place: Place) -> None:
    """The sample's beam has the density nearest to it, here of all rows; shards are equal bytes."""
    store, run_uri, _ = place
    dense = LatticeConfig(ngram_order=1, beam=30.0, lattice_beam=9.0, density=6.0)
    manifests = []
    for num_ranks in (1, 3):
        shutil.rmtree(Path(run_uri) / "lattices")
        made = simulate_ranks(num_ranks, partial(decode, place=place, config=dense))
        manifests.append(made[0])
    assert manifests[0].to_bytes() == manifests[1].to_bytes()
    statistics = manifests[0].statistics
    assert statistics["arcs_per_frame"] == pytest.approx(6.0, rel=0.1)
    assert 1 < statistics["lattice_beam"] < 9
    for partition, shard in enumerate(lattices(store, run_uri, manifests[0])):
        for each in shard:
            senones = rows_of(partition)[each.row].targets.senones[1::3]
            assert has_path(each.lattice, senones), each.utterance_id


def test_lattices_of_many_partitions_fold_their_commits(
    undecoded: Place, decoded: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs in parts; all else is as in a driver that holds the commits, as this one does not."""
    held = decoded[1]
    set_small_bounds(monkeypatch, max_listed=1)
    monkeypatch.delattr(engine, "committed_tasks")  # reads all commits
    folded = simulate_ranks(2, partial(decode, place=undecoded))[0]
    assert isinstance(folded.outputs, OutputsInParts)
    assert tuple(folded.outputs) == held.outputs
    assert len(held.outputs) > 1
    assert replace(folded, outputs=held.outputs).to_bytes() == held.to_bytes()


def test_a_finished_partition_is_not_decoded_again(
    place: Place, decoded: tuple[Path, Manifest]
) -> None:
    """After a stop, commits are found; a finished step is found by its manifest."""
    folder = Path(place[1]) / "lattices" / BASELINE
    (folder / "manifest.json").unlink()
    (folder / "commits" / "000001.json").unlink()
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("000000*")}
    assert simulate_ranks(2, partial(decode, place=place))[0] == decoded[1]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("000000*")} == times
    assert simulate_ranks(1, partial(generate_again, place=place)) == [True]


def generate_again(group: ProcessGroup, place: tuple) -> bool:
    return generate_lattices(*place, BASELINE, CONFIG, WIDE, SCALE, 0.2, group).was_finished


def test_a_narrow_search_still_has_the_reference(undecoded: Place) -> None:
    """A beam that keeps only the best path has the reference added to each lattice."""
    narrow = LatticeConfig(ngram_order=1, beam=30.0, lattice_beam=0.001)
    manifest = simulate_ranks(1, partial(decode, place=undecoded, config=narrow))[0]
    shards = lattices(*undecoded[:2], manifest)
    assert sum(map(len, shards)) == sum(NUM_ROWS) - 1
    for partition, shard in enumerate(shards):
        rows = rows_of(partition)
        for each in shard:
            assert has_path(each.lattice, rows[each.row].targets.senones[1::3]), each.utterance_id
    reads_once = [np.unique(each.lattice.level_frames).size for each in shards[0]]
    assert all(num_frames > 1 for num_frames in reads_once)
    assert 0 < manifest.statistics["num_references_added"] <= sum(NUM_ROWS) - 1
    assert manifest.statistics["arcs_per_frame"] <= 2


def test_an_utterance_that_a_step_loses_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verify compares the lattices and their ledger with the alignments, to the utterance."""
    store, run_uri, corpus_uri = place

    def findings() -> list[str]:
        expectation = Expectation()
        found = verify_run(store, run_uri, corpus_uri, lambda *_: None, expectation).findings
        return [each.found for each in found if each.object.startswith("lattices/")]

    assert findings() == []
    shutil.rmtree(Path(run_uri) / "lattices")
    whole = lattices_module.read_partition
    monkeypatch.setattr(lattices_module, "read_partition", lambda data: whole(data)[:-1])
    simulate_ranks(1, partial(decode, place=place, loss_budget=0.3))
    found = findings()
    assert any("2 lost: utterance-0-4, utterance-1-2" in each for each in found), found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_many_losses_end_the_step_before_all_is_decoded(
    undecoded: Place, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """The first partition's loss ends all ranks; the second is neither decoded nor waited for."""
    whole, is_over = lattices_module.decoded_rows, threading.Event()

    def slow_second(rows: Sequence[PartitionRow], task: LatticeTask) -> Iterator:
        if task.name == task_name(1):
            is_over.wait(60)
        return whole(rows, task)

    monkeypatch.setattr(lattices_module, "decoded_rows", slow_second)
    began = time.monotonic()
    with pytest.raises(LossBudgetExceededError, match=r"1 of 8 .*10.00%.*lattice_failed"):
        simulate_ranks(num_ranks, partial(decode, place=undecoded, loss_budget=0.1))
    assert time.monotonic() - began < 50
    commits = [path.name for path in (Path(undecoded[1]) / "lattices").rglob("commits/*")]
    assert commits == [f"{task_name(0)}.json"]
    is_over.set()
