"""Make metadata records of a manifest's rows, and write them by day and speaker bucket.

A record gets absolute URIs, an id and a time, and fields that are not ours are dropped. Where the
manifest does not state how long the audio lasts, the duration is read from the audio. Records are
written below `date=.../speaker_bucket=.../`, within bounded memory.
"""

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from itertools import islice
from types import MappingProxyType
from typing import Any

from infra.prefetch import prefetch
from infra.settings import shown
from infra.store.object_store import ObjectStore, PrefixError, StoreError, join_uri
from infra.store.uris import is_absolute, require_within
from pipeline.audio.codecs import stated_duration_s
from pipeline.audio.decode import HEAD_BYTES
from pipeline.records import (
    MAX_START_S,
    MetadataError,
    PartialRecord,
    Quarantined,
    Tally,
    Utterance,
    parse_fields,
)
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import DEV, LABELLED, OUTSIDE_PREFIXES, UNLABELLED
from pipeline.sampling import NUM_PRIORITIES, hash_name
from pipeline.steps.audio_reads import ObjectRanges
from pipeline.steps.features import REFUSALS
from pipeline.steps.ingestion.manifest_format import CHANNEL
from pipeline.steps.ingestion.manifest_rows import Row

ARCHIVE_ENTRY = re.compile(r"\.(ark|scp)(\.gz)?(:\d+)?(\[.*\])?$")
"""An entry of a Kaldi archive, such as wav.1.ark:1234."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RecordRules:
    """RecordRules: the locale where a row has none, and the number of speaker buckets.

    `dev_share` is the share of the labelled speakers that become development speakers. A row that
    names a channel is a record if extraction will hear that one: `channel`, as the recipe's
    features.conversion has it.
    """

    locale: str
    num_buckets: int
    dev_share: float = 0.0
    channel: str = "only"

    def subsets_of(self, subset: str) -> tuple[str, ...]:
        """Return the subsets into which a manifest's utterances may go."""
        return (LABELLED, DEV) if subset == LABELLED and self.dev_share else (subset,)

    def subset_of(self, subset: str, speaker_id: str) -> str:
        """Return the subset of a manifest's speaker: of labelled ones, some are of development.

        A hash of the id alone decides, so that no task, manifest or increment moves a speaker.
        """
        is_drawn = hash_name(speaker_id) < self.dev_share * NUM_PRIORITIES
        return DEV if subset == LABELLED and is_drawn else subset


OF_ARCHIVE = (
    "an entry of a Kaldi archive is not read: name files, which "
    "wav-copy scp:wav.scp scp:files.scp writes where files.scp says"
)


def with_audio(
    rows: Iterator[Row | Quarantined], folder: str, prefixes: Sequence[str]
) -> Iterator[Row | Quarantined]:
    """Make each row's audio URI absolute; one that cannot be read becomes a ledger row."""
    for row in rows:
        uri = None if isinstance(row, Quarantined) else row.fields.get("audio_uri")
        if isinstance(row, Quarantined) or not isinstance(uri, str) or not uri:
            yield row
            continue
        fields = dict(row.fields)
        base = fields.pop("folder", folder)
        fields["audio_uri"] = uri if is_absolute(uri) else join_uri(base, uri.removeprefix("./"))
        partial = PartialRecord(str(fields.get("utterance_id", "")), fields["audio_uri"])
        try:
            if ARCHIVE_ENTRY.search(uri):
                raise MetadataError("bad_field", f"{uri}: {OF_ARCHIVE}", partial)
            fields["audio_uri"] = require_within(fields["audio_uri"], prefixes)
        except PrefixError as error:
            detail = f"{error}: add it to corpus.audio_prefixes" if error.is_outside else str(error)
            refused = MetadataError(OUTSIDE_PREFIXES, detail, partial)
            yield Quarantined.from_error(refused, row.num_bytes)
        except MetadataError as error:
            yield Quarantined.from_error(error, row.num_bytes)
        else:
            yield Row(fields, row.num_bytes)


