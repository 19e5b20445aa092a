"""Find one utterance among many objects: several in flight, until the first that holds it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from infra.prefetch import prefetch
from infra.store.checked_reads import read_checked, scan_checked
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from pipeline.metadata import read_records
from pipeline.records import Quarantined, Utterance
from pipeline.runs.commit import Commit
from pipeline.runs.json_lines import IDENTIFIED, read_lines
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import COMMITS_FOLDER
from pipeline.runs.outputs import find_outputs
from pipeline.shards.container import read_plain_columns
from pipeline.shards.stored_kbest import OFFSETS_ENTRY

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
