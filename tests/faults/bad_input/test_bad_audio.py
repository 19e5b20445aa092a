"""Bad audio of every kind costs one ledger row each in selection and extraction, and no harm."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import join_uri
from pipeline.audio.decode import AudioError, decode_audio
from pipeline.runs.manifest import Manifest
from pipeline.shards import FeatureRow
from tests.faults.bad_input.audio_kinds import (
    BAD,
    FLAC,
    GOOD,
    MP3,
    OPUS,
    VORBIS,
    WAV,
    Kind,
    patched,
)
from tests.faults.bad_input.small_runs import (
    Record,
    extract,
    features,
    ledger,
    lines_of,
    put_metadata,
    put_tone,
    record,
    select,
)
from tests.small_corpus import local_store

pytestmark = pytest.mark.timeout(300)
KINDS = BAD | GOOD


@dataclass(frozen=True)
class Extracted:
    """Extracted holds what extraction made of a corpus."""

    selected: Manifest
    manifest: Manifest
    rows: dict[str, FeatureRow]
    ledger: list[Record]


def extracted(folder: Path, kinds: dict[str, Kind]) -> Extracted:
    """Extract for each kind of `KINDS` good audio, that of `kinds` if it is there, good audio."""
    store, run_uri, corpus_uri = local_store(folder)
    records = []
    for number, kind in enumerate(KINDS):
        neighbours = [record(f"{number}-{minute}", kind, minute) for minute in (0, 2)]
        for minute, neighbour in enumerate(neighbours):
            put_tone(store, corpus_uri, neighbour, number + minute)
        records += neighbours
        if kind in kinds:
            declared_s = kinds[kind].declared_s
            records.append(record(f"{number}-1", kind, 1, duration_s=declared_s))
            store.put(join_uri(corpus_uri, f"audio/{number}-1"), kinds[kind].data)
    put_metadata(store, corpus_uri, lines_of(records))
    selected = select(store, run_uri, corpus_uri)
    manifest = extract(store, run_uri, corpus_uri)
    rows = features(store, run_uri, manifest)
    return Extracted(selected, manifest, rows, ledger(store, run_uri, manifest.ledgers))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Extracted:
    """Extract every kind between two good neighbours of the same speaker."""
    return extracted(tmp_path_factory.mktemp("mixed"), KINDS)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Extracted:
    """Extract the same corpus without the bad kinds."""
    return extracted(tmp_path_factory.mktemp("clean"), GOOD)


@pytest.mark.parametrize("kind", BAD)
def test_bad_audio_has_its_own_row_and_harms_no_neighbour(
    mixed: Extracted, clean: Extracted, kind: str
) -> None:
    """Each has one row with the stated reason; the speaker's good utterances keep every bit."""
    number = list(KINDS).index(kind)
    (row,) = [each for each in mixed.ledger if each["utterance_id"] == f"{number}-1"]
    assert row["reason"] == BAD[kind].reason
    assert row["audio_uri"] == f"audio/{number}-1"
    assert row["num_bytes"] == len(BAD[kind].data)
    assert row["duration_ms"] == round(BAD[kind].declared_s * 1000)
    assert 0 < len(row["detail"]) <= 300
    assert f"{number}-1" not in mixed.rows
    for neighbour in (f"{number}-0", f"{number}-2"):
        ours, theirs = mixed.rows[neighbour].features, clean.rows[neighbour].features
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", GOOD)
def test_unusual_audio_that_is_good_is_kept(mixed: Extracted, kind: str) -> None:
    """Unusual audio has features, as many frames as it lasts, and no row in the ledger."""
    utterance_id = f"{list(KINDS).index(kind)}-1"
    num_frames = 1 + (len(decode_audio(GOOD[kind].data)) - 400) // 160
    assert len(mixed.rows[utterance_id].features) == num_frames
    assert utterance_id not in {row["utterance_id"] for row in mixed.ledger}


def test_the_books_balance(mixed: Extracted) -> None:
    """Selected equals written plus quarantined, in utterances and in milliseconds."""
    manifest = mixed.manifest
    assert mixed.selected.tally_out == manifest.tally_out + manifest.quarantined
    assert manifest.quarantined.utterances == len(mixed.ledger) == len(BAD)
    assert manifest.quarantined.duration_ms == sum(row["duration_ms"] for row in mixed.ledger)
    assert len(mixed.rows) == manifest.tally_out.utterances == 2 * len(KINDS) + len(GOOD)
    every = Counter([*mixed.rows, *(row["utterance_id"] for row in mixed.ledger)])
    assert set(every.values()) == {1}


def test_each_reason_has_a_kind() -> None:
    """All reasons but those of an object's place."""
    assert {kind.reason for kind in BAD.values()} == {
        *("empty_object", "not_audio", "truncated", "unknown_length", "duration_mismatch"),
        *("joined_files", "newlines_converted", "checksum_mismatch"),
        *("wrong_sample_rate", "not_mono", "too_short", "too_long"),
        *("silent", "clipped", "non_finite"),
    }


def decoded(data: bytes) -> np.ndarray | None:
    """Decode `data` in less than 2 s of CPU; return None for an AudioError."""
    begun_s = time.process_time()
    try:
        return decode_audio(data)
    except AudioError:
        return None
    finally:
        assert time.process_time() - begun_s < 2.0


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([WAV, FLAC, VORBIS, OPUS, MP3]),
    st.integers(0, 200),
    st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"]),
)
def test_any_number_in_a_header_gives_an_audio_error_or_samples(
    whole: bytes, position: int, number: bytes
) -> None:
    """Sizes, rates and counts at their limits allocate no more than an hour."""
    samples = decoded(patched(whole, position, number))
    assert samples is None or len(samples) <= 3600 * 16_000
