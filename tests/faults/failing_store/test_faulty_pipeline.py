"""The four steps run behind a proxy that fails one request in twenty, before moto and Ceph."""

from collections import Counter
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.shards import read_partition
from tests.faults.failing_store.faulty_proxy import faulty_proxy
from tests.faults.failing_store.proxied import Server, require_counts_agree
from tests.four_steps import four_steps, manifests, put_teacher
from tests.small_corpus import write_corpus

pytestmark = pytest.mark.timeout(300)

NUM_SPEAKERS = 20
NUM_EACH = 15
NUM_EACH_IN_CHUNKS = 3
# A stall costs the client's whole read timeout, 4 s here.
WEIGHTS = {"stall": 0.3}


def undisturbed(folder: Path, num_each: int) -> tuple[str, dict[str, bytes]]:
    """Make a run on local paths; return its corpus and its manifests."""
    run_uri, corpus_uri = str(folder / "run"), str(folder / "corpus")
    store = ObjectStore((run_uri, corpus_uri))
    write_corpus(store, corpus_uri, "unlabelled", NUM_SPEAKERS, num_each)
    put_teacher(store, run_uri)
    for step in four_steps(store, run_uri, corpus_uri).values():
        step()
    return corpus_uri, manifests(store, run_uri)


def copy(source: ObjectStore, source_uri: str, target: ObjectStore, target_uri: str) -> None:
    for found in source.list(source_uri):
        target.put(found.uri.replace(source_uri, target_uri), source.get(found.uri))


@pytest.mark.usefixtures("impatient")
def test_faults_change_no_byte_and_lose_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests are as without faults, every utterance is there once, a fault costs a retry."""
    local_corpus, expected = undisturbed(tmp_path, NUM_EACH)
    run_uri, corpus_uri = join_uri(server.uri, "run"), join_uri(server.uri, "corpus")
    store = ObjectStore((server.uri,))
    copy(ObjectStore((local_corpus,)), local_corpus, store, corpus_uri)
    put_teacher(store, run_uri)
    with faulty_proxy(server.endpoint, 0.05, seed=4, weights=WEIGHTS) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        before = REQUESTS.total()
        for step in four_steps(store, run_uri, corpus_uri).values():
            step()
        made = REQUESTS.total() - before
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert manifests(store, run_uri) == expected
    utterances = Counter(
        row.utterance_id
        for output in read_manifest(store, run_uri, "partitions/unlabelled").outputs
        for row in read_partition(read_output(store, run_uri, output))
    )
    assert len(utterances) == NUM_SPEAKERS * NUM_EACH
    assert set(utterances.values()) == {1}
    require_counts_agree(made, proxy)
    assert proxy.num_faults > 0.03 * made.num_requests > 10


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_answers_in_chunks_without_etags_change_no_byte(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests are the same though every other GET lacks Content-Length and ETag."""
    local_corpus, expected = undisturbed(tmp_path, NUM_EACH_IN_CHUNKS)
    run_uri, corpus_uri = join_uri(server.uri, "run"), join_uri(server.uri, "corpus")
    store = ObjectStore((server.uri,))
    copy(ObjectStore((local_corpus,)), local_corpus, store, corpus_uri)
    put_teacher(store, run_uri)
    with faulty_proxy(server.endpoint, 0.0, bare=True) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        before = REQUESTS.total()
        for step in four_steps(store, run_uri, corpus_uri).values():
            step()
        assert (REQUESTS.total() - before).retries == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert manifests(store, run_uri) == expected
