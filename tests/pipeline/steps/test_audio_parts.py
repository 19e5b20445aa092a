"""Segments and members have the features of the same samples as an object of their own."""

import io
import struct
from collections.abc import Sequence
from pathlib import Path

import boto3
import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectStore
from infra.task_metrics import REQUESTS
from pipeline.audio.decode import HEAD_BYTES, decode_audio, segment_samples
from pipeline.audio.errors import AudioError
from pipeline.records import (
    AudioPart,
    Member,
    MetadataError,
    Quarantined,
    Segment,
    Utterance,
    parse_utterance,
    part_from_text,
    part_to_text,
)
from pipeline.settings import AudioConversion, ExtractionConfig
from pipeline.shards import FeatureRow, read_features, write_features
from pipeline.steps import audio_reads
from pipeline.steps.features import audio_objects, extract_rows
from tests.small_corpus import encode, flac, tone, wav

RATE = 16_000
CONVERSION = AudioConversion((44_100,), "mean")
PLACES = ((0.0, 0.8), (0.5, 1.25), (2.0, 1.0))


def utterance(uri: str, number: int, duration_s: float, part: AudioPart | None) -> Utterance:
    time = f"2026-01-01T00:00:{number:02d}+00:00"
    return Utterance(f"u{number}", "ann", duration_s, time, "en", uri, part=part)


def extract(
    store: ObjectStore, corpus: str, utterances: Sequence[Utterance]
) -> list[FeatureRow | Quarantined]:
    audio = audio_objects(store, corpus, utterances, 4, CONVERSION)
    return list(
        extract_rows(utterances, audio.read(), ExtractionConfig(4, 3, conversion=CONVERSION))
    )


def features_of(rows: Sequence[FeatureRow | Quarantined]) -> list[bytes]:
    assert all(isinstance(row, FeatureRow) for row in rows), rows
    return [row.features.tobytes() for row in rows if isinstance(row, FeatureRow)]


@pytest.mark.parametrize(
    ("form", "subtype", "rate"),
    [("WAV", "PCM_24", 44_100), ("FLAC", "PCM_24", 44_100), ("MP3", "MPEG_LAYER_III", RATE)],
)
def test_segments_equal_objects(tmp_path: Path, form: str, subtype: str, rate: int) -> None:
    """The features are equal to the byte, whatever holds the recording; so is their shard."""
    store = ObjectStore((str(tmp_path),))
    time = np.arange(4 * rate) / rate
    samples = 0.1 * np.sin(2 * np.pi * 300 * time * (1 + time / 9)) + tone(1, 4)[0] / 50
    if rate != RATE:
        samples = np.stack([samples, samples[::-1]], axis=1)
    data = encode(samples, form, subtype, rate)
    if rate == RATE:
        decoded = decode_audio(data).reshape(-1, 1)
    else:
        decoded, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    store.put(f"{tmp_path}/whole", data)
    parts, objects = [], []
    for number, (start_s, duration_s) in enumerate(PLACES):
        first, count = round(start_s * rate), round(duration_s * rate)
        own = encode(decoded[first : first + count], "WAV", "FLOAT", rate)
        store.put(f"{tmp_path}/{number}", own)
        objects.append(utterance(str(number), number, duration_s, None))
        parts.append(utterance("whole", number, duration_s, Segment(start_s, duration_s)))
    rows = extract(store, str(tmp_path), parts)
    assert features_of(rows) == features_of(extract(store, str(tmp_path), objects))
    given = [row for row in rows if isinstance(row, FeatureRow)]
    again = read_features(write_features(given))
    assert [row.audio_part for row in again] == [each.part for each in parts]


@pytest.mark.usefixtures("quick_decisions")
def test_bad_parts_are_ledger_rows(tmp_path: Path) -> None:
    """Each says why; the utterances beside them are kept."""
    store = ObjectStore((str(tmp_path),))
    store.put(f"{tmp_path}/r.wav", wav(tone(1, 2)))
    store.put(f"{tmp_path}/r.flac", flac(tone(1, 2)))
    store.put(f"{tmp_path}/text", b"no audio" * 50)
    altered = bytearray(flac(tone(1, 2)))
    altered[26] ^= 1  # the MD5 that the header states
    store.put(f"{tmp_path}/altered.flac", bytes(altered))
    parts: list[tuple[str, AudioPart, str]] = [
        ("r.wav", Segment(0.5, 1.0), ""),
        ("r.wav", Segment(1.05, 1.0), ""),
        ("r.wav", Segment(1.4, 1.0), "duration_mismatch"),
        ("r.wav", Segment(1.6, 1.0), "segment_beyond_end"),
        ("r.wav", Segment(9.0, 1.0), "segment_beyond_end"),
        ("r.flac", Segment(0.5, 1.0), ""),
        ("r.flac", Segment(1.6, 1.0), "segment_beyond_end"),
        ("altered.flac", Segment(0.5, 1.0), "checksum_mismatch"),
        ("gone.wav", Segment(0.0, 1.0), "missing_object"),
        ("text", Segment(0.0, 1.0), "not_audio"),
        ("r.wav", Member(0, 10**9), "too_large"),
        ("r.wav", Member(10, 64_100), "member_beyond_end"),
        ("r.wav", Member(10, 200), "not_audio"),
    ]
    utterances = [utterance(uri, number, 1.0, part) for number, (uri, part, _) in enumerate(parts)]
    rows = extract(store, str(tmp_path), utterances)
    reasons = [row.reason if isinstance(row, Quarantined) else "" for row in rows]
    assert reasons == [reason for *_, reason in parts]


