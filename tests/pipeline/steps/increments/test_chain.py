"""A chain of nightly increments has the utterances, and the bytes, of one run over all nights."""

import numpy as np
import pytest

from pipeline.audit.verify import verify_run
from pipeline.filters import SelectionFilters
from pipeline.records import Tally, parse_utterance
from pipeline.runs import engine
from pipeline.runs.increment import Bases, read_bases
from pipeline.runs.manifest import (
    Manifest,
    OutputsInParts,
    manifest_uri,
    own_outputs,
    read_manifest,
    read_output,
)
from pipeline.shards.partitions import read_partition
from pipeline.steps.selection.id_index import find_named
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.pipeline.steps.increments.nights import SUBSET, Nights, three_nights
from training.certificate import ProvenanceReader, read_provenance


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Return a chain of three nights, and one run over all of them."""
    return three_nights(tmp_path_factory.mktemp("chain"))


def manifest(nights: Nights, name: str, step: str) -> Manifest:
    """Read a manifest of the unlabelled subset."""
    return read_manifest(nights.store, nights.run_uri(name), f"{step}/{SUBSET}")


def test_a_stream_that_begins_again_would_have_other_bytes(nights: Nights) -> None:
    """The test above can fail: without the base's means a night has other frames."""
    alone = Nights(nights.store, nights.corpus_uri, nights.folder)
    alone.select("alone", date_folders=True, filters=SelectionFilters(created_from="2026-01-03"))
    alone.extract("alone")
    whole, of_night = nights.features("whole"), alone.features("alone")
    assert {name for name in of_night if of_night[name] != whole[name]} == {
        f"{speaker}-03-{number}" for speaker in ("ann", "doris") for number in range(3)
    }


def test_targets_of_a_chain_are_those_of_one_run(nights: Nights) -> None:
    """Each training row has the same frames, as streams continue, and the same k-best logits."""
    whole, chain = nights.targets("whole"), nights.targets("night-3")
    assert chain.keys() == whole.keys()
    assert len(whole) == 27
    for name, (frames, kbest) in whole.items():
        assert chain[name][0] == frames
        np.testing.assert_array_equal(chain[name][1].senones, kbest.senones)
        np.testing.assert_array_equal(chain[name][1].logits, kbest.logits)


@pytest.mark.parametrize("step", ["selection", "features", "targets", "partitions"])
def test_what_a_base_wrote_is_not_written_again(nights: Nights, step: str) -> None:
    """An increment's manifest names each earlier object with the run that wrote it."""
    last = manifest(nights, "night-3", step)
    earlier = {
        (nights.run_uri(name), output.key)
        for name in ("night-1", "night-2")
        for output in own_outputs(manifest(nights, name, step).outputs)
    }
    assert {(each.run, each.key) for each in last.outputs if each.run} == earlier
    own = own_outputs(last.outputs)
    assert own
    stored = {each.uri for each in nights.store.list(nights.run_uri("night-3"))}
    assert {each.uri(nights.run_uri("night-3")) for each in own} <= stored


@pytest.mark.parametrize("step", ["selection", "features", "targets", "partitions"])
def test_the_totals_are_those_of_one_run(nights: Nights, step: str) -> None:
    """In, out, quarantined and unselected of the union equal those of one run over all."""
    last, whole = manifest(nights, "night-3", step), manifest(nights, "whole", step)
    for name in ("tally_in", "tally_out", "quarantined", "unselected"):
        assert getattr(last, name) == getattr(whole, name)
    assert last.extends is not None
    assert last.extends.tally_out == manifest(nights, "night-2", step).tally_out


def test_moments_of_a_chain_are_those_of_one_run(nights: Nights) -> None:
    """The global mean and variance differ in the last bits alone, as sums have another order."""
    chain, whole = (
        manifest(nights, name, "features").statistics["moments"] for name in ("night-3", "whole")
    )
    assert chain["count"] == whole["count"]
    np.testing.assert_allclose(chain["sum"], whole["sum"], rtol=1e-12)