def records_of(
    rows: Iterator[Row | Quarantined],
    rules: RecordRules,
    subset: str,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Utterance | Quarantined]:
    """Yield the records, checked as selection will; transcripts of unlabelled speech are dropped.

    A row without id is named by its audio; without speaker, its recording is the speaker; without
    time, it is as long after 1970 as it begins within its recording. Ledger rows call a field as
    the manifest does, by `columns`.
    """
    for row in rows:
        if isinstance(row, Quarantined):
            yield row
            continue
        try:
            yield _record(row, rules, subset)
        except MetadataError as error:
            name, blank, said = error.detail.partition(" ")
            error.detail = f"{columns.get(name, name)}{blank}{said}"
            yield Quarantined.from_error(error, row.num_bytes)


def _record(row: Row, rules: RecordRules, subset: str) -> Utterance:
    if not isinstance(uri := row.fields.get("audio_uri"), str):
        # First, as the id that is made of it would be absent, too.
        named = row.fields.get("utterance_id")
        partial = PartialRecord(named if isinstance(named, str) else "")
        if uri is None:
            raise MetadataError("missing_field", "audio_uri is absent", partial)
        raise MetadataError("wrong_type", f"audio_uri = {shown(uri)}: need text", partial)
    fields = {**_defaults(row.fields, rules), **row.fields}
    _require_heard(fields, rules.channel)
    if subset == UNLABELLED:
        fields.pop("text", None)
    record = parse_fields(fields)
    if subset != UNLABELLED and not (record.text or "").strip():
        partial = PartialRecord(record.utterance_id, record.audio_uri, record.duration_ms)
        raise MetadataError("missing_field", f"text is absent: {subset} needs it", partial)
    return record


def _require_heard(fields: dict[str, Any], heard: str) -> None:
    """Raise MetadataError for a channel that extraction would not hear; NeMo's mean is average."""
    named = fields.pop(CHANNEL, None)
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    if isinstance(named, float) and named.is_integer():  # of a column with holes
        named = int(named)
    channel = "mean" if named == "average" else str(named)
    # Files of one channel alone have the first one, which is their mean, too.
    if named is None or channel == heard or (heard == "only" and channel in ("0", "mean")):
        return
    detail = (
        f"channel = {shown(named)}: not what features.conversion.channel = {heard!r} hears: write "
        "a file for each channel, or give each channel a run with that setting"
    )
    partial = PartialRecord(str(fields.get("utterance_id", "")), str(fields.get("audio_uri", "")))
    raise MetadataError("bad_field", detail, partial)


def _defaults(fields: Any, rules: RecordRules) -> dict[str, Any]:  # noqa: ANN401 - as it came
    uri, start_s = fields.get("audio_uri"), fields.get("start_s", 0.0)
    if not isinstance(uri, str):
        return {"locale": rules.locale}
    # NaN is in no range.
    is_time = isinstance(start_s, int | float) and 0 <= start_s <= MAX_START_S
    start = timedelta(seconds=start_s if is_time else 0.0)
    recording = _name(uri, fields.get("member_offset"))
    place = f"-{round(start.total_seconds() * 1000):09d}" if "start_s" in fields else ""
    return {
        "utterance_id": f"{recording}{place}",
        "speaker_id": recording,
        "created_at": (_EPOCH + start).isoformat(timespec="milliseconds"),
        "locale": rules.locale,
    }


def _name(uri: str, member_offset: object) -> str:
    """Name an object by its file's name, and a hash of where it lies."""
    stem = uri.rpartition("/")[2].rpartition(".")[0] or uri.rpartition("/")[2]
    place = uri if member_offset is None else f"{uri} {member_offset}"
    return f"{stem[:100]}-{blake2b(place.encode(errors='replace'), digest_size=6).hexdigest()}"


IN_FLIGHT = 16
_BATCH = 256


def with_durations(
    store: ObjectStore, rows: Iterable[Row | Quarantined], column: str = "duration_s"
) -> Iterator[Row | Quarantined]:
    """Yield the rows in order; those without a duration get that of their audio's header.

    A segment without one lasts to the end of its recording. The header is one small GET of a WAV or
    FLAC; other formats are read whole. `column` is the manifest's name of the duration.
    """
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH)):
        if all(isinstance(row, Quarantined) or not _lacks_duration(row.fields) for row in batch):
            yield from batch
            continue
        for _, found in prefetch(partial(_with_duration, store, column), batch, IN_FLIGHT):
            yield found


