"""Trace one utterance: metadata, selection, the steps that hold it, models.

The selections' id indexes name the objects that hold an utterance, and the order of each
manifest's outputs gives the task of the next step. So a search reads the ids of a shard or two.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
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
from pipeline.audio.conversion import ANY_AUDIO
from pipeline.audio.errors import AudioError
from pipeline.filters import SelectionFilters
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance, parse_part
from pipeline.runs.commit import Commit
from pipeline.runs.engine import WITHOUT_LATTICE
from pipeline.runs.ledger import IDENTIFIED, read_lines
from pipeline.runs.manifest import (
    Manifest,
    Output,
    Outputs,
    find_outputs,
    is_finished,
    manifest_uri,
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
from pipeline.shards.container import read_plain_columns
from pipeline.shards.targets import OFFSETS_ENTRY
from pipeline.steps.audio_reads import WantedAudio, read_audio
from pipeline.steps.repartition import shard_groups
from pipeline.steps.selection.buckets import METADATA_SUFFIXES
from pipeline.steps.selection.id_index import find_named
from pipeline.steps.selection.select import metadata_uri


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
    [fetched] = read_audio(store, [WantedAudio(uri, SizeBound(), part, ANY_AUDIO)], 1)
    if isinstance(fetched, StoreError | AudioError):
        return {**about, "now": str(fetched)}
    about |= {"etag": fetched.etag, "num_bytes": len(fetched.data)}
    return about if recorded_etag is None else {**about, "unchanged": fetched.etag == recorded_etag}


IN_FLIGHT = 16

T = TypeVar("T")

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


def first_hit(items: Sequence[T], look: Callable[[T], Hit | None]) -> Hit | None:
    """Return the first hit in the order of `items`, and read nothing behind it."""
    # Answers come in the order of items, so the first hit never depends on timing.
    looked = prefetch(look, items, IN_FLIGHT)
    return next((hit for _, hit in looked if hit is not None), None)


def in_lines(
    store: ObjectStore, run_uri: str, outputs: Sequence[Output], utterance_id: str
) -> Hit | None:
    """Look in selection files or ledgers, which are read whole."""

    def look(output: Output) -> Hit | None:
        data = read_output(store, run_uri, output)
        if not may_hold(data, utterance_id):
            return None
        for number, fields in enumerate(read_lines(data, IDENTIFIED), 1):
            if fields["utterance_id"] == utterance_id:
                return Hit(output.key, number, fields)
        return None

    return first_hit(outputs, look)


def in_metadata(
    store: ObjectStore, uris: Sequence[str], utterance_id: str
) -> tuple[Hit, Utterance | Quarantined] | None:
    """Look in metadata objects; the record is what it parses to."""
    records: dict[str, Utterance | Quarantined] = {}

    def look(uri: str) -> Hit | None:
        data = store.get(uri)
        if not uri.endswith(".gz") and not may_hold(data, utterance_id):
            return None
        for number, (_, record) in enumerate(read_records(data, uri), 1):
            if record.utterance_id == utterance_id:
                records[uri] = record
                return Hit(uri, number, {})
        return None

    hit = first_hit(uris, look)
    return None if hit is None else (hit, records[hit.key])


def in_shards(
    store: ObjectStore, run_uri: str, outputs: Sequence[Output], utterance_id: str
) -> Hit | None:
    """Look in shards, of which only the ids are read, and of the hit its plain columns."""

    def look(output: Output) -> Hit | None:
        uri = output.uri(run_uri)
        # Of a shard of 5 hours, 280 MB with targets, only the ids are read.
        ids = scan_checked(store, uri, lambda file: read_plain_columns(file, ["utterance_id"]))[0]
        if utterance_id not in ids["utterance_id"]:
            return None
        row = ids["utterance_id"].index(utterance_id)
        columns, footer = scan_checked(
            store, uri, lambda file: read_plain_columns(file, _ROW_COLUMNS)
        )
        facts = {name: cells[row] for name, cells in columns.items() if cells[row] is not None}
        facts |= {"k": int(footer["k"])} if "k" in footer else {}
        facts |= {OFFSETS_ENTRY: footer[OFFSETS_ENTRY]} if OFFSETS_ENTRY in footer else {}
        return Hit(output.key, row, facts)

    return first_hit(outputs, look)


def may_hold(data: bytes, utterance_id: str) -> bool:
    """Return True if the text can name the utterance; parsing takes 20 times as long."""
    return not _ORDINARY.fullmatch(utterance_id) or utterance_id.encode() in data


@dataclass(frozen=True, slots=True)
class StepHit:
    """StepHit is where a step has an utterance: written, or else in a ledger."""

    hit: Hit
    is_written: bool


def in_step(
    store: ObjectStore, run_uri: str, manifest: Manifest, task: str, utterance_id: str
) -> StepHit | None:
    """Look in what `task` wrote and quarantined; only then in the step's other objects."""
    for outputs, ledgers in _likeliest_first(store, run_uri, manifest, task):
        if hit := in_shards(store, run_uri, outputs, utterance_id):
            return StepHit(hit, is_written=True)
        if hit := in_lines(store, run_uri, ledgers, utterance_id):
            return StepHit(hit, is_written=False)
    return None


