"""Ingest's driver holds no list of outputs: tasks fold their commits, and find what is foreign."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.verify import verify_run
from pipeline.runs import engine
from pipeline.runs.commit import RecipeConflictError
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import Manifest as StepManifest
from pipeline.runs.manifest import OutputsInParts, manifest_uri, read_manifest
from pipeline.steps.ingestion import manifest_rows
from pipeline.steps.ingestion.ingest_manifests import Manifest, ManifestIngestion, ingest_manifests
from pipeline.steps.ingestion.manifest_records import RecordRules
from pipeline.steps.ingestion.tables import Table
from pipeline.steps.selection import buckets
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.small_corpus import killed_at, serially

NUM_ROWS, NUM_DAYS, NUM_PIECES = 60, 6, 5
TEXTS = {"lexicon.txt": b"yes Y EH S\n", "language_model.txt": b"yes yes\n"}


def row(number: int) -> dict[str, Any]:
    duration_s = 0 if number % 20 == 7 else 1.5
    return {
        "utterance_id": f"u{number:03d}",
        "speaker_id": f"s{number % 7}",
        "duration_s": duration_s,
        "created_at": f"2026-01-0{1 + number % NUM_DAYS}T12:00:00+00:00",
        "audio_uri": f"audio/{number}.flac",
    }


class Corpus:
    """Corpus is a manifest of five pieces in a folder, and a run there that ingests it."""

    def __init__(self, folder: Path, run: str) -> None:
        self.store, self.run_uri = ObjectStore((str(folder),)), str(folder / run)
        self.uri = join_uri(self.run_uri, "corpus")
        lines = [json.dumps(row(number)) + "\n" for number in range(NUM_ROWS)]
        self.manifest_uri = str(folder / "m.jsonl")
        self.store.put(self.manifest_uri, "".join(lines).encode())

    def ingest(self, distribute: Distribute = serially, subset: str = "unlabelled") -> StepManifest:
        named = Manifest(subset, self.manifest_uri, Table())
        ingestion = ManifestIngestion(self.store, [named], RecordRules("en", 4), {}, TEXTS)
        place = self.store, self.run_uri, self.uri
        return ingest_manifests(*place, ingestion, 1.0, distribute).manifest


@pytest.fixture(autouse=True)
def five_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = sum(len(json.dumps(row(number))) + 1 for number in range(NUM_ROWS))
    monkeypatch.setattr(manifest_rows, "PIECE_BYTES", -(-num_bytes // NUM_PIECES))


@pytest.fixture
def small(tmp_path: Path) -> Corpus:
    """Ingested as a small step is."""
    made = Corpus(tmp_path, "small")
    made.store.put(join_uri(made.uri, "metadata/_SUCCESS"), b"")
    made.ingest()
    return made


@pytest.fixture
def large(small: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """To be ingested in parts of three outputs, one commit folded at a time."""
    del small  # made within the usual bounds
    set_small_bounds(monkeypatch)
    monkeypatch.setattr(engine, "GROUP_BYTES", 1)
    monkeypatch.setattr(buckets, "OBJECTS_AT_A_TIME", 4)
    return Corpus(tmp_path, "large")


def test_a_manifest_in_parts_is_that_of_the_small_run(small: Corpus, large: Corpus) -> None:
    """The same objects in the same order, texts first, with the same ledgers and tallies."""
    plain, parted = read_manifest(small.store, small.run_uri, "ingest"), large.ingest()
    assert isinstance(plain.outputs, tuple)
    assert isinstance(parted.outputs, OutputsInParts)
    assert len(parted.outputs) > NUM_DAYS * NUM_PIECES
    assert [output.key for output in parted.outputs][:2] == list(TEXTS)
    assert parted.quarantined.utterances == 3
    same = replace(parted, outputs=tuple(parted.outputs), ledgers=tuple(parted.ledgers))
    assert same.to_bytes() == plain.to_bytes()
    found = verify_run(large.store, large.run_uri, large.uri, lambda *_: None, reads_audio=False)
    assert (found.findings, found.orphans, found.unfinished) == ((), (), ())


def results_of(corpus: Corpus) -> tuple[list[list[Any]], StepManifest]:
    """Ingest; return what the tasks of each call returned, and the manifest."""
    calls: list[list[Any]] = []

    def seen(elements: Sequence[Any], function: Callable[[Any], Any], name: str) -> list[Any]:
        calls.append(found := serially(elements, function, name))
        return found

    manifest = corpus.ingest(seen)
    return calls, manifest


def test_a_driver_receives_the_outputs_of_few_tasks_at_a_time(large: Corpus) -> None:
    """Tasks return losses, folds of one commit a time, and 8 bytes an output; nothing else."""
    calls, manifest = results_of(large)
    kinds = [{type(each).__name__ for each in found} for found in calls]
    assert kinds == [{"str"}, {"Loss"}, {"Loss"}, *[{"_Fold"}] * NUM_PIECES, {"ndarray"}]
    folds = [fold for found in calls[3:-1] for fold in found]
    assert [fold.num_tasks for fold in folds] == [1] * NUM_PIECES
    lines = sum(fold.outputs.count(b"\n") for fold in folds)
    assert lines == len(manifest.outputs) - len(TEXTS)
    assert sum(each.nbytes for each in calls[-1]) == 8 * len(manifest.outputs)


def test_commits_are_folded_by_their_bytes(large: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that are small together are one group, whatever their number below the bound."""
    monkeypatch.setattr(engine, "GROUP_BYTES", 2**20)
    folds = [each for found in results_of(large)[0] for each in found]
    assert [each.num_tasks for each in folds if type(each).__name__ == "_Fold"] == [2, 2, 1]


