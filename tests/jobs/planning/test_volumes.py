"""Planned volumes against a real small run's, against DESIGN's sizes, and their laws of scale."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from jobs.planning.run_plan import compare_plan, planned_workload, run_workload
from jobs.run_table import STEPS
from jobs.volumes import Volume, Workload
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Tally, Utterance
from pipeline.runs.manifest import Manifest, Output, manifest_uri, sha256
from pipeline.runs.names import PLAN_CALIBRATION
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import teacher_of
from tests.jobs.planning.test_throughputs import CALIBRATION
from tests.small_corpus import flac, local_store, serially, tone
from training.settings.recipe import Recipe, read_recipe

REPOSITORY = Path(__file__).parents[3]
HOURS_1M = read_recipe(str(REPOSITORY / "jobs" / "recipes" / "hours_1m.toml"))
FOLDERS = {
    "select_utterances": "selection",
    "extract_features": "features",
    "generate_targets": "targets",
    "repartition": "partitions",
}
"""The folder of a run into which each step writes."""

SMALL = read_recipe(
    str(REPOSITORY / "tests" / "whole_path" / "tiny.toml"),
    [f"selection.file_hours={32 / 3600}", f"partitions.partition_hours={10 / 3600}"],
)
NUM_SPEAKERS, NUM_EACH = 16, 8


def write_corpus(store: ObjectStore, run_uri: str, corpus_uri: str) -> None:
    """Utterances of about a second, speakers in four buckets, and the manifest of their ingest."""
    buckets = defaultdict(list)
    for speaker in range(NUM_SPEAKERS):
        for number in range(NUM_EACH):
            duration_s = 0.8 + (speaker * 3 + number * 5) % 9 / 20
            utterance_id = f"utterance-{speaker:03d}-{number:05d}"
            uri = f"audio/{utterance_id}.flac"
            store.put(join_uri(corpus_uri, uri), flac(tone(number, duration_s)))
            record = Utterance(
                utterance_id,
                f"speaker-{speaker:03d}",
                duration_s,
                f"2026-01-01T00:{number:02d}:00+00:00",
                "en-US",
                uri,
            )
            buckets[speaker % 4].append(record)
    outputs = []
    for bucket, records in buckets.items():
        key = f"metadata/unlabelled/date=2026-01-01/speaker_bucket={bucket:02d}/part-00000.jsonl"
        data = "".join(record.to_json() + "\n" for record in records).encode()
        store.put(join_uri(corpus_uri, key), data)
        tally = Tally.of(records)
        outputs.append(Output(key, len(data), sha256(data), tally.utterances, tally.duration_ms))
    total = sum((each.tally for each in outputs), Tally())
    ingest = Manifest("ingest", {}, {}, tuple(outputs), tally_in=total, tally_out=total)
    store.put(manifest_uri(run_uri, "ingest"), ingest.to_bytes())
    teacher_manifest = Manifest("models/teacher", {}, {}, ())
    store.put(manifest_uri(run_uri, "models/teacher"), teacher_manifest.to_bytes())


def label(frames: np.ndarray) -> KBest:
    """Logits of as many senones as the recipe's, that depend on the frames alone."""
    projection = np.random.default_rng(0).normal(size=(NUM_INPUTS, 30)).astype(np.float32)
    return select_kbest(np.tanh(frames @ projection / 20), SMALL.targets.k)


def run_steps(store: ObjectStore, run_uri: str, corpus_uri: str) -> dict[str, dict]:
    """Run the data pipeline's steps in a plain loop; what each would record of itself."""
    metadata = metadata_uri(corpus_uri, "unlabelled")
    steps = {
        "select_utterances": lambda: select_utterances(
            store, run_uri, "unlabelled", metadata, SMALL.selection, 0.0, serially
        ),
        "extract_features": lambda: extract_features(
            store, run_uri, "unlabelled", corpus_uri, SMALL.features, 0.0, serially
        ),
        "generate_targets": lambda: generate_targets(
            store, run_uri, SMALL.targets, teacher_of(label), serially
        ),
        "repartition": lambda: repartition(store, run_uri, SMALL.partitions, serially),
    }
    records = {}
    for name, step in steps.items():
        before = REQUESTS.total()
        step()
        made = REQUESTS.total() - before
        counts = {"get": made.get, "put": made.put, "head": made.head, "list": made.list}
        received = {"bytes_received": made.bytes_received}
        records[name] = {"requests": {**counts, **received}, "task_seconds": 1.0, "seconds": 2.0}
    return records


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str, dict[str, dict]]:
    """A run of the data pipeline on 128 utterances."""
    store, run_uri, corpus_uri = local_store(tmp_path_factory.mktemp("planned"))
    write_corpus(store, run_uri, corpus_uri)
    return store, run_uri, run_steps(store, run_uri, corpus_uri)


def volumes_of(workload: Workload, recipe: Recipe) -> dict[str, Volume]:
    """The volume of each step of the data pipeline, on the cluster of its name."""
    return {
        name: sum(STEPS[name].volumes(workload, recipe, load_cluster(name)), Volume())
        for name in FOLDERS
    }


