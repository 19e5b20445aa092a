"""Nights of a small corpus, and a chain of runs that make training partitions of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from pipeline.kbest import KBest
from pipeline.runs.increment import BaseStep, record_bases
from pipeline.runs.manifest import Manifest, own_outputs, read_with_digest
from pipeline.settings import ExtractionConfig, RepartitionConfig, SelectionConfig, TargetsConfig
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import generate_targets
from tests.faults.bad_input.small_runs import ledger, lines_of
from tests.four_steps import SEED, Distribute, put_teacher, rows_of, teacher
from tests.small_corpus import flac, serially, tone

SUBSET = "unlabelled"
FILE_HOURS = 10 / 3600
BUDGET = 0.3


@dataclass(frozen=True)
class Nights:
    """Nights is a corpus whose metadata grow by a day, and a folder of runs beside it."""

    store: ObjectStore
    corpus_uri: str
    folder: str

    @classmethod
    def at(cls, folder: str) -> "Nights":
        """Make a corpus without metadata."""
        place = join_uri(folder, "corpus"), join_uri(folder, "runs")
        return cls(ObjectStore(place), *place)

    def run_uri(self, name: str) -> str:
        """Return the URI of a run."""
        return join_uri(self.folder, name)

    def add(
        self, day: int, speakers: Sequence[str], num_each: int = 3, part: str = "part-0"
    ) -> list[str]:
        """Add a day's records of some speakers, and their audio; return their utterance ids."""
        return self.put(
            day,
            [
                self.record(day, speaker, number)
                for speaker in speakers
                for number in range(num_each)
            ],
            part,
        )

    def record(self, day: int, speaker: str, number: int) -> dict[str, Any]:
        """Store the audio of an utterance, and return its record."""
        name = f"{speaker}-{day:02d}-{number}"
        duration_s = 0.5 + (day + number) % 5 / 10
        uri = f"audio/{name}.flac"
        samples = tone(100 * day + 10 * number + len(speaker), duration_s)
        self.store.put(join_uri(self.corpus_uri, uri), flac(samples))
        return {
            "utterance_id": name,
            "speaker_id": speaker,
            "duration_s": duration_s,
            "created_at": f"2026-01-{day:02d}T00:{number:02d}:00+00:00",
            "locale": "en-US",
            "audio_uri": uri,
        }

    def put(
        self, day: int, records: Iterable[Mapping[str, Any]], part: str = "part-0"
    ) -> list[str]:
        """Write records to the metadata of a day, by speaker bucket."""
        by_bucket: dict[str, list[Mapping[str, Any]]] = {}
        for record in records:
            by_bucket.setdefault(f"{len(record['speaker_id']) % 2:02d}", []).append(record)
        for bucket, some in by_bucket.items():
            key = f"metadata/{SUBSET}/date=2026-01-{day:02d}/speaker_bucket={bucket}/{part}.jsonl"
            self.store.put(join_uri(self.corpus_uri, key), lines_of(some))
        return [each["utterance_id"] for each in records]

    def select(
        self, name: str, extends: str = "", distribute: Distribute = serially, **settings: Any
    ) -> Manifest:
        """Select into a run, which extends another if that is given."""
        run_uri = self.run_uri(name)
        if extends:
            record_bases(self.store, run_uri, self.run_uri(extends), "all")
        config = SelectionConfig(
            **{"hours": 0.0, "file_hours": FILE_HOURS, "seed": SEED, **settings}
        )
        uri = metadata_uri(self.corpus_uri, SUBSET)
        return select_utterances(
            self.store, run_uri, SUBSET, uri, config, BUDGET, distribute
        ).manifest

    def selected(self, name: str, manifest: Manifest) -> set[str]:
        """Return the ids in the selection files that a run itself has written."""
        lines = ledger(self.store, self.run_uri(name), own_outputs(manifest.outputs))
        return {line["utterance_id"] for line in lines}

    def inherit(self, run_uri: str, base_uri: str, step: str) -> None:
        """Let a run take over a step of its base."""
        base = BaseStep(base_uri, *read_with_digest(self.store, base_uri, step))
        base.inherit(self.store, run_uri)

    def select_heldout(self, name: str, record: Mapping[str, Any]) -> None:
        """Select one record as the held-out subset of a run."""
        uri = metadata_uri(self.corpus_uri, "heldout")
        key = "date=2026-01-01/speaker_bucket=00/part-0.jsonl"
        self.store.put(join_uri(uri, key), json.dumps(record).encode())
        config = SelectionConfig(hours=0.0, file_hours=FILE_HOURS, seed=SEED)
        run_uri = self.run_uri(name)
        select_utterances(self.store, run_uri, "heldout", uri, config, BUDGET, serially)

    def extract(self, name: str, distribute: Distribute = serially) -> Manifest:
        """Extract what a run selected."""
        config = ExtractionConfig(gets_in_flight=8, seed=SEED)
        place = self.store, self.run_uri(name), SUBSET, self.corpus_uri
        return extract_features(*place, config, BUDGET, distribute).manifest

    def label(self, name: str, extends: str = "", distribute: Distribute = serially) -> Manifest:
        """Label and repartition what a run extracted; return the manifest of the partitions."""
        run_uri = self.run_uri(name)
        if extends:
            self.inherit(run_uri, self.run_uri(extends), "models/teacher")
        else:
            put_teacher(self.store, run_uri)
        place = self.store, run_uri
        generate_targets(*place, TargetsConfig(4, 500, SEED), teacher, distribute)
        config = RepartitionConfig(FILE_HOURS, 2, SEED)
        return repartition(*place, config, distribute).manifest

    def features(self, name: str) -> dict[str, bytes]:
        """Return the stored frames of each utterance of a run and of those that it extends."""
        rows = rows_of(self.store, self.run_uri(name), "features")
        assert len({row.utterance_id for row in rows}) == len(rows), "no utterance is there twice"
        return {row.utterance_id: row.features.tobytes() for row in rows}

    def targets(self, name: str) -> dict[str, tuple[bytes, KBest]]:
        """Return the frames and targets of each utterance of a run's training partitions."""
        rows = rows_of(self.store, self.run_uri(name), "partitions")
        return {row.utterance_id: (row.features.tobytes(), row.targets) for row in rows}


def three_nights(folder: Path) -> Nights:
    """Run a chain of three nights, whose speakers come back, and one run over all of them."""
    nights = Nights.at(str(folder))
    nights.add(1, ["ann", "bert", "clara"])
    nights.select("night-1")
    nights.extract("night-1")
    nights.label("night-1")
    nights.add(2, ["bert", "clara", "doris"])
    nights.select("night-2", "night-1")
    nights.extract("night-2")
    nights.label("night-2", "night-1")
    nights.add(3, ["ann", "doris", "emil"])
    nights.select("night-3", "night-2")
    nights.extract("night-3")
    nights.label("night-3", "night-2")
    nights.select("whole")
    nights.extract("whole")
    nights.label("whole")
    return nights
