"""Extraction in bounded memory: a file's stream cut into shards, nothing lost, no bit changed."""

import tracemalloc
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audio.decode import decode_audio, decode_utterance
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean, Moments
from pipeline.records import Quarantined, Utterance
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.settings import (
    AudioConversion,
    ExtractionConfig,
    RepartitionConfig,
    Storage,
    TargetsConfig,
)
from pipeline.shards import FeatureRow, read_features, read_partition, write_partition
from pipeline.steps.features import audio_objects, extract_features, extract_rows, size_bound
from pipeline.steps.repartition import repartition
from pipeline.steps.targets import generate_targets
from tests.four_steps import put_teacher, rows_of, selected_corpus, teacher
from tests.long_speaker import measured, serially_cut
from tests.small_corpus import encode, serially

CONFIG = ExtractionConfig(gets_in_flight=4, seed=3)


def selected(folder: Path) -> tuple[ObjectStore, str, str]:
    """A store with five utterances of each of four speakers, two speakers a file."""
    return selected_corpus(folder, 4, 5, 10 / 3600)


def extracted(
    folder: Path, max_shard_frames: int, config: ExtractionConfig = CONFIG
) -> tuple[ObjectStore, str, Manifest]:
    """Features of the small corpus, in shards of about `max_shard_frames`."""
    store, run_uri, corpus_uri = selected(folder)
    cut = partial(serially_cut, max_shard_frames)
    arguments = (store, run_uri, "unlabelled", corpus_uri, config, 0.0, cut)
    return store, run_uri, extract_features(*arguments).manifest


def shards(store: ObjectStore, run_uri: str, manifest: Manifest) -> list[list[FeatureRow]]:
    return [read_features(read_output(store, run_uri, each)) for each in manifest.outputs]


def test_a_cut_stream_has_the_same_features_and_moments(tmp_path: Path) -> None:
    """Wherever shards end, every utterance has the same bits, and the sums of all too."""
    whole = extracted(tmp_path / "whole", 10**6)
    in_pieces = extracted(tmp_path / "pieces", 150)
    assert len(in_pieces[2].outputs) > 2 * len(whole[2].outputs)
    bits = [
        {row.utterance_id: row.features.tobytes() for shard in shards(*each) for row in shard}
        for each in (whole, in_pieces)
    ]
    assert bits[0] == bits[1]
    assert whole[2].statistics == in_pieces[2].statistics
    for shard in shards(*in_pieces):  # none could be cut earlier
        num_frames = [len(row.features) for row in shard]
        assert sum(num_frames) < 150 + max(num_frames)
    assert whole[2].tally_out == in_pieces[2].tally_out == in_pieces[2].tally_in


def test_a_cut_file_reaches_the_partitions_whole(tmp_path: Path) -> None:
    """Targets follow the shards; repartition joins all; nothing is lost, nothing is doubled."""
    store, run_uri, features = extracted(tmp_path, 150)
    put_teacher(store, run_uri)
    generate_targets(store, run_uri, TargetsConfig(4, 100, 3), teacher, serially)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 3, 3), serially)
    labelled, extracted_rows = (rows_of(store, run_uri, step) for step in ("targets", "features"))
    assert [row.utterance_id for row in labelled] == [row.utterance_id for row in extracted_rows]
    partitions = read_manifest(store, run_uri, "partitions/unlabelled")
    joined = [row.utterance_id for row in rows_of(store, run_uri, "partitions")]
    assert len(set(joined)) == len(joined) == 20
    assert partitions.tally_out == features.tally_in


def test_stored_features_are_those_of_the_reference_engine(tmp_path: Path) -> None:
    """Either engine's recipe runs; the features differ by less than float16's rounding shows."""
    fast = extracted(tmp_path / "fast", 10**6)
    kaldi = extracted(tmp_path / "kaldi", 10**6, replace(CONFIG, engine="kaldi"))
    for ours, theirs in zip(shards(*fast), shards(*kaldi), strict=True):
        for row, reference in zip(ours, theirs, strict=True):
            assert row.utterance_id == reference.utterance_id
            np.testing.assert_allclose(row.features, reference.features, rtol=2e-3, atol=2e-3)


def test_the_mean_none_stores_the_energies_themselves(tmp_path: Path) -> None:
    """Each row is the filter bank's output in float16; the causal mean of these is the default."""
    plain = extracted(tmp_path / "none", 10**6, replace(CONFIG, mean="none"))
    causal = extracted(tmp_path / "causal", 10**6)
    for ours, theirs in zip(shards(*plain), shards(*causal), strict=True):
        streams = defaultdict[str, CausalMean](CausalMean)
        by_time = sorted(zip(ours, theirs, strict=True), key=lambda pair: pair[0].created_at)
        for row, subtracted in by_time:
            data = plain[0].get(join_uri(plain[1], "corpus", row.audio_uri))
            samples = decode_utterance(data, row.utterance_id, row.duration_ms / 1000).samples
            energies = log_mel_energies(samples, CONFIG.engine)
            np.testing.assert_array_equal(row.features, energies.astype(np.float16))
            expected = streams[row.speaker_id].subtract(energies, np.float16)
            np.testing.assert_array_equal(subtracted.features, expected)


@pytest.mark.parametrize("storage", ["float16", "uint8"])
def test_moments_are_of_what_is_stored(tmp_path: Path, storage: Storage) -> None:
    """All shards together have the manifest's mean and deviation."""
    made = extracted(tmp_path, 150, replace(CONFIG, storage=storage))
    rows = [row.features for shard in shards(*made) for row in shard]
    found = Moments.of(np.concatenate(rows))
    stated = Moments.from_dict(made[2].statistics["moments"])
    assert stated.count == found.count
    np.testing.assert_allclose(stated.sum, found.sum, atol=1e-9)
    np.testing.assert_allclose(stated.sum_of_squares, found.sum_of_squares)


