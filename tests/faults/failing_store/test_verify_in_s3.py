"""Verification, provenance and sweeping work on a run in S3."""

from pathlib import Path

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.trace import trace
from pipeline.audit.verify import sweep, verify_run
from tests.small_run import SUBSET, make_run, outputs, selected_ids


def test_a_run_in_s3_is_verified_followed_and_swept(tmp_path: Path, s3_bucket: str) -> None:
    """As on local paths: no findings, an orphan that is removed, a missing shard that is named."""
    local, local_run = make_run(tmp_path)
    run_uri = f"s3://{s3_bucket}/run"
    store, corpus_uri = ObjectStore((run_uri,)), join_uri(run_uri, "corpus")
    for found in local.list(local_run):
        store.put(found.uri.replace(local_run, run_uri), local.get(found.uri))
    orphan = join_uri(run_uri, "features", SUBSET, "ab", f"000000-{'ab' * 8}.parquet")
    store.put(orphan, b"never committed")
    verified = verify_run(store, run_uri, corpus_uri, lambda *_: None)
    assert verified.findings == ()
    assert orphan in {join_uri(run_uri, key) for key in verified.orphans}
    sweep(store, run_uri, verified)
    assert not store.exists(orphan)
    traced = trace(store, run_uri, corpus_uri, selected_ids(store, run_uri)[0])
    assert traced.audio["unchanged"]
    assert traced.steps[-1].step == f"partitions/{SUBSET}"
    lost = outputs(store, run_uri, "targets")[0]
    store.delete(join_uri(run_uri, lost.key))
    (finding,) = verify_run(store, run_uri, corpus_uri, lambda *_: None).findings
    assert (finding.object, finding.found) == (lost.key, "missing")
