"""Verification, provenance and sweeping work on a run in S3."""

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from jobs.run_table import utterance_reads
from pipeline.audit.trace import trace
from pipeline.audit.verify import Verification, sweep, verify_run
from pipeline.runs.manifest import Manifest, Output, sha256
from tests.small_run import SUBSET, make_run, outputs, selected_ids
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str]:
    return make_run(tmp_path_factory.mktemp("local"))


@pytest.fixture
def run(local_run: tuple[ObjectStore, str], s3_bucket: str) -> tuple[ObjectStore, str]:
    """A run in S3, copied from a local one."""
    local, local_uri = local_run
    run_uri = f"s3://{s3_bucket}/run"
    store = ObjectStore((run_uri,))
    for found in local.list(local_uri):
        store.put(found.uri.replace(local_uri, run_uri), local.get(found.uri))
    return store, run_uri


def verify(store: ObjectStore, run_uri: str, reads_audio: bool = False) -> Verification:
    corpus_uri = join_uri(run_uri, "corpus")
    return verify_run(store, run_uri, corpus_uri, lambda *_: None, reads_audio=reads_audio)


def test_a_run_in_s3_is_verified_followed_and_swept(run: tuple[ObjectStore, str]) -> None:
    """As on local paths: no findings, an orphan that is removed, a missing shard that is named."""
    store, run_uri = run
    orphan = join_uri(run_uri, "features", SUBSET, "ab", f"000000-{'ab' * 8}.parquet")
    store.put(orphan, b"never committed")
    verified = verify(store, run_uri)
    assert verified.findings == ()
    assert orphan in {join_uri(run_uri, key) for key in verified.orphans}
    sweep(store, run_uri, verified)
    assert not store.exists(orphan)
    reads, utterance_id = utterance_reads(read_recipe(str(TINY))), selected_ids(store, run_uri)[0]
    traced = trace(store, run_uri, join_uri(run_uri, "corpus"), utterance_id, reads)
    assert traced.audio["unchanged"]
    assert traced.steps[-1].step == f"partitions/{SUBSET}"
    lost = outputs(store, run_uri, "targets")[0]
    store.delete(join_uri(run_uri, lost.key))
    (finding,) = verify(store, run_uri).findings
    assert (finding.object, finding.found) == (lost.key, "missing")


def test_a_listing_confirms_audio(run: tuple[ObjectStore, str]) -> None:
    """No GET for audio by default, one for each row with --audio; a change is found either way."""
    store, run_uri = run
    gets = []
    for reads_audio in (False, True):
        before = REQUESTS.total()
        assert verify(store, run_uri, reads_audio).findings == ()
        gets.append((REQUESTS.total() - before).get)
    num_rows = sum(output.utterances for output in outputs(store, run_uri, "features"))
    # To read the audio again its rows are read again, too.
    assert gets[1] - gets[0] == num_rows + len(outputs(store, run_uri, "features"))
    # The second selected utterance is quarantined: nothing was made of its audio.
    changed = join_uri(run_uri, "corpus", "audio", f"{selected_ids(store, run_uri)[2]}.flac")
    data = store.get(changed)
    store.put(changed, data[:99] + bytes([data[99] ^ 1]) + data[100:])
    for reads_audio in (False, True):
        (finding,) = verify(store, run_uri, reads_audio).findings
        assert finding.object == changed
        assert f"as features/{SUBSET} read it" in finding.expected


def test_ingested_audio_that_was_not_extracted_is_read(run: tuple[ObjectStore, str]) -> None:
    """No ETag of a feature row confirms it: its SHA-256 is compared; foreign audio is named."""
    store, run_uri = run
    base = join_uri(run_uri, "corpus")
    objects = {found.uri.removeprefix(f"{base}/"): found.uri for found in store.list(base)}
    outputs_of_ingest = tuple(
        Output(key, len(data), sha256(data), 0, 0)
        for key, data in ((key, store.get(uri)) for key, uri in objects.items())
    )
    ingest = Manifest("ingest", {}, {}, outputs_of_ingest)
    before = verify(store, run_uri)
    store.put(join_uri(run_uri, "ingest", "manifest.json"), ingest.to_bytes())
    found = verify(store, run_uri)
    num_rows = sum(output.utterances for output in outputs(store, run_uri, "features"))
    assert found.findings == ()
    assert found.num_objects == before.num_objects + len(objects) - num_rows
    assert verify(store, run_uri, reads_audio=True).num_objects == found.num_objects + num_rows
    extracted = set(selected_ids(store, run_uri))
    key = next(key for key in objects if key[6:-5] not in extracted and key.startswith("audio/"))
    data = store.get(objects[key])
    store.put(objects[key], data[:99] + bytes([data[99] ^ 1]) + data[100:])
    store.put(join_uri(base, "audio", "foreign.flac"), data)
    reported = {each.object: each.found for each in verify(store, run_uri).findings}
    assert reported.keys() == {objects[key], join_uri(base, "audio", "foreign.flac")}
    assert (
        reported[join_uri(base, "audio", "foreign.flac")] == "an object that ingest did not store"
    )