def _likeliest_first(
    store: ObjectStore, run_uri: str, manifest: Manifest, task: str
) -> Iterator[tuple[Sequence[Output], Sequence[Output]]]:
    """Yield outputs and ledgers: the task's by its commit, or by their names, then all others."""
    # One GET, where the lists have a part for each 4,000 objects.
    if manifest.parts and (commit := _commit_of(store, run_uri, manifest.step, task)):
        yield commit.outputs, [commit.ledger] if commit.ledger else []
    for is_own in (True, False):
        outputs, ledgers = (
            [each for each in objects if _is_of_task(manifest, each, task) == is_own]
            for objects in (manifest.outputs, manifest.ledgers)
        )
        yield outputs, ledgers


def _commit_of(store: ObjectStore, run_uri: str, step: str, task: str) -> Commit | None:
    uri = join_uri(run_uri, step, COMMITS_FOLDER, f"{task}.json")
    try:
        return read_checked(store, uri, Commit.from_bytes)
    except ObjectNotFound:
        return None


def _is_of_task(manifest: Manifest, output: Output, task: str) -> bool:
    # Of a union the runs before have tasks of the same names.
    is_own = not output.run or manifest.is_inherited
    return is_own and output.key.rpartition("/")[2].startswith(f"{task}-")


def own_place(store: ObjectStore, manifest: Manifest, key: str) -> tuple[int, int]:
    """Return an object's place among those that its run wrote, and their number.

    The place is the number of the task of the next step that reads it.
    """
    place, found = next(find_outputs(manifest.outputs, [key]))
    if manifest.extends is None or found.run:
        return place, len(manifest.outputs)
    # A union lists what its base has first, and tasks read what is new.
    num_before = len(read_manifest(store, manifest.extends.run, manifest.step).outputs)
    return place - num_before, len(manifest.outputs) - num_before


def run_that_selected(store: ObjectStore, run_uri: str, corpus_uri: str, utterance_id: str) -> str:
    """Return which run of a chain selected an utterance; the last one if none has."""
    lookup = IdLookup(store, run_uri, corpus_uri, utterance_id)
    for step in map(selection_step, ALL_SUBSETS):
        if not is_finished(store, run_uri, step):
            continue
        manifest = read_manifest(store, run_uri, step)
        hit = lookup.in_files(manifest) if manifest.extends else None
        if hit is not None:
            return (
                next(each.run for _, each in find_outputs(manifest.outputs, [hit.key])) or run_uri
            )
    return run_uri


@dataclass(frozen=True, slots=True)
class IdLookup:
    """IdLookup narrows what a search reads to a selection's objects that name the utterance."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    utterance_id: str
    named: dict[str, frozenset[str]] = field(default_factory=dict)

    def in_files(self, manifest: Manifest) -> Hit | None:
        """Look in those of a manifest's selection files that may hold the utterance."""
        return self._in_lines(manifest, manifest.outputs, is_ledger=False)

    def in_ledgers(self, manifest: Manifest) -> Hit | None:
        """Look in those of a manifest's ledgers that may hold the utterance."""
        return self._in_lines(manifest, manifest.ledgers, is_ledger=True)

    def _in_lines(self, manifest: Manifest, listed: Outputs, is_ledger: bool) -> Hit | None:
        # Stored objects alone: metadata, which are in no list, would have all parts read.
        stored = (key for key in self._named_in(manifest) if not key.startswith("/"))
        keys = [key for key in stored if key.endswith(LEDGER_SUFFIX) == is_ledger]
        outputs = [output for _, output in sorted(find_outputs(listed, keys), key=_place)]
        return in_lines(self.store, self.run_uri, outputs, self.utterance_id)

    def metadata_uris(self, subset: str, manifest: Manifest | None) -> list[str]:
        """Return the metadata objects of a subset that may hold the record: all, unselected."""
        base = normalize_uri(metadata_uri(self.corpus_uri, subset))
        if manifest is None:
            uris = (each.uri for each in self.store.list(base))
            return [uri for uri in uris if uri.endswith(METADATA_SUFFIXES)]
        # Those of earlier runs are no inputs of an increment; stored objects have keys.
        return [f"{base}{name}" for name in sorted(self._named_in(manifest)) if name[0] == "/"]

    def _named_in(self, manifest: Manifest) -> frozenset[str]:
        if manifest.step not in self.named:
            found = find_named(self.store, self.run_uri, manifest, self.utterance_id)
            self.named[manifest.step] = found
        return self.named[manifest.step]


