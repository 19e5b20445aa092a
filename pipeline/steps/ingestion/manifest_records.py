"""Make metadata records of a manifest's rows, and write them by day and speaker bucket.

A record gets absolute URIs, an id and a time, and fields that are not ours are dropped. Where the
manifest does not state how long the audio lasts, the duration is read from the audio. Records are
written below `date=.../speaker_bucket=.../`, within bounded memory.
"""

import gzip
import hashlib
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any

from infra.prefetch import prefetch
from infra.settings import shown
from infra.store.object_store import (
    IN_FLIGHT_BYTES,
    ObjectDenied,
    ObjectInfo,
    ObjectNotFound,
    ObjectStore,
    PrefixError,
    StoreError,
    join_uri,
)
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
from pipeline.steps.audio_reads import ObjectRanges, Refusal, lost_objects, refusal
from pipeline.steps.ingestion.manifest_format import CHANNEL
from pipeline.steps.ingestion.manifest_rows import Row, each_row

ARCHIVE_ENTRY = re.compile(r"\.(ark|scp)(\.gz)?(:\d+)?(\[.*\])?$")
"""An entry of a Kaldi archive, such as wav.1.ark:1234."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
    rows: Iterable[Row | Quarantined], folder: str, prefixes: Sequence[str]
) -> Iterator[Row | Quarantined]:
    """Make each row's audio URI absolute; one that cannot be read becomes a ledger row."""

    def located(row: Row) -> Row:
        if not (isinstance(uri := row.fields.get("audio_uri"), str) and uri):
            return row
        fields = dict(row.fields)
        base = fields.pop("folder", folder)
        audio_uri = uri if is_absolute(uri) else join_uri(base, uri.removeprefix("./"))
        partial = PartialRecord(str(fields.get("utterance_id", "")), audio_uri)
        if ARCHIVE_ENTRY.search(uri):
            raise MetadataError("bad_field", f"{uri}: {OF_ARCHIVE}", partial)
        try:
            return Row({**fields, "audio_uri": require_within(audio_uri, prefixes)}, row.num_bytes)
        except PrefixError as error:
            detail = f"{error}: add it to corpus.audio_prefixes" if error.is_outside else str(error)
            raise MetadataError(OUTSIDE_PREFIXES, detail, partial) from error

    return each_row(located, rows)


def records_of(
    rows: Iterable[Row | Quarantined], rules: RecordRules, subset: str, columns: Mapping[str, str]
) -> Iterator[Utterance | Quarantined]:
    """Yield the records, checked as selection will; transcripts of unlabelled speech are dropped.

    A row without an id is named after its audio; without a speaker, its recording counts as one;
    without a time, it is dated 1970-01-01 plus its start. Ledger rows call a field as the manifest
    does, by `columns`.
    """

    def record_of(row: Row) -> Utterance:
        try:
            return _record(row, rules, subset)
        except MetadataError as error:
            name, blank, said = error.detail.partition(" ")
            error.detail = f"{columns.get(name, name)}{blank}{said}"
            raise

    return each_row(record_of, rows)


def _record(row: Row, rules: RecordRules, subset: str) -> Utterance:
    if not isinstance(uri := row.fields.get("audio_uri"), str):
        # First, as the id that is made of it would be absent, too.
        named = row.fields.get("utterance_id")
        partial = PartialRecord(named if isinstance(named, str) else "")
        if uri is None:
            raise MetadataError("missing_field", "audio_uri is absent", partial)
        raise MetadataError("wrong_type", f"audio_uri = {shown(uri)}: need text", partial)
    fields = {**_defaults(uri, row.fields, rules), **row.fields}
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


def _defaults(uri: str, fields: Mapping[str, Any], rules: RecordRules) -> dict[str, Any]:
    """Return the fields of a record that a row need not have."""
    start_s = fields.get("start_s", 0.0)
    # NaN is in no range.
    is_time = isinstance(start_s, int | float) and 0 <= start_s <= MAX_START_S
    start = timedelta(seconds=start_s if is_time else 0.0)
    file = uri.rpartition("/")[2]
    member_offset = fields.get("member_offset")
    source = uri if member_offset is None else f"{uri} {member_offset}"
    digest = blake2b(source.encode(errors="replace"), digest_size=6).hexdigest()
    recording = f"{(file.rpartition('.')[0] or file)[:100]}-{digest}"
    place = f"-{round(start.total_seconds() * 1000):09d}" if "start_s" in fields else ""
    return {
        "utterance_id": f"{recording}{place}",
        "speaker_id": recording,
        "created_at": (EPOCH + start).isoformat(timespec="milliseconds"),
        "locale": rules.locale,
    }


_BATCH = 256


def with_durations(
    store: ObjectStore, rows: Iterable[Row | Quarantined], column: str = "duration_s"
) -> Iterator[Row | Quarantined]:
    """Yield the rows in order; those without a duration get that of their audio's header.

    A segment without one lasts to the end of its recording. The header is one small GET of a WAV or
    FLAC; other formats are read whole. `column` is the manifest's name of the duration.
    """
    remaining, one_large = iter(rows), threading.RLock()
    while batch := list(islice(remaining, _BATCH)):
        if not any(_lacks_duration(row) for row in batch):
            yield from batch
            continue
        read = partial(_with_duration, store, column, one_large)
        found = [each for _, each in prefetch(read, batch)]
        yield from map(partial(_confirmed, read, _lost(store, batch, found)), batch, found)


def _lacks_duration(row: Row | Quarantined) -> bool:
    if isinstance(row, Quarantined) or "duration_s" in row.fields or "member_offset" in row.fields:
        return False
    return isinstance(row.fields.get("audio_uri"), str)


