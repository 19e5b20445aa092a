"""The data pipeline's steps on a small corpus: counts balance, bytes repeat, nothing is lost."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.kbest import KBest, select_kbest
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, read_output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import (
    KBestAtAllOffsets,
    Offsets,
    read_features,
    read_partition,
    read_targets,
)
from pipeline.splicing import NUM_INPUTS, splice
from pipeline.steps.features import ExtractionConfig, extract_features
from pipeline.steps.repartition import RepartitionConfig, repartition
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from pipeline.steps.targets import TargetsConfig, generate_targets
from tests import small_run
from tests.in_process_teacher import teacher_of
from tests.small_corpus import (
    flac,
    local_store,
    serially,
    tone,
    write_corpus,
    write_metadata,
)

SELECTION = SelectionConfig(hours=0.0, file_hours=10 / 3600, seed=3)
EXTRACTION = ExtractionConfig(gets_in_flight=4, seed=3)


def select(
    store: ObjectStore, run_uri: str, corpus_uri: str, config: SelectionConfig = SELECTION
) -> Manifest:
    uri = metadata_uri(corpus_uri, "unlabelled")
    return select_utterances(store, run_uri, "unlabelled", uri, config, 0.5, serially).manifest


def extract(
    store: ObjectStore, run_uri: str, corpus_uri: str, loss_budget: float = 0.5
) -> Manifest:
    return extract_features(
        store, run_uri, "unlabelled", corpus_uri, EXTRACTION, loss_budget, serially
    ).manifest


def fake_logits(frames: np.ndarray) -> np.ndarray:
    """Logits of 30 senones that depend on the frames alone."""
    projection = np.random.default_rng(0).normal(size=(frames.shape[1], 30)).astype(np.float32)
    return np.tanh(frames.astype(np.float32) @ projection / 20) * 5


def label(frames: np.ndarray) -> KBest:
    return select_kbest(fake_logits(frames), 4)


teacher = teacher_of(label)


def write_teacher_manifest(store: ObjectStore, run_uri: str) -> None:
    manifest = Manifest("models/teacher", {}, {}, ())
    store.put(manifest_uri(run_uri, "models/teacher"), manifest.to_bytes())


def run_all(folder: Path) -> tuple[ObjectStore, str]:
    store, run_uri, corpus_uri = local_store(folder)
    write_corpus(store, corpus_uri, "unlabelled", num_speakers=6, num_each=5)
    select(store, run_uri, corpus_uri)
    extract(store, run_uri, corpus_uri)
    write_teacher_manifest(store, run_uri)
    generate_targets(store, run_uri, TargetsConfig(4, 100, 3), teacher, serially)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, 3), serially)
    return store, run_uri


def test_every_utterance_reaches_exactly_one_partition(tmp_path: Path) -> None:
    """Thirty utterances in, the same thirty in the training partitions, and the hours agree."""
    store, run_uri = run_all(tmp_path)
    manifest = read_manifest(store, run_uri, "partitions/unlabelled")
    rows = [
        row
        for output in manifest.outputs
        for row in read_partition(read_output(store, run_uri, output))
    ]
    assert Counter(row.utterance_id for row in rows) == Counter(
        f"unlabelled-{speaker:02d}-{number:03d}" for speaker in range(6) for number in range(5)
    )
    selected = read_manifest(store, run_uri, "selection/unlabelled")
    assert manifest.tally_out == selected.tally_in == selected.tally_out


def test_partition_targets_belong_to_their_features(tmp_path: Path) -> None:
    """Each row's k best are the teacher's for just that row's features at the stored offset."""
    store, run_uri = run_all(tmp_path)
    output = read_manifest(store, run_uri, "partitions/unlabelled").outputs[0]
    for row in read_partition(read_output(store, run_uri, output)):
        usable = (len(row.features) - row.offset) // 3 * 3
        spliced = row.features[row.offset :][:usable].reshape(-1, NUM_INPUTS)
        assert isinstance(row.targets, KBest)
        expected = select_kbest(fake_logits(spliced), 4)
        np.testing.assert_array_equal(row.targets.senones, expected.senones)
        np.testing.assert_array_equal(row.targets.logits, expected.logits)


def test_the_same_seed_gives_byte_identical_manifests(tmp_path: Path) -> None:
    """Two runs at different places end in the same bytes, manifest by manifest."""
    stores = [run_all(tmp_path / name) for name in ("first", "second")]
    for step in ("selection", "features", "targets", "partitions"):
        first, second = (
            store.get(manifest_uri(uri, f"{step}/unlabelled")) for store, uri in stores
        )
        assert first == second


def test_another_recipe_in_a_finished_run_is_refused(tmp_path: Path) -> None:
    """The message names the manifest and the remedy."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_corpus(store, corpus_uri, "unlabelled", 2, 2)
    select(store, run_uri, corpus_uri)
    with pytest.raises(ValueError, match=r"another recipe.*use another --run"):
        select(store, run_uri, corpus_uri, SelectionConfig(0.0, 1.0, seed=4))


def test_missing_and_empty_metadata_are_named(tmp_path: Path) -> None:
    """No metadata at all, and metadata without a usable record, are two clear errors."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    with pytest.raises(ValueError, match=r"holds no \*\.jsonl metadata: run jobs/ingest"):
        select(store, run_uri, corpus_uri)
    write_metadata(store, corpus_uri, "unlabelled", [])
    with pytest.raises(ValueError, match="holds no record"):
        select(store, run_uri, corpus_uri)


