"""Trace one utterance: metadata, selection, the steps that hold it, models.

The selections' id indexes name the objects that hold an utterance, and the order of each
manifest's outputs gives the task of the next step. So a search reads the ids of a shard or two.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from infra.prefetch import prefetch
from infra.settings import read_record
from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    SizeBound,
    StoreError,
    join_uri,
    normalize_uri,
    read_checked,
    scan_checked,
)
from infra.store.uris import resolve_audio
from pipeline.audio.audio_file import MAX_RECORDING_BYTES
from pipeline.audio.errors import AudioError
from pipeline.filters import SelectionFilters
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance, parse_part
from pipeline.runs.commit import Commit
from pipeline.runs.ledger import IDENTIFIED, read_lines
from pipeline.runs.manifest import (
    Manifest,
    Output,
    Outputs,
    find_outputs,
    is_finished,
    read_manifest,
    read_output,
    sha256,
)
from pipeline.runs.names import (
    ALL_SUBSETS,
    COMMITS_FOLDER,
    DEV_ALIGNMENT_STEP,
    FEATURES_FOLDER,
    INGEST_STEP,
    LEDGER_SUFFIX,
    MANIFEST_FILE,
    METADATA_FOLDER,
    MODELS_FOLDER,
    UNLABELLED,
    folder_of,
    model_step,
    selection_step,
    task_name,
)
from pipeline.settings import ANY_AUDIO
from pipeline.shards.container import Columns, read_plain_columns
from pipeline.shards.targets import OFFSETS_ENTRY
from pipeline.steps.audio_reads import WantedAudio, read_audio
from pipeline.steps.repartition import shard_groups
from pipeline.steps.selection.buckets import METADATA_SUFFIXES
from pipeline.steps.selection.id_index import find_named
from pipeline.steps.selection.select import metadata_uri
from pipeline.steps.targets import REASONS


def why_unselected(manifest: Manifest, subset: str, record: Utterance | Quarantined) -> str:
    """Say why a record that is in no selection file and no ledger was left out."""
    if isinstance(record, Quarantined):
        return f"{record.reason}: {record.detail}"
    table = manifest.config.get("filters", {}) if subset == UNLABELLED else {}
    rejection = read_record(SelectionFilters, table, "filters").rejection(record)
    if rejection is not None:
        return f"refused by the recipe's filter of {rejection}"
    return f"over the budget of {manifest.config['hours']} h, or beyond its speaker's cap"


def audio_now(
    store: ObjectStore, corpus_uri: str, record: Mapping[str, Any], recorded_etag: str | None
) -> dict[str, Any]:
    """Fetch the audio of a record as it is now, and compare the ETag that extraction recorded."""
    uri = resolve_audio(corpus_uri, record["audio_uri"])
    about: dict[str, Any] = {"uri": uri, "recorded_etag": recorded_etag}
    if (part := parse_part(record, record.get("duration_s", 0.0))) is not None:
        about |= part.fields()
    bound = SizeBound(max_bytes=MAX_RECORDING_BYTES)
    [fetched] = read_audio(store, [WantedAudio(uri, bound, part, ANY_AUDIO)], 1)
    if isinstance(fetched, StoreError | AudioError):
        return {**about, "now": str(fetched)}
    about |= {"etag": fetched.etag, "num_bytes": len(fetched.data)}
    return about if recorded_etag is None else {**about, "unchanged": fetched.etag == recorded_etag}


T = TypeVar("T")
R = TypeVar("R")

_ORDINARY = re.compile(r"[A-Za-z0-9._-]+")
_ROW_COLUMNS = (
    *("utterance_id", "speaker_id", "duration_ms", "created_at", "audio_uri", "audio_etag"),
    *("placement", "audio_form", "audio_part", "num_frames", "offset", "num_low_rate_frames"),
)


@dataclass(frozen=True, slots=True)
class Hit:
    """An object that holds the utterance, its line (from 1) or row (from 0), and what it says."""

    key: str
    position: int
    facts: dict[str, Any]


def first_hit(items: Sequence[T], look: Callable[[T], R | None]) -> R | None:
    """Return the first hit in the order of `items`, and read no further."""
    # Answers come in the order of items, so the first hit never depends on timing.
    looked = prefetch(look, items)
    return next((hit for _, hit in looked if hit is not None), None)


def may_hold(data: bytes, utterance_id: str) -> bool:
    """Return True if the text can name the utterance; parsing takes 20 times as long."""
    return not _ORDINARY.fullmatch(utterance_id) or utterance_id.encode() in data


LOST = "lost: run megahour verify"

ENDS = ("quarantined", "not selected", LOST)
"""Outcomes after which no step that reads this one has the utterance."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """StepTrace holds an utterance's outcome at one step, the object, and its line or row.

    Lines count from 1, rows of shards from 0; metadata lies in the corpus, the rest in the run.
    """

    step: str
    outcome: str
    object: str = ""
    position: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    config_digest: str = ""
    code_version: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace holds an utterance's steps in order, its audio then and now, and its models."""

    utterance_id: str
    steps: tuple[StepTrace, ...]
    audio: Mapping[str, Any]
    models: Mapping[str, str]