def _lacks_duration(fields: Any) -> bool:  # noqa: ANN401 - a row's fields are as they came
    is_member = "member_offset" in fields
    return "duration_s" not in fields and not is_member and isinstance(fields.get("audio_uri"), str)


def _with_duration(store: ObjectStore, column: str, row: Row | Quarantined) -> Row | Quarantined:
    if isinstance(row, Quarantined) or not _lacks_duration(row.fields):
        return row
    uri = row.fields["audio_uri"]
    partial_record = PartialRecord(str(row.fields.get("utterance_id", "")), uri)
    try:
        duration_s = stated_seconds(store, uri)
    except StoreError as error:
        if (reason := REFUSALS.get(type(error))) is None:
            raise
        refused = MetadataError(reason, str(error), partial_record)
        return Quarantined.from_error(refused, row.num_bytes)
    if duration_s is None:
        detail = f"{column} is absent, and the audio does not state how long it lasts"
        return Quarantined.from_error(
            MetadataError("missing_field", detail, partial_record), row.num_bytes
        )
    start_s = row.fields.get("start_s", 0.0)
    if not isinstance(start_s, int | float):
        return row  # the record's check names it
    return Row({**row.fields, "duration_s": round(duration_s - start_s, 6)}, row.num_bytes)


def stated_seconds(store: ObjectStore, uri: str) -> float | None:
    """Return how long an object's audio lasts; None if it does not state it."""
    head = store.fetch_range(uri, 0, HEAD_BYTES)
    return stated_duration_s(ObjectRanges(store, uri, head).read, head.object_bytes)


MAX_HELD_BYTES = 64 * 2**20
"""A task holds so many bytes of records, then writes those of every folder."""


class MetadataObjects:
    """MetadataObjects holds one task's records by folder, and writes objects named by digests."""

    def __init__(
        self, store: ObjectStore, corpus_uri: str, prefix: str, task: str, num_buckets: int
    ) -> None:
        self._store, self._corpus_uri, self._prefix = store, corpus_uri, prefix
        self._task, self._num_buckets = task, num_buckets
        self._lines: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self._num_bytes = 0
        self._outputs: list[Output] = []

    def add(self, record: Utterance) -> None:
        """Add a record to the folder of its day and its speaker's bucket."""
        line = record.to_json()
        self._lines[self._folder(record)].append((line, record.duration_ms))
        self._num_bytes += len(line)
        if self._num_bytes >= MAX_HELD_BYTES:
            self._write()

    def finish(self) -> tuple[Output, ...]:
        """Write what is held, and return all objects in the order of their keys."""
        self._write()
        return tuple(sorted(self._outputs, key=lambda output: output.key))

    def _folder(self, record: Utterance) -> str:
        bucket = speaker_bucket(record.speaker_id, self._num_buckets)
        return f"{date_folder(record)}/speaker_bucket={bucket}"

    def _write(self) -> None:
        for folder, lines in sorted(self._lines.items()):
            text = "".join(f"{line}\n" for line, _ in lines).encode()
            # Without a time in the header, the same records give the same bytes.
            data = gzip.compress(text, compresslevel=6, mtime=0)
            digest = sha256(data)
            key = f"{self._prefix}/{folder}/{self._task}-{digest[:16]}.jsonl.gz"
            self._store.put(join_uri(self._corpus_uri, key), data)
            tally = Tally(len(lines), sum(duration_ms for _, duration_ms in lines))
            self._outputs.append(
                Output(key, len(data), digest, tally.utterances, tally.duration_ms)
            )
        self._lines.clear()
        self._num_bytes = 0


def date_folder(record: Utterance) -> str:
    """Return the name of the folder of a record's day, in UTC."""
    moment = datetime.fromisoformat(record.created_at)
    with suppress(OverflowError):  # at the calendar's edge its own date serves as well
        moment = moment.astimezone(UTC)
    return f"date={moment.date().isoformat()}"


def speaker_bucket(speaker_id: str, num_buckets: int) -> str:
    """Return the number of a speaker's bucket, by a hash of the id."""
    value = int.from_bytes(blake2b(speaker_id.encode(), digest_size=8).digest(), "big")
    return f"{value % num_buckets:0{max(len(str(num_buckets - 1)), 2)}d}"
