"""The four steps run behind a proxy that fails one request in twenty, before moto and Ceph."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS, RequestCounts
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.shards import read_partition
from tests.faults.failing_store.faulty_proxy import FaultyProxy, faulty_proxy
from tests.faults.failing_store.proxied import Server, require_counts_agree
from tests.four_steps import four_steps, manifests, put_teacher
from tests.small_corpus import write_corpus

pytestmark = pytest.mark.timeout(300)

NUM_SPEAKERS = 20
NUM_EACH = 8
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


class InS3(NamedTuple):
    """InS3 is a run in S3, whose corpus has been copied from local paths, and its server."""

    store: ObjectStore
    run_uri: str
    server: Server

    @classmethod
    def of(cls, server: Server, local_corpus: str) -> "InS3":
        store, run_uri = ObjectStore((server.uri,)), join_uri(server.uri, "run")
        local = ObjectStore((local_corpus,))
        for found in local.list(local_corpus):
            uri = found.uri.replace(local_corpus, join_uri(server.uri, "corpus"))
            store.put(uri, local.get(found.uri))
        put_teacher(store, run_uri)
        return cls(store, run_uri, server)

    def run_behind(self, proxy: FaultyProxy) -> RequestCounts:
        """Run the four steps behind a proxy; return the requests that were made."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            before = REQUESTS.total()
            for step in four_steps(
                self.store, self.run_uri, join_uri(self.server.uri, "corpus")
            ).values():
                step()
            return REQUESTS.total() - before


@pytest.mark.usefixtures("impatient")
def test_faults_change_no_byte_and_lose_nothing(server: Server, tmp_path: Path) -> None:
    """Manifests are as without faults, every utterance is there once, a fault costs a retry."""
    local_corpus, expected = undisturbed(tmp_path, NUM_EACH)
    run = InS3.of(server, local_corpus)
    with faulty_proxy(server.endpoint, 0.05, seed=4, weights=WEIGHTS) as proxy:
        made = run.run_behind(proxy)
    assert manifests(run.store, run.run_uri) == expected
    utterances = Counter(
        row.utterance_id
        for output in read_manifest(run.store, run.run_uri, "partitions/unlabelled").outputs
        for row in read_partition(read_output(run.store, run.run_uri, output))
    )
    assert len(utterances) == NUM_SPEAKERS * NUM_EACH
    assert set(utterances.values()) == {1}
    require_counts_agree(made, proxy)
    assert proxy.num_faults > 0.03 * made.num_requests > 10


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_answers_in_chunks_without_etags_change_no_byte(server: Server, tmp_path: Path) -> None:
    """Manifests are the same though every other GET lacks Content-Length and ETag."""
    local_corpus, expected = undisturbed(tmp_path, NUM_EACH_IN_CHUNKS)
    run = InS3.of(server, local_corpus)
    with faulty_proxy(server.endpoint, 0.0, bare=True) as proxy:
        assert run.run_behind(proxy).retries == 0
    assert manifests(run.store, run.run_uri) == expected
