"""Read from the audio how long it lasts, where a manifest does not say it."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, StoreError
from pipeline.audio.decode import MAX_DURATION_S, max_file_bytes, stated_duration_s
from pipeline.audio.errors import AudioError
from pipeline.audio.flac import stream_info
from pipeline.audio.recording_segments import HEAD_BYTES
from pipeline.audio.wav import is_wav, wav_layout
from pipeline.records import MetadataError, PartialRecord, Quarantined
from pipeline.steps.ingestion.manifest_rows import Row
from pipeline.steps.part_requests import ObjectRanges
from pipeline.steps.utterance_features import REFUSALS

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
    if is_wav(head.data):
        try:
            layout = wav_layout(ObjectRanges(store, uri, head).read, head.object_bytes)
        except AudioError:
            return None
        if layout.frame_bytes:
            return layout.num_samples / layout.rate_hz
    if head.data.startswith(b"fLaC"):
        try:
            info = stream_info(head.data)
        except ValueError:
            return None
        return info.num_samples / info.sample_rate_hz if info.num_samples else None
    if head.object_bytes > max_file_bytes(float(MAX_DURATION_S)):
        return None
    return stated_duration_s(store.get(uri) if head.object_bytes > len(head.data) else head.data)