LARGE_BYTES = IN_FLIGHT_BYTES // 16
"""Of larger files that are read whole, one at a time is in memory."""


def _lost(
    store: ObjectStore,
    batch: Sequence[Row | Quarantined],
    found: Sequence[Row | Quarantined | Refusal],
) -> Collection[str]:
    """Return the objects that are lost; StoreError where none of a batch's can be read."""
    pairs = [
        (str(row.fields["audio_uri"]), each)
        for row, each in zip(batch, found, strict=True)
        if isinstance(row, Row) and _lacks_duration(row)
    ]
    refused = {uri: each for uri, each in pairs if isinstance(each, Refusal)}
    if not refused:
        return ()
    return lost_objects(store, refused, next((uri for uri, _ in pairs if uri not in refused), ""))


def _confirmed(
    read: Callable[[Row | Quarantined], Row | Quarantined | Refusal],
    lost: Collection[str],
    row: Row | Quarantined,
    found: Row | Quarantined | Refusal,
) -> Row | Quarantined:
    """Return what was found; of a refused object a ledger row, or what is there after all."""
    if not isinstance(found, Refusal):
        return found
    assert isinstance(row, Row), "an object was asked for"
    uri: str = row.fields["audio_uri"]
    if uri in lost:
        named = str(row.fields.get("utterance_id", "")), uri
        return Quarantined(*named, refusal(found), str(found), row.num_bytes, 0)
    if isinstance(again := read(row), Refusal):
        raise StoreError(f"{again}; it answered a moment ago: check the store, then run again")
    return again


def _with_duration(
    store: ObjectStore, column: str, one_large: threading.RLock, row: Row | Quarantined
) -> Row | Quarantined | Refusal:
    if isinstance(row, Quarantined) or not _lacks_duration(row):
        return row
    uri, start_s = row.fields["audio_uri"], row.fields.get("start_s", 0.0)
    try:
        head = store.fetch_range(uri, 0, HEAD_BYTES)
        ranges = ObjectRanges(store, uri, head)
        with ExitStack() as held:

            def read(first: int, num_bytes: int) -> bytes:
                if num_bytes > LARGE_BYTES:
                    held.enter_context(one_large)
                return ranges.read(first, num_bytes)

            duration_s = stated_duration_s(read, head.object_bytes)
        reason = "missing_field"
        detail = f"{column} is absent, and the audio does not state how long it lasts"
    except (ObjectNotFound, ObjectDenied) as error:
        return error
    except StoreError as error:
        duration_s, reason, detail = None, refusal(error), str(error)
    named = str(row.fields.get("utterance_id", "")), uri
    if duration_s is None:
        return Quarantined(*named, reason, detail, row.num_bytes, 0)
    if not isinstance(start_s, int | float) or not 0 <= start_s <= MAX_START_S:
        detail = f"start_s = {shown(start_s)}: need 0 to {MAX_START_S:.0f}"
        return Quarantined(*named, "bad_field", detail, row.num_bytes, 0)
    return Row({**row.fields, "duration_s": round(duration_s - start_s, 6)}, row.num_bytes)


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
        line, bucket = record.to_json(), speaker_bucket(record.speaker_id, self._num_buckets)
        folder = f"{date_folder(record)}/speaker_bucket={bucket}"
        self._lines[folder].append((line, record.duration_ms))
        self._num_bytes += len(line)
        if self._num_bytes >= MAX_HELD_BYTES:
            self._write()

    def finish(self) -> tuple[Output, ...]:
        """Write what is held, and return all objects in the order of their keys."""
        self._write()
        return tuple(sorted(self._outputs, key=lambda output: output.key))

    def _write(self) -> None:
        for folder, lines in sorted(self._lines.items()):
            text = "".join(f"{line}\n" for line, _ in lines).encode()
            # Without a time in the header, the same records give the same bytes.
            data = gzip.compress(text, compresslevel=6, mtime=0)
            key = f"{self._prefix}/{folder}/{self._task}-{sha256(data)[:16]}.jsonl.gz"
            self._store.put(join_uri(self._corpus_uri, key), data)
            tally = Tally(len(lines), sum(duration_ms for _, duration_ms in lines))
            self._outputs.append(output_of(key, data, tally))
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


NO_RECORDS = Tally()


def output_of(key: str, data: bytes, tally: Tally = NO_RECORDS) -> Output:
    """Describe an object of the corpus, and the records that it holds."""
    return Output(key, len(data), sha256(data), tally.utterances, tally.duration_ms)


def put_once(
    store: ObjectStore,
    corpus_uri: str,
    key: str,
    data: bytes,
    found: ObjectInfo | None = None,
    tally: Tally = NO_RECORDS,
) -> Output:
    """Store an object that is not there; ValueError if other bytes are, as `found` or since."""
    uri = join_uri(corpus_uri, key)
    is_ours = holds(store, found, data) if found else store.put_if_absent(uri, data)
    if not is_ours and (found or store.get(uri) != data):
        raise other_corpus(uri)
    return output_of(key, data, tally)


def holds(store: ObjectStore, found: ObjectInfo, data: bytes) -> bool:
    """Compare an object with `data`: by its ETag if that is the MD5, or else by its bytes."""
    if found.num_bytes != len(data):
        return False
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return found.etag == md5 or store.get(found.uri) == data


def other_corpus(uri: str) -> ValueError:
    """Say that an object there is of another corpus."""
    remedy = "use another corpus.uri, or remove the corpus there"
    return ValueError(f"{uri} is from another corpus than what is ingested: {remedy}")