def test_partitions_of_all_nights_are_in_one_order(nights: Nights) -> None:
    """An increment's partitions are not behind the base's: an epoch mixes the nights."""
    last = manifest(nights, "night-3", "partitions")
    runs = [each.run for each in last.outputs]
    assert runs != sorted(runs)
    assert runs != sorted(runs, reverse=True)


def test_partitions_lead_to_the_files_of_their_night(nights: Nights) -> None:
    """Each run has numbered its own tasks: a partition's rows are in the files named for it."""
    run_uri = nights.run_uri("night-3")
    provenance = read_provenance(nights.store, run_uri)
    files = [
        read_output(nights.store, run_uri, each).decode().splitlines()
        for each in provenance.selection
    ]
    reader = ProvenanceReader(nights.store, run_uri, provenance)
    for partition in manifest(nights, "night-3", "partitions").outputs:
        rows = read_partition(read_output(nights.store, run_uri, partition))
        for row, number in zip(rows, reader.read(partition)["file"], strict=True):
            found = {parse_utterance(line).utterance_id for line in files[number]}
            assert row.utterance_id in found
    assert len(provenance.durations_ms()) == len(files)


def test_a_union_in_parts_is_the_same(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists are stored in parts of the increment, with each object's run."""
    set_small_bounds(monkeypatch, max_listed=1)
    monkeypatch.setattr(engine, "MAX_LISTED", 1)
    nights.select("parts", "night-1")
    nights.extract("parts")
    partitions = nights.label("parts", "night-1")
    for step in ("selection", "features", "targets", "partitions"):
        found = manifest(nights, "parts", step)
        assert isinstance(found.outputs, OutputsInParts)
        assert {each.run for each in found.outputs} == {"", nights.run_uri("night-1")}
        assert sum((each.tally for each in found.outputs), Tally()) == found.tally_out
    selection = manifest(nights, "parts", "selection")
    for wanted in ("bert-02-0", "ann-01-0"):
        named = find_named(nights.store, nights.run_uri("parts"), selection, wanted)
        files = [each for each in selection.outputs if each.key in named]
        texts = [read_output(nights.store, nights.run_uri("parts"), each) for each in files]
        assert [wanted.encode() in text for text in texts] == [True]
    assert nights.features("parts") == nights.features("whole")
    assert len(nights.targets("parts")) == partitions.tally_out.utterances == 27


def test_a_finished_increment_is_found(nights: Nights) -> None:
    """Each step, run again, reads its manifest, and writes nothing; the run knows its bases."""
    before = {each.uri: each.etag for each in nights.store.list(nights.run_uri("night-3"))}
    nights.select("night-3", "night-2")
    nights.extract("night-3")
    nights.label("night-3", "night-2")
    assert {each.uri: each.etag for each in nights.store.list(nights.run_uri("night-3"))} == before
    found = read_bases(nights.store, nights.run_uri("night-3"))
    assert found == Bases((nights.run_uri("night-2"), nights.run_uri("night-1")))


def test_verify_finds_nothing_in_a_chain(nights: Nights) -> None:
    """Neither in the first run nor in the last: each is verified for its own objects."""
    for name in ("night-1", "night-3"):
        found = verify_run(nights.store, nights.run_uri(name), nights.corpus_uri, lambda *_: None)
        assert (found.findings, found.orphans) == ((), ())
    # The increment's manifest names the base's by digest.
    uri = manifest_uri(nights.run_uri("night-2"), f"features/{SUBSET}")
    data = nights.store.get(uri)
    nights.store.put(uri, data.replace(b"{", b"{ ", 1))
    found = verify_run(nights.store, nights.run_uri("night-3"), nights.corpus_uri, lambda *_: None)
    nights.store.put(uri, data)
    assert [each.object for each in found.findings] == [uri]