class UnknownUtteranceError(ValueError):
    """No metadata, selection file or ledger of the run names the utterance."""


Reads = Mapping[str, Sequence[str]]
"""The steps that hold utterances, in a run's order, each with the steps that it reads.

Its tasks read the shards of the first of these.
"""


def trace(
    store: ObjectStore, run_uri: str, corpus_uri: str, utterance_id: str, reads: Reads
) -> Trace:
    """Follow an utterance through a run; UnknownUtteranceError if nothing names it."""
    return _Tracer(store, run_uri, corpus_uri, utterance_id, reads).trace()


def run_that_selected(store: ObjectStore, run_uri: str, corpus_uri: str, utterance_id: str) -> str:
    """Return which run of a chain selected an utterance; the last one if none has."""
    tracer = _Tracer(store, run_uri, corpus_uri, utterance_id, {})
    for manifest in map(tracer.manifest, map(selection_step, ALL_SUBSETS)):
        if manifest and manifest.extends and (hit := tracer.in_selection(manifest)):
            return (
                next(each.run for _, each in find_outputs(manifest.outputs, [hit.key])) or run_uri
            )
    return run_uri


@dataclass(slots=True)
class _Tracer:
    store: ObjectStore
    run_uri: str
    corpus_uri: str
    utterance_id: str
    reads: Reads
    steps: list[StepTrace] = field(default_factory=list)
    named: dict[str, frozenset[str]] = field(default_factory=dict)

    def trace(self) -> Trace:
        selections = {subset: self.manifest(selection_step(subset)) for subset in ALL_SUBSETS}
        for subset, manifest in selections.items():
            hit = manifest and self.in_selection(manifest)
            if manifest and hit:
                record: Mapping[str, Any] = hit.facts
                self._metadata({subset: manifest})
                self._add(manifest, "selected", replace(hit, facts={}))
                self._follow(manifest, hit)
                break
        else:
            record = self._explain_absence(selections)
        etag = next((e.facts["audio_etag"] for e in self.steps if "audio_etag" in e.facts), None)
        has_audio = bool(record.get("audio_uri"))
        audio = audio_now(self.store, self.corpus_uri, record, etag) if has_audio else {}
        return Trace(self.utterance_id, tuple(self.steps), audio, self._models())

    def manifest(self, step: str) -> Manifest | None:
        """Read a step's manifest; None if the step is not finished."""
        is_there = is_finished(self.store, self.run_uri, step)
        return read_manifest(self.store, self.run_uri, step) if is_there else None

    def in_selection(self, manifest: Manifest, in_ledgers: bool = False) -> Hit | None:
        """Look in those of a selection's files, or ledgers, that may hold the utterance."""
        # Stored objects alone: metadata, which are in no list, would have all parts read.
        stored = (key for key in self._named_in(manifest) if not key.startswith("/"))
        keys = [key for key in stored if key.endswith(LEDGER_SUFFIX) == in_ledgers]
        listed = manifest.ledgers if in_ledgers else manifest.outputs
        placed = sorted(find_outputs(listed, keys), key=lambda found: found[0])
        outputs = [output for _, output in placed]
        return self._in_lines(outputs)

    def _in_lines(self, outputs: Sequence[Output]) -> Hit | None:
        """Look in selection files or ledgers, which are read whole."""

        def look(output: Output) -> Hit | None:
            data = read_output(self.store, self.run_uri, output)
            if may_hold(data, self.utterance_id):
                for number, fields in enumerate(read_lines(data, IDENTIFIED), 1):
                    if fields["utterance_id"] == self.utterance_id:
                        return Hit(output.key, number, fields)
            return None

        return first_hit(outputs, look)

    def _in_shards(self, outputs: Sequence[Output]) -> Hit | None:
        """Look in shards, of which only the ids are read, and of the hit its plain columns."""

        def look(output: Output) -> Hit | None:
            def read(names: Sequence[str]) -> tuple[Columns, Mapping[str, str]]:
                uri = output.uri(self.run_uri)
                return scan_checked(self.store, uri, lambda file: read_plain_columns(file, names))

            # Of a shard of 5 hours, 280 MB with targets, only the ids are read.
            ids = read(["utterance_id"])[0]["utterance_id"]
            if self.utterance_id not in ids:
                return None
            row = ids.index(self.utterance_id)
            columns, footer = read(_ROW_COLUMNS)
            facts = {name: cells[row] for name, cells in columns.items() if cells[row] is not None}
            facts |= {"k": int(footer["k"])} if "k" in footer else {}
            facts |= {OFFSETS_ENTRY: footer[OFFSETS_ENTRY]} if OFFSETS_ENTRY in footer else {}
            return Hit(output.key, row, facts)

        return first_hit(outputs, look)

    def _in_metadata(self, uris: Sequence[str]) -> tuple[Hit, Utterance | Quarantined] | None:
        """Look in metadata objects; the record is what it parses to."""

        def look(uri: str) -> tuple[Hit, Utterance | Quarantined] | None:
            data = self.store.get(uri)
            if uri.endswith(".gz") or may_hold(data, self.utterance_id):
                for number, (_, record) in enumerate(read_records(data, uri), 1):
                    if record.utterance_id == self.utterance_id:
                        return Hit(uri, number, {}), record
            return None

        return first_hit(uris, look)

    def _named_in(self, manifest: Manifest) -> frozenset[str]:
        """Name a selection's objects, and its metadata, that the id index has the utterance in."""
        if manifest.step not in self.named:
            found = find_named(self.store, self.run_uri, manifest, self.utterance_id)
            self.named[manifest.step] = found
        return self.named[manifest.step]

    def _follow(self, manifest: Manifest, hit: Hit) -> None:
        """Follow the utterance to the steps that read the object in which a step has it."""
        followers = {step: reads for step, reads in self.reads.items() if reads[0] == manifest.step}
        if not followers:
            return
        # Task n of a step reads output n of the manifest before, so the place names the task.
        place, found = next(find_outputs(manifest.outputs, [hit.key]))
        num_outputs = len(manifest.outputs)
        if manifest.extends is not None and not found.run:
            # A union lists what its base has first, and tasks read what is new.
            before = read_manifest(self.store, manifest.extends.run, manifest.step)
            place, num_outputs = place - len(before.outputs), num_outputs - len(before.outputs)
        for step, reads in followers.items():
            if any(each.step in reads and each.outcome in ENDS for each in self.steps):
                continue
            follower = self.manifest(step)
            if follower is None:
                self.steps.append(StepTrace(step, "step not finished"))
            elif next_hit := self._at_step(follower, _task_number(follower, place, num_outputs)):
                self._follow(follower, next_hit)

    def _at_step(self, manifest: Manifest, number: int) -> Hit | None:
        """Find the utterance in what a task wrote, or else anywhere in the step."""
        commit = None
        with suppress(ObjectNotFound):
            key = f"{manifest.step}/{COMMITS_FOLDER}/{task_name(number)}.json"
            commit = read_checked(self.store, join_uri(self.run_uri, key), Commit.from_bytes)
        places: list[tuple[Outputs, Outputs]] = [(manifest.outputs, manifest.ledgers)]
        if commit:
            places.insert(0, (commit.outputs, (commit.ledger,) if commit.ledger else ()))
        for outputs, ledgers in places:
            if hit := self._in_shards(outputs):
                stated = commit.statistics if commit else {}
                for asked in REASONS:
                    if why := stated.get(asked, {}).get(self.utterance_id):
                        hit.facts[asked] = f"{why['reason']}: {why['detail']}"
                self._add(manifest, "written", hit)
                return hit
            if hit := self._in_lines(ledgers):
                self._add(manifest, "quarantined", hit)
                return None
        # Neither written nor in a ledger: `verify` reports the utterance as lost.
        self.steps.append(StepTrace(manifest.step, LOST))
        return None

    def _explain_absence(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        """Record why no selection file has the utterance; return the facts of its record."""
        found = self._metadata(selections)
        for selected in filter(None, selections.values()):
            if hit := self.in_selection(selected, in_ledgers=True):
                self._add(selected, "quarantined", hit)
                return hit.facts
        if found is None:
            return self._left_out_by_ingest(selections)
        subset, record = found
        if (manifest := selections[subset]) is None:
            self.steps.append(StepTrace(selection_step(subset), "step not finished"))
        else:
            reason = {"why": why_unselected(manifest, subset, record)}
            self._add(manifest, "not selected", Hit("", 0, reason))
        facts: Mapping[str, Any] = {}
        if isinstance(record, Utterance):
            facts = json.loads(record.to_json())
        return facts

    def _left_out_by_ingest(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        ingested = self.manifest(INGEST_STEP)
        if ingested and (hit := self._in_lines(ingested.ledgers)):
            self._add(ingested, "quarantined", hit)
            return hit.facts
        there = {subset: manifest for subset, manifest in selections.items() if manifest}
        nameless = sum(manifest.quarantined.utterances for manifest in there.values())
        raise UnknownUtteranceError(
            f"no utterance {self.utterance_id!r} in the metadata of {self.corpus_uri}, nor in the "
            f"selections of {self.run_uri} ({', '.join(there) or 'none is finished'}); check its "
            f"spelling; {nameless} records are in selection ledgers; those of broken lines "
            "have no id"
        )

    def _metadata(
        self, selections: Mapping[str, Manifest | None]
    ) -> tuple[str, Utterance | Quarantined] | None:
        """Find the record in the metadata that may hold it: all, where nothing is selected yet."""
        for subset, manifest in selections.items():
            base = normalize_uri(metadata_uri(self.corpus_uri, subset))
            if manifest is None:
                listed = (each.uri for each in self.store.list(base))
                uris = [uri for uri in listed if uri.endswith(METADATA_SUFFIXES)]
            else:
                # Those of earlier runs are no inputs of an increment; stored objects have keys.
                names = sorted(name for name in self._named_in(manifest) if name[0] == "/")
                uris = [f"{base}{name}" for name in names]
            found = self._in_metadata(uris)
            if found is not None:
                hit, record = found
                key = hit.key.removeprefix(f"{self.corpus_uri.rstrip('/')}/")
                step = f"{METADATA_FOLDER}/{subset}"
                self.steps.append(StepTrace(step, "read", key, hit.position))
                return subset, record
        return None

    def _models(self) -> dict[str, str]:
        """Find the models that read a partition or a shard of the utterance."""
        seen = {each.step for each in self.steps if each.outcome == "written"}
        base = join_uri(self.run_uri, MODELS_FOLDER)
        keys = (found.uri.removeprefix(f"{base}/").split("/") for found in self.store.list(base))
        models = {}
        for name in [name for name, *rest in keys if rest == [MANIFEST_FILE]]:
            inputs = read_manifest(self.store, self.run_uri, model_step(name)).inputs
            read = [step for step in inputs if step in seen]
            trained = [
                step
                for step in read
                if step != DEV_ALIGNMENT_STEP and folder_of(step) != FEATURES_FOLDER
            ]
            if trained:
                models[name] = f"trained on {', '.join(trained)}"
            # Of development speakers newbob has the loss, and no gradient.
            elif DEV_ALIGNMENT_STEP in read:
                models[name] = f"only its validation loss, on {DEV_ALIGNMENT_STEP}"
            # Features that a model never trained on still enter its global mean and variance.
            elif read:
                models[name] = "only its normalization"
        return models

    def _add(self, manifest: Manifest, outcome: str, hit: Hit) -> None:
        self.steps.append(
            StepTrace(
                manifest.step,
                outcome,
                hit.key,
                hit.position if hit.key else None,
                {name: value for name, value in hit.facts.items() if name != "utterance_id"},
                sha256(json.dumps(manifest.config, sort_keys=True).encode()),
                manifest.code_version,
            )
        )


def _task_number(manifest: Manifest, place: int, num_outputs: int) -> int:
    """Return which task of a step reads the output at `place` of the step before."""
    if "num_source_shards" not in manifest.config:
        return place
    # Repartition's own rule says in which group of shards the place lies.
    groups = enumerate(shard_groups(num_outputs, manifest.config["num_source_shards"]))
    return next(number for number, shards in groups if place in shards)