def _place(found: tuple[int, Output]) -> int:
    return found[0]


LOST = "lost: run jobs.verify"

ENDS = ("quarantined", "not selected", LOST)
"""Outcomes after which no step that reads this one has the utterance."""

NO_FACTS: Mapping[str, Any] = MappingProxyType({})


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


def _task_number(manifest: Manifest | None, place: int, num_outputs: int) -> int:
    """Return which task of a step reads the output at `place` of the step before."""
    if manifest is None or "num_source_shards" not in manifest.config:
        return place
    # Repartition's own rule says in which group of shards the place lies.
    groups = enumerate(shard_groups(num_outputs, manifest.config["num_source_shards"]))
    return next(number for number, shards in groups if place in shards)


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
    lookup = IdLookup(store, run_uri, corpus_uri, utterance_id)
    return _Tracer(store, run_uri, corpus_uri, utterance_id, reads, lookup).trace()


@dataclass(slots=True)
class _Tracer:
    store: ObjectStore
    run_uri: str
    corpus_uri: str
    utterance_id: str
    reads: Reads
    lookup: IdLookup
    steps: list[StepTrace] = field(default_factory=list)

    def trace(self) -> Trace:
        selections = {subset: self._manifest(selection_step(subset)) for subset in ALL_SUBSETS}
        record: Mapping[str, Any] = {}
        for subset, manifest in selections.items():
            hit = manifest and self.lookup.in_files(manifest)
            if manifest and hit:
                record = hit.facts
                self._metadata({subset: manifest})
                self._add(manifest, "selected", hit, {})
                self._follow(manifest, hit)
                break
        else:
            record = self._explain_absence(selections)
        etag = next((e.facts["audio_etag"] for e in self.steps if "audio_etag" in e.facts), None)
        has_audio = bool(record.get("audio_uri"))
        audio = audio_now(self.store, self.corpus_uri, record, etag) if has_audio else {}
        return Trace(self.utterance_id, tuple(self.steps), audio, self._models())

    def _follow(self, manifest: Manifest, hit: Hit) -> None:
        """Follow the utterance to the steps that read the object in which a step has it."""
        followers = {step: reads for step, reads in self.reads.items() if reads[0] == manifest.step}
        if not followers:
            return
        # Task n of a step reads output n of the manifest before, so the place names the task.
        place, num_outputs = own_place(self.store, manifest, hit.key)
        for step, reads in followers.items():
            if any(each.step in reads and each.outcome in ENDS for each in self.steps):
                continue
            found = self._manifest(step)
            task = task_name(_task_number(found, place, num_outputs))
            next_hit = self._at_step(found, step, task, self._without_lattice(found, task))
            if found and next_hit:
                self._follow(found, next_hit)

    def _without_lattice(self, targets: Manifest | None, task: str) -> Mapping[str, Any]:
        """Return why the utterance has the teacher's own targets, if its lattice was asked for."""
        if targets is None or WITHOUT_LATTICE not in targets.statistics:
            return NO_FACTS
        uri = join_uri(self.run_uri, targets.step, COMMITS_FOLDER, f"{task}.json")
        commit = read_checked(self.store, uri, Commit.from_bytes)
        found = commit.statistics.get(WITHOUT_LATTICE, {}).get(self.utterance_id)
        return {WITHOUT_LATTICE: f"{found['reason']}: {found['detail']}"} if found else {}

    def _at_step(
        self, manifest: Manifest | None, step: str, task: str, more: Mapping[str, Any]
    ) -> Hit | None:
        """Find the utterance in the outputs of `task`, or else anywhere in the step.

        `more` is what is known of it besides the hit's facts.
        """
        if manifest is None:
            self.steps.append(StepTrace(step, "step not finished"))
            return None
        found = in_step(self.store, self.run_uri, manifest, task, self.utterance_id)
        if found and found.is_written:
            return self._add(manifest, "written", found.hit, {**found.hit.facts, **more})
        if found:
            self._add(manifest, "quarantined", found.hit, found.hit.facts)
        elif manifest.unselected.utterances:
            reason = {"why": "beyond bootstrap.max_hours; the network aligns it"}
            self._add(manifest, "not selected", Hit("", 0, {}), reason)
        else:
            # Neither written nor in a ledger: `verify` reports the utterance as lost.
            self.steps.append(StepTrace(step, LOST))
        return None

    def _explain_absence(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        """Record why no selection file has the utterance; return the facts of its record."""
        found = self._metadata(selections)
        record: Mapping[str, Any] = {}
        for manifest in selections.values():
            if manifest and (hit := self.lookup.in_ledgers(manifest)):
                self._add(manifest, "quarantined", hit, hit.facts)
                return hit.facts
        if found is None:
            return self._left_out_by_ingest(selections)
        subset, utterance = found
        manifest = selections[subset]
        if isinstance(utterance, Utterance):
            record = json.loads(utterance.to_json())
        if manifest is None:
            self.steps.append(StepTrace(selection_step(subset), "step not finished"))
        else:
            reason = {"why": why_unselected(manifest, subset, utterance)}
            self._add(manifest, "not selected", Hit("", 0, {}), reason)
        return record

    def _left_out_by_ingest(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        ingested = self._manifest(INGEST_STEP)
        ledgers = ingested.ledgers if ingested else ()
        hit = in_lines(self.store, self.run_uri, ledgers, self.utterance_id)
        if ingested and hit:
            self._add(ingested, "quarantined", hit, hit.facts)
            return hit.facts
        raise UnknownUtteranceError(self._unknown(selections))

    def _metadata(
        self, selections: Mapping[str, Manifest | None]
    ) -> tuple[str, Utterance | Quarantined] | None:
        for subset, manifest in selections.items():
            uris = self.lookup.metadata_uris(subset, manifest)
            found = in_metadata(self.store, uris, self.utterance_id)
            if found is not None:
                hit, record = found
                key = hit.key.removeprefix(f"{self.corpus_uri.rstrip('/')}/")
                self.steps.append(
                    StepTrace(f"{METADATA_FOLDER}/{subset}", "read", key, hit.position)
                )
                return subset, record
        return None

    def _unknown(self, selections: Mapping[str, Manifest | None]) -> str:
        nameless = sum(
            manifest.quarantined.utterances for manifest in selections.values() if manifest
        )
        there = [subset for subset, manifest in selections.items() if manifest]
        return (
            f"no utterance {self.utterance_id!r} in the metadata of {self.corpus_uri}, nor in the "
            f"selections of {self.run_uri} ({', '.join(there) or 'none is finished'}); check its "
            f"spelling; {nameless} records are in selection ledgers; those of broken lines "
            "have no id"
        )

    def _models(self) -> dict[str, str]:
        """Find the models that read a partition or a shard of the utterance."""
        seen = {each.step for each in self.steps if each.outcome == "written"}
        models = {}
        for name in self._finished_models():
            inputs = read_manifest(self.store, self.run_uri, model_step(name)).inputs
            trained = [
                step
                for step in inputs
                if step in seen - {DEV_ALIGNMENT_STEP} and folder_of(step) != FEATURES_FOLDER
            ]
            if trained:
                models[name] = f"trained on {', '.join(trained)}"
            # Of development speakers newbob has the loss, and no gradient.
            elif DEV_ALIGNMENT_STEP in seen.intersection(inputs):
                models[name] = f"only its validation loss, on {DEV_ALIGNMENT_STEP}"
            # Features that a model never trained on still enter its global mean and variance.
            elif seen.intersection(inputs):
                models[name] = "only its normalization"
        return models

    def _finished_models(self) -> list[str]:
        base = join_uri(self.run_uri, MODELS_FOLDER)
        keys = (found.uri.removeprefix(f"{base}/") for found in self.store.list(base))
        parts = (key.split("/") for key in keys)
        return [name for name, *rest in parts if rest == [MANIFEST_FILE]]

    def _manifest(self, step: str) -> Manifest | None:
        if not self.store.exists(manifest_uri(self.run_uri, step)):
            return None
        return read_manifest(self.store, self.run_uri, step)

    def _add(self, manifest: Manifest, outcome: str, hit: Hit, facts: Mapping[str, Any]) -> Hit:
        self.steps.append(
            StepTrace(
                manifest.step,
                outcome,
                hit.key,
                hit.position if hit.key else None,
                {name: value for name, value in facts.items() if name != "utterance_id"},
                sha256(json.dumps(manifest.config, sort_keys=True).encode()),
                manifest.code_version,
            )
        )
        return hit