def test_planned_counts_and_bytes_are_about_the_runs(finished) -> None:
    """From hours, counts and buckets alone; a few objects and requests a step are left out."""
    store, run_uri, records = finished
    workload = run_workload(store, run_uri, 0.0)
    assert workload is not None
    for step, volume in volumes_of(workload, SMALL).items():
        listed, requests = store.list(join_uri(run_uri, FOLDERS[step])), records[step]["requests"]
        made = sum("/commits/" in each.uri for each in listed), len(listed), requests["put"]
        planned = volume.tasks, volume.objects, volume.requests.put
        assert planned == pytest.approx(made, abs=6), step
        assert volume.requests.get == pytest.approx(requests["get"], abs=10), step
        bound = 0.15 if step == "select_utterances" else 0.05
        written = sum(each.num_bytes for each in listed)
        assert volume.bytes_written == pytest.approx(written, rel=bound), step
        if step in {"generate_targets", "repartition"}:
            assert volume.bytes_read == pytest.approx(requests["bytes_received"], rel=0.05), step


def test_comparison_of_a_run_that_was_not_calibrated(finished) -> None:
    """Counts and bytes are compared; seconds were measured but not planned."""
    store, run_uri, records = finished
    found = compare_plan(store, run_uri, SMALL, load_cluster, records)
    assert found["calibrated_on"] is None
    assert list(found["steps"]) == list(FOLDERS)
    for quantities in found["steps"].values():
        for name in ("tasks", "objects", "requests"):
            assert quantities[name]["planned"] == pytest.approx(quantities[name]["actual"], abs=18)
        assert quantities["seconds"] == {"planned": None, "actual": 2.0}
        assert quantities["task seconds"] == {"planned": None, "actual": 1.0}


def test_comparison_of_a_run_that_was_calibrated(finished) -> None:
    """With a calibration kept in the run, seconds are planned, for training steps too."""
    store, run_uri, records = finished
    trained = {**records, "train_student": {"seconds": 9.0}}
    store.put(join_uri(run_uri, PLAN_CALIBRATION), json.dumps(asdict(CALIBRATION)).encode())
    try:
        found = compare_plan(store, run_uri, SMALL, lambda _: load_cluster("demo"), trained)
    finally:
        Path(join_uri(run_uri, PLAN_CALIBRATION)).unlink()
    assert found["calibrated_on"] == CALIBRATION.machine
    for quantities in found["steps"].values():
        assert quantities["seconds"]["planned"] > 6
    assert found["steps"]["extract_features"]["task seconds"]["planned"] > 0
    assert found["steps"]["train_student"].keys() == {"seconds"}


def test_a_run_without_ingest_has_no_plan(tmp_path: Path) -> None:
    """A corpus that others made has no manifest that tells its hours."""
    store, run_uri, _ = local_store(tmp_path)
    assert compare_plan(store, run_uri, SMALL, load_cluster, {}) == {}


def test_a_million_hours_have_designs_sizes() -> None:
    """1e9 utterances; features 46 TB, targets 9.6 TB and log Z 0.24 TB, audio 115 TB (DESIGN 7)."""
    workload = planned_workload(1e6, 0.0)
    (subset,) = workload.subsets
    assert subset.utterances == 10**9
    volumes = volumes_of(workload, HOURS_1M)
    assert volumes["extract_features"].bytes_written == pytest.approx(46e12, rel=0.01)
    assert volumes["extract_features"].bytes_read == pytest.approx(115e12, rel=0.01)
    assert volumes["generate_targets"].bytes_written == pytest.approx(9.84e12, rel=0.02)
    assert volumes["generate_targets"].tasks == 200_000
    assert volumes["extract_features"].tasks == 200_000
    assert volumes["repartition"].objects == 500_000 + 12_500 + 1
    assert volumes["extract_features"].requests.get == pytest.approx(1e9, rel=0.002)


def test_parts_of_one_object_share_a_request() -> None:
    """With ten utterances a request, extraction's GETs for audio fall to a tenth; nothing else."""
    alone, together = (
        volumes_of(planned_workload(1e6, 0.0, utterances_per_request=each), HOURS_1M)
        for each in (1.0, 10.0)
    )
    saved = alone["extract_features"].requests.get - together["extract_features"].requests.get
    assert saved == 10**9 - 10**8
    assert together["extract_features"].small_reads == 10**8
    assert together["extract_features"].bytes_read == alone["extract_features"].bytes_read
    others = alone.keys() - {"extract_features"}
    assert all(alone[step] == together[step] for step in others)


@given(st.floats(1_000, 2e6), st.floats(1, 30))
@settings(max_examples=30, deadline=None)
def test_twice_the_hours_are_twice_the_volume(hours: float, utterance_seconds: float) -> None:
    """But for the rounding of files, what a step reads, makes and asks for is linear in hours."""
    once, twice = (
        volumes_of(planned_workload(each, 0.0, utterance_seconds), HOURS_1M)
        for each in (hours, 2 * hours)
    )
    for step, volume in once.items():
        for name in ("objects", "bytes_read", "bytes_written"):
            assert getattr(twice[step], name) == pytest.approx(
                2 * getattr(volume, name), rel=0.03, abs=10
            )
        if step != "select_utterances":  # compares each bucket with each range of hashes
            gets = 2 * volume.requests.get
            assert twice[step].requests.get == pytest.approx(gets, rel=0.03, abs=10)
