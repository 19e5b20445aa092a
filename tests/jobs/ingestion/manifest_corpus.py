"""A folder of audio and a run beside it, into which jobs ingest manifests."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from pipeline.metadata import read_records
from pipeline.records import Utterance
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from tests.job_programs import RunJob
from tests.whole_path.processes import TINY

PLACED = ("--placements", "clean,DP1,DP3", "--heldout-placements", "DP2,DP5")
KEPT = ("utterance_id", "speaker_id", "duration_s", "locale", "text", "placement", "stream")


class Corpus:
    """Corpus is a folder of audio, a run beside it, and the program's arguments."""

    def __init__(self, folder: Path, run_job: RunJob) -> None:
        self.audio, self.run_uri = folder / "audio", str(folder / "run")
        self.audio.mkdir()
        self._run_job = run_job
        self.store = ObjectStore((str(folder),))

    def job(self, name: str, *options: str) -> Any:
        settings = [f'corpus.audio_prefixes=["{self.audio}"]', "selection.hours=0"]
        given = [part for each in settings for part in ("--set", each)]
        return self._run_job(name, "--recipe", str(TINY), "--run", self.run_uri, *given, *options)

    def ingest(self, *options: str) -> Manifest:
        said = self.job("ingest", "--set", "loss_budget=0.9", *options)
        assert said.code == 0, said.err
        return read_manifest(self.store, self.run_uri, "ingest")

    def records(self, subset: str = "unlabelled") -> list[Utterance]:
        return self.records_at(f"{self.run_uri}/corpus", subset)

    def records_at(self, corpus_uri: str, subset: str) -> list[Utterance]:
        found: list[Utterance] = []
        for each in self.store.list(f"{corpus_uri}/metadata/{subset}"):
            assert "/date=" in each.uri
            assert "/speaker_bucket=" in each.uri
            for _, record in read_records(self.store.get(each.uri), each.uri):
                assert isinstance(record, Utterance)
                found.append(record)
        return sorted(found, key=lambda record: record.utterance_id)

    def ledger(self) -> list[dict[str, Any]]:
        manifest = read_manifest(self.store, self.run_uri, "ingest")
        return [
            json.loads(line)
            for output in manifest.ledgers
            for line in read_output(self.store, self.run_uri, output).splitlines()
        ]


def write_lines(path: Path, rows: Sequence[object]) -> str:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def manifest_of(corpus: Corpus, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return write_lines(corpus.audio.parent / name, [dict(row) for row in rows])


def row(name: str, duration_s: float = 0.5, **more: object) -> dict[str, Any]:
    """Describe the audio file of this name, whose speaker the name begins with."""
    spoken = {"utterance_id": Path(name).stem, "speaker_id": name[:3], "text": "HELLO WORLD"}
    return {**spoken, "audio_uri": f"audio/{name}", "duration_s": duration_s, **more}


def ingest_tables(corpus: Corpus, given: Mapping[str, str], *options: str) -> Manifest:
    """Ingest tables by subset."""
    named = [part for subset, uri in given.items() for part in ("--manifest", f"{subset}={uri}")]
    return corpus.ingest(*named, "--format", "table", *options)


def records_of(corpus: Corpus, *subsets: str) -> dict[str, Utterance]:
    return {
        each.utterance_id: each
        for subset in subsets or ("labelled", "unlabelled", "heldout", "dev")
        for each in corpus.records(subset)
    }


def stored(corpus: Corpus, record: Utterance) -> bytes:
    """Read a version's audio from the corpus, or where the manifest named it."""
    return corpus.store.get(join_uri(f"{corpus.run_uri}/corpus", record.audio_uri))


def tree(corpus: Corpus) -> dict[str, bytes]:
    uri = f"{corpus.run_uri}/corpus"
    found = corpus.store.list(uri)
    return {each.uri.removeprefix(uri): corpus.store.get(each.uri) for each in found}