@pytest.mark.parametrize(
    ("rate", "duration_s", "reason"),
    [(RATE, 7200.0, "too_long"), (48_000, 9.0, "wrong_sample_rate")],
)
def test_what_is_refused_is_not_read(
    tmp_path: Path, rate: int, duration_s: float, reason: str
) -> None:
    """Of a WAV the header decides; of other containers no segment longer than an hour is kept."""
    store = ObjectStore((str(tmp_path),))
    num_bytes = 2 * round(rate * duration_s)
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data"
    with (tmp_path / "r.wav").open("wb") as file:
        file.write(b"RIFF" + struct.pack("<I", num_bytes + 36) + chunks)
        file.write(struct.pack("<I", num_bytes))
        file.truncate(file.tell() + num_bytes)  # zeros that take no disk
    before = REQUESTS.total()
    segment = utterance("r.wav", 1, duration_s, Segment(0.0, duration_s))
    (row,) = extract(store, str(tmp_path), [segment])
    assert isinstance(row, Quarantined)
    assert row.reason == reason
    assert (REQUESTS.total() - before).bytes_received <= HEAD_BYTES
    with pytest.raises(AudioError, match=r"too_long: a segment of 3600.001 s: need at most 3600 s"):
        segment_samples(Segment(0.0, 3600.001), RATE, 2 * 3600 * RATE)


def test_parts_share_requests(s3_bucket: str) -> None:
    """64 members are one range; 40 segments of a WAV are its header and one range."""
    base = f"s3://{s3_bucket}/corpus"
    store = ObjectStore((base,))
    one, long = flac(tone(1, 0.5)), wav(tone(2, 21))
    archive = b"".join(one.ljust(len(one) + 512, b"\0") for _ in range(64))
    client = boto3.client("s3")
    client.put_object(Bucket=s3_bucket, Key="corpus/a.tar", Body=archive)
    client.put_object(Bucket=s3_bucket, Key="corpus/r.wav", Body=long)
    members = [
        utterance("a.tar", number % 60, 0.5, Member(number * (len(one) + 512), len(one)))
        for number in reversed(range(64))
    ]
    segments = [utterance("r.wav", number, 0.5, Segment(number / 2, 0.5)) for number in range(40)]
    extract(store, base, members[:1])  # the first request asks for the bucket too
    for utterances, num_requests in ((members, 1), (segments, 2)):
        before = REQUESTS.total()
        assert len(features_of(extract(store, base, utterances))) == len(utterances)
        assert (REQUESTS.total() - before).get == num_requests


def test_ranges_are_joined_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are one request up to a gap and a length, on both sides of each."""
    monkeypatch.setattr(audio_reads, "MAX_GAP_BYTES", 10)
    monkeypatch.setattr(audio_reads, "MAX_RANGE_BYTES", 100)
    assert audio_reads.joined_ranges([(60, 10), (0, 50)]) == [[1, 0]]
    assert audio_reads.joined_ranges([(61, 10), (0, 50)]) == [[1], [0]]
    assert audio_reads.joined_ranges([(0, 50), (50, 50)]) == [[0, 1]]
    assert audio_reads.joined_ranges([(0, 50), (50, 51)]) == [[0], [1]]
    assert audio_reads.joined_ranges([(0, 90), (10, 10), (80, 20)]) == [[0, 1, 2]]


def test_windows_bound_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one object in different windows are read by requests of their own."""
    store = ObjectStore((str(tmp_path),))
    store.put(f"{tmp_path}/r.wav", wav(tone(1, 4)))
    utterances = [utterance("r.wav", number, 0.5, Segment(number / 2, 0.5)) for number in range(8)]
    whole = features_of(extract(store, str(tmp_path), utterances))
    monkeypatch.setattr(audio_reads, "WINDOW_BYTES", 1)
    before = REQUESTS.total()
    assert features_of(extract(store, str(tmp_path), utterances)) == whole
    assert (REQUESTS.total() - before).get == 16


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"start_s": -1', "start_s = -1: need 0 to"),
        ('"start_s": NaN', "start_s = nan"),
        ('"start_s": true', "start_s = True"),
        ('"start_s": 1, "member_offset": 1', "not both"),
        ('"member_offset": 1', "member_bytes = None"),
        ('"member_bytes": 1', "member_offset = None"),
        ('"member_offset": 1.5, "member_bytes": 1', "member_offset = 1.5"),
        ('"member_offset": 1, "member_bytes": 0', "member_bytes = 0: need an integer, 1 to"),
    ],
)
def test_bad_fields_of_parts(fields: str, said: str) -> None:
    """A record whose part is not one of the forms is a ledger row, bad_field."""
    line = utterance("a", 1, 1.0, None).to_json()[:-1] + f", {fields}}}"
    with pytest.raises(MetadataError, match=said) as found:
        parse_utterance(line)
    assert found.value.reason == "bad_field"


@pytest.mark.parametrize("part", [None, Segment(1.5, 2.0), Member(512, 100)])
def test_parts_are_written_and_read(part: AudioPart | None) -> None:
    """A record and a shard's column give back what they were made of."""
    record = utterance("a", 1, 2.0, part)
    assert parse_utterance(record.to_json()) == record
    assert part_from_text(part_to_text(part)) == part