def test_one_byte_features_stay_what_they_are_in_partitions(tmp_path: Path) -> None:
    """Targets see them, partitions hold them in a byte each, and writing changes none of them."""
    store, run_uri, features = extracted(tmp_path, 10**6, replace(CONFIG, storage="uint8"))
    put_teacher(store, run_uri)
    generate_targets(store, run_uri, TargetsConfig(4, 100, 3), teacher, serially)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, 3), serially)
    stored = {
        row.utterance_id: row.features.tobytes()
        for shard in shards(store, run_uri, features)
        for row in shard
    }
    for output in read_manifest(store, run_uri, "partitions/unlabelled").outputs:
        data = read_output(store, run_uri, output)
        rows = read_partition(data)
        assert {row.storage for row in rows} == {"uint8"}
        assert all(stored[row.utterance_id] == row.features.tobytes() for row in rows)
        assert write_partition(rows) == data


def test_size_bounds_are_each_utterances_own() -> None:
    """16-bit PCM is expected; a longer declaration than the longest audio raises neither bound."""
    assert size_bound(5.0).expected_bytes == 160_000
    assert size_bound(5.0).max_bytes < 18e6 < size_bound(60.0).max_bytes
    assert size_bound(86_400.0) == size_bound(3600.0)
    assert size_bound(3600.0).expected_bytes == 115_200_000


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """6 GB of holes, declared as 24 h, become a ledger row and take no memory."""
    (tmp_path / "audio").mkdir()
    with (tmp_path / "audio" / "sparse.wav").open("wb") as file:
        file.truncate(6 * 10**9)
    long = Utterance("a", "s", 86_400.0, "2026-01-01T00:00:00+00:00", "en-US", "audio/sparse.wav")
    store = ObjectStore((str(tmp_path),))
    tracemalloc.start()
    audio = audio_objects(store, str(tmp_path), [long], 4)
    [row] = extract_rows([long], audio.read(), CONFIG)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(row, Quarantined)
    assert (row.reason, row.detail.partition(": ")[2]) == (
        "too_large",
        f"6000000000 bytes: need at most {size_bound(3600.0).max_bytes}",
    )
    assert peak_bytes < 2**20


def test_memory_does_not_grow_with_the_stream(tmp_path: Path) -> None:
    """24 minutes more of one speaker, 18 MB of features, costs less than 10 MB."""
    shorter, longer = (
        measured(tmp_path / str(hours), hours, 10.0, max_shard_frames=10_000)
        for hours in (0.1, 0.5)
    )
    assert (shorter["shards"], longer["shards"]) == (4, 17)
    assert longer["peak_bytes"] - shorter["peak_bytes"] < 10 * 2**20


RATES_HZ = (8_000, 16_000, 22_050, 44_100)
CONVERTING = replace(CONFIG, conversion=AudioConversion((8_000, 22_050, 44_100), "mean"))


def recorded_otherwise(store: ObjectStore, corpus_uri: str) -> dict[str, str | None]:
    """Store the corpus's audio again, in stereo at several rates; the forms by utterance id."""
    forms: dict[str, str | None] = {}
    audio = sorted(found.uri for found in store.list(f"{corpus_uri}/audio"))
    for number, uri in enumerate(audio):
        samples = decode_audio(store.get(uri))
        rate_hz, num_channels = RATES_HZ[number % len(RATES_HZ)], 1 + number % 2
        seconds = np.arange(round(len(samples) * rate_hz / 16_000)) / rate_hz
        heard = np.interp(seconds, np.arange(len(samples)) / 16_000, samples)
        stereo = np.repeat(heard[:, None], num_channels, axis=1)
        store.put(uri, encode(stereo, "FLAC", sample_rate=rate_hz))
        is_plain = (rate_hz, num_channels) == (16_000, 1)
        name = uri.rpartition("/")[2].partition(".")[0]
        forms[name] = None if is_plain else f"{rate_hz} Hz, {num_channels} ch"
    return forms


@pytest.mark.parametrize("config", [CONVERTING, CONFIG], ids=["converting", "refusing"])
def test_audio_of_other_rates_is_converted_or_refused(
    tmp_path: Path, config: ExtractionConfig
) -> None:
    """Each row says what its audio was; without the setting the ledger has it, with the remedy."""
    store, run_uri, corpus_uri = selected(tmp_path)
    forms = recorded_otherwise(store, corpus_uri)
    arguments = (store, run_uri, "unlabelled", corpus_uri, config, 1.0, serially)
    manifest = extract_features(*arguments).manifest
    rows = [row for shard in shards(store, run_uri, manifest) for row in shard]
    found = {row.audio_uri.rpartition("/")[2].partition(".")[0]: row for row in rows}
    if config is CONVERTING:
        assert {name: row.audio_form for name, row in found.items()} == forms
        assert manifest.quarantined.utterances == 0
        assert manifest.config["conversion"]["channel"] == "mean"
        for row in rows:
            assert abs(len(row.features) * 10 - row.duration_ms) <= 25
    else:
        assert set(found) == {name for name, form in forms.items() if form is None}
        assert manifest.quarantined.utterances == len(forms) - len(found)
        ledgers = [read_output(store, run_uri, each).decode() for each in manifest.ledgers]
        assert "features.conversion.sample_rates_hz: 44100" in "".join(ledgers)