def test_a_speaker_in_two_buckets_is_refused(tmp_path: Path) -> None:
    """The causal mean is over a speaker's whole stream, which must lie in one file."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    records = write_corpus(store, corpus_uri, "unlabelled", 2, 2)
    folder = join_uri(metadata_uri(corpus_uri, "unlabelled"), "date=2026-01-01/speaker_bucket=01")
    stray = json.dumps({**records[0], "utterance_id": "stray"})
    store.put(join_uri(folder, "part-00000.jsonl"), stray.encode())
    with pytest.raises(ValueError, match=r"1 speakers have records in several speaker_bucket"):
        select(store, run_uri, corpus_uri)


def test_compressed_metadata_is_read_and_a_broken_archive_is_named(tmp_path: Path) -> None:
    """A .jsonl.gz counts as its text; one cut short is an error, as its contents are unknown."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    records = write_corpus(store, corpus_uri, "unlabelled", 1, 3)
    write_metadata(store, corpus_uri, "unlabelled", [])
    folder = join_uri(metadata_uri(corpus_uri, "unlabelled"), "date=2026-01-02/speaker_bucket=00")
    data = gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode())
    store.put(join_uri(folder, "part-00000.jsonl.gz"), data)
    assert select(store, run_uri, corpus_uri).tally_out.utterances == 3
    store.put(join_uri(folder, "part-00000.jsonl.gz"), data[:-20])
    with pytest.raises(ValueError, match=r"part-00000.jsonl.gz: no whole gzip file"):
        select(store, f"{run_uri}/other", corpus_uri)


def test_target_shards_keep_the_row_order_of_the_features(tmp_path: Path) -> None:
    """Shard by shard, row by row, the same utterances."""
    store, run_uri = run_all(tmp_path)
    features, targets = (
        read_manifest(store, run_uri, f"{step}/unlabelled").outputs
        for step in ("features", "targets")
    )
    for ours, theirs in zip(features, targets, strict=True):
        feature_rows = read_features(read_output(store, run_uri, ours))
        target_rows = read_targets(read_output(store, run_uri, theirs))
        assert [row.utterance_id for row in feature_rows] == [
            row.utterance_id for row in target_rows
        ]


@pytest.mark.parametrize("offsets", ["one", "all"])
def test_a_teacher_may_hear_the_clearest_version(tmp_path: Path, offsets: Offsets) -> None:
    """A version has the targets of the clearest one of its length and speaker, at its own frames.

    The version of another length, and utterances of one version, are heard as they are. What
    several versions hear at one offset is labelled once.
    """
    store, run_uri, corpus_uri = local_store(tmp_path)
    (record, *_) = write_corpus(store, corpus_uri, "unlabelled", num_speakers=1, num_each=1)
    placements = {"ann-DP3": 0.6, "ann-DP1": 0.6, "ann-clean": 0.6, "bob-DP5": 0.6, "bob-DP2": 0.7}
    records = []
    for number, (name, duration_s) in enumerate(placements.items()):
        uri = f"audio/{name}.flac"
        store.put(join_uri(corpus_uri, uri), flac(tone(number, duration_s)))
        own = {"utterance_id": name, "audio_uri": uri, "duration_s": duration_s}
        records.append({**record, **own, "placement": name.partition("-")[2]})
    write_metadata(store, corpus_uri, "unlabelled", [record, *records])
    select(store, run_uri, corpus_uri)
    (output,) = extract(store, run_uri, corpus_uri).outputs
    write_teacher_manifest(store, run_uri)
    config = TargetsConfig(4, 100, 3, offsets, "clearest")
    asked: list[int] = []

    def counting(frames: np.ndarray) -> KBest:
        asked.append(len(frames))
        return label(frames)

    made = generate_targets(store, run_uri, config, teacher_of(counting), serially)
    manifest = made.manifest
    features = {
        row.utterance_id: row.features for row in read_features(read_output(store, run_uri, output))
    }
    heard = dict.fromkeys(("ann-DP3", "ann-DP1"), "ann-clean")
    assert manifest.statistics["num_heard_elsewhere"] == len(heard)
    (targets,) = manifest.outputs
    rows = read_targets(read_output(store, run_uri, targets))
    assert {row.utterance_id for row in rows} == features.keys()
    labelled = set()
    for row in rows:
        name = heard.get(row.utterance_id, row.utterance_id)
        at_all = isinstance(row.kbest, KBestAtAllOffsets)
        for offset in range(3) if at_all else [row.offset]:
            labelled.add((name, offset))
            found = row.kbest.at(offset) if isinstance(row.kbest, KBestAtAllOffsets) else row.kbest
            expected = label(splice(features[name], offset).astype(np.float32))
            np.testing.assert_array_equal(found.senones, expected.senones)
            np.testing.assert_array_equal(found.logits, expected.logits.astype(np.float16))
    assert len(asked) == len(labelled)


def test_the_largest_seed_passes_through_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^64 - 1 samples, shuffles and offsets as any other seed, and gives another order."""
    orders = []
    for seed in (2**63 - 1, 2**64 - 1):
        monkeypatch.setattr(small_run, "SEED", seed)
        store, run_uri = small_run.make_run(tmp_path / str(seed))
        assert read_manifest(store, run_uri, PARTITIONS_STEP).config["seed"] == seed
        orders.append(small_run.selected_ids(store, run_uri))
    assert orders[0] != orders[1]