@pytest.mark.parametrize("kills_at", [2, 8, 12])
def test_a_killed_ingest_resumes_to_the_same_bytes(
    large: Corpus, tmp_path: Path, kills_at: int
) -> None:
    """Killed in a wave, between two, while commits are folded or names are hashed."""
    undisturbed = Corpus(tmp_path, "undisturbed")
    undisturbed.ingest()
    # One manifest to digest, five pieces, five commits, then the parts.
    with pytest.raises(KeyboardInterrupt):
        large.ingest(killed_at(kills_at))
    made = large.ingest()
    assert [part.key for part in made.parts]
    for key in ("ingest/manifest.json", *(part.key for part in made.parts)):
        ours, theirs = (join_uri(each.run_uri, key) for each in (large, undisturbed))
        assert large.store.get(ours) == large.store.get(theirs)


@pytest.mark.parametrize(
    "key",
    [
        "unlabelled/date=2026-01-03/speaker_bucket=00/00-unlabelled-000001-0123456789abcdef.jsonl.gz",
        "labelled/date=2026-01-03/speaker_bucket=00/other.jsonl",
        "zebra.jsonl",
    ],
)
@pytest.mark.parametrize("size", ["small", "large"])
def test_foreign_metadata_is_refused(key: str, size: str, request: pytest.FixtureRequest) -> None:
    """Also an object of an attempt at a task of ours that was killed, and made other bytes."""
    corpus: Corpus = request.getfixturevalue(size)
    uri = join_uri(corpus.uri, "metadata", key)
    corpus.store.put(uri, b"{}\n")
    corpus.store.delete(manifest_uri(corpus.run_uri, "ingest"))
    with pytest.raises(ValueError, match=f"^{uri} is from another corpus than these manifests"):
        corpus.ingest()
    assert not corpus.store.exists(manifest_uri(corpus.run_uri, "ingest"))
    corpus.store.delete(uri)
    assert corpus.ingest().tally_in.utterances == NUM_ROWS


def test_commits_of_other_manifests_are_refused(large: Corpus) -> None:
    """Though none of their tasks has the name of one of ours."""

    def killed(elements: Sequence[Any], function: Callable[[Any], Any], name: str) -> list[Any]:
        found = serially(elements, function, name)
        if name != "digest the manifests":
            raise KeyboardInterrupt
        return found

    with pytest.raises(KeyboardInterrupt):
        large.ingest(killed)
    large.store.put(large.manifest_uri, json.dumps(row(1)).encode())
    with pytest.raises(RecipeConflictError, match="committed under another recipe or other inputs"):
        large.ingest(killed, "heldout")
