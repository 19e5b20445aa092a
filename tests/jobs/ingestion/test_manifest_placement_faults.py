"""Faults of audio and rows are ledger rows; a fault of the store or a kill repeats the step."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from infra.store.object_store import join_uri
from jobs.ingest import SIMULATORS, draw
from pipeline.audio.decode import decode_audio
from pipeline.records import Tally
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import LEDGER_SUFFIX
from pipeline.steps.ingestion import ingest_manifests, placed_audio
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.placed_audio import PlacementChoice, Simulation, SubsetChoices
from pipeline.steps.ingestion.tables import Table
from tests.jobs.ingestion.manifest_corpus import (
    PLACED,
    Corpus,
    ingest_tables,
    manifest_of,
    records_of,
    row,
    stored,
    tree,
)
from tests.jobs.ingestion.test_placements import REFUSED
from tests.small_corpus import killed_at, serially

pytestmark = pytest.mark.usefixtures("without_spark", "small_acoustics")


@pytest.mark.parametrize("reason", ["missing_object", "silent"])
def test_audio_that_cannot_be_simulated_is_a_row_a_version(
    corpus: Corpus, three: dict[str, str], reason: str
) -> None:
    """Clean audio is left for extraction to judge; each simulated version is a row."""
    REFUSED[reason](corpus.audio / "bob-1.flac")
    manifest = ingest_tables(corpus, three, *PLACED)
    rows = sorted((each["utterance_id"], each["reason"]) for each in corpus.ledger())
    assert rows == [("bob-1-DP1", reason), ("bob-1-DP3", reason)]
    assert "bob-1-clean" in records_of(corpus)
    assert manifest.quarantined == Tally(2, 1000)
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined == Tally(16, 8000)


def test_rows_that_have_no_versions_are_refused(corpus: Corpus, three: dict[str, str]) -> None:
    """A recorded placement is not simulated over, and an id must leave room for a name."""
    more = [
        row("ann-1.flac", utterance_id="recorded", placement="DP3"),
        row("ann-1.flac", utterance_id="u" * 1024),
        row("ann-1.flac", utterance_id="u" * 1020),
        row("ann-1.flac", 0.1, utterance_id="short"),
        row("ann-1.flac", -1, utterance_id="bad"),
    ]
    given = {**three, "labelled": manifest_of(corpus, "more.jsonl", more)}
    manifest = ingest_tables(corpus, given, *PLACED)
    rows = corpus.ledger()
    assert sorted((each["utterance_id"][:9], each["reason"]) for each in rows) == [
        ("bad", "bad_duration"),
        ("recorded", "bad_field"),
        ("short-DP1", "duration_mismatch"),
        ("short-DP3", "duration_mismatch"),
        *[("u" * 9, "bad_field")] * 2,
    ]
    said = " ".join(each["detail"] for each in rows)
    assert "leave the field out, or ingest without --placements" in said
    for length in (1030, 1026):
        assert f"with a placement has {length} characters: need at most 1024" in said
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined
    assert not any("u" * 9 in key for key in tree(corpus))


@pytest.mark.usefixtures("three")
def test_names_that_no_object_could_have_are_hashed(corpus: Corpus) -> None:
    """Ids of any characters are stored, as the record says which object is theirs."""
    names = ["a/b", "../ann", ".hid", "ü\u200d", "a%2Fb", "n" * 250, "plain_1.x"]
    rows = [row("ann-1.flac", utterance_id=name) for name in names]
    ingest_tables(corpus, {"labelled": manifest_of(corpus, "n.jsonl", rows)}, "--placements", "DP4")
    found = records_of(corpus)
    assert found.keys() == {f"{name}-DP4" for name in names}
    for key, record in found.items():
        name = record.audio_uri.rpartition("/")[2]
        assert len(decode_audio(stored(corpus, record))) == 8000
        assert name.isascii()
        assert len(name) < 256
        assert name.startswith("plain_1.x-DP4-") == (key == "plain_1.x-DP4")


@pytest.mark.usefixtures("three")
def test_two_rows_of_an_id_replace_no_audio(corpus: Corpus) -> None:
    """Each has an object of its own; selection takes one of them, as without placements."""
    rows = [row("ann-1.flac", utterance_id="x"), row("ann-2.flac", utterance_id="x")]
    given = {"unlabelled": manifest_of(corpus, "x.jsonl", rows)}
    ingest_tables(corpus, given, "--placements", "DP4")
    first, second = corpus.records()
    assert first.utterance_id == second.utterance_id == "x-DP4"
    assert stored(corpus, first) != stored(corpus, second)
    assert corpus.job("select_utterances", "--set", "loss_budget=0.9").code == 0
    selected = read_manifest(corpus.store, corpus.run_uri, "selection/unlabelled")
    assert (selected.tally_out.utterances, selected.quarantined.utterances) == (1, 1)


def test_a_store_that_fails_is_no_row(corpus: Corpus, three: dict[str, str]) -> None:
    """A fault of the store ends the step; the next attempt makes the same corpus."""
    ingest_tables(corpus, three, *PLACED)
    expected = tree(corpus)
    corpus.run_uri += "2"
    blocked = Path(corpus.run_uri) / "corpus" / "audio"
    blocked.parent.mkdir(parents=True)
    blocked.write_bytes(b"")
    named = [part for subset, uri in three.items() for part in ("--manifest", f"{subset}={uri}")]
    said = corpus.job("ingest", "--set", "loss_budget=0.9", *named, "--format", "table", *PLACED)
    assert said.code != 0
    assert not corpus.store.exists(join_uri(corpus.run_uri, "ingest", "manifest.json"))
    assert not any(each.uri.endswith(LEDGER_SUFFIX) for each in corpus.store.list(corpus.run_uri))
    blocked.unlink()
    ingest_tables(corpus, three, *PLACED)
    assert tree(corpus) == expected


class Killed:
    """Killed is an ingest of three subsets in placements, without the program around it."""

    def __init__(self, corpus: Corpus, three: Mapping[str, str]) -> None:
        self.corpus = corpus
        named = [Manifest(subset, uri, Table()) for subset, uri in three.items()]
        choices = PlacementChoice(("clean", "DP1", "DP3"), 3), PlacementChoice(("DP2",), 1)
        simulation = Simulation(SubsetChoices(*choices, 0), partial(draw, 0), SIMULATORS)
        rules = RecordRules("en", 4)
        self.ingestion = ManifestIngestion(corpus.store, named, rules, {}, simulation=simulation)

    def ingest(self, run: str, distribute: Distribute = serially) -> dict[str, bytes]:
        """Ingest into a run; return the corpus's bytes."""
        self.corpus.run_uri = str(self.corpus.audio.parent / run)
        place = self.corpus.store, self.corpus.run_uri, f"{self.corpus.run_uri}/corpus"
        ingest_manifests.ingest_manifests(*place, self.ingestion, 0.0, distribute)
        return tree(self.corpus)


@pytest.mark.parametrize("call", [4, 10, 25, 50])
def test_a_killed_ingest_is_completed_to_the_same_bytes(
    corpus: Corpus, three: dict[str, str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed tasks are not repeated; nothing is stored or counted twice."""
    for module in (ingest_manifests, placed_audio):
        monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    killed = Killed(corpus, three)
    expected = killed.ingest("whole")
    manifest = read_manifest(corpus.store, corpus.run_uri, "ingest")
    with pytest.raises(KeyboardInterrupt):
        killed.ingest("killed", killed_at(call))
    assert killed.ingest("killed") == expected
    again = read_manifest(corpus.store, corpus.run_uri, "ingest")
    assert list(again.outputs) == list(manifest.outputs)
    assert again.tally_out == manifest.tally_out == Tally(14, 7000)
