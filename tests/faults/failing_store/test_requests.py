"""The steps make as many requests as planned, and none that costs or cannot scale."""

import re
from dataclasses import replace
from pathlib import Path

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from tests.benchmarks.s3_requests import StepRequests, count_requests
from tests.faults.failing_store.proxied import Server, StartProxy, require_counts_agree
from tests.four_steps import GETS_IN_FLIGHT
from tests.small_corpus import local_store

# Hashed early: after the step's name, the digest's first letters spread keys over S3.
PUT_KEY = re.compile(
    r"/(selection|features|targets|partitions)/unlabelled/(scratch/)?"
    r"([0-9a-f]{2}/[^/]+-[0-9a-f]{16}[^/]*|commits/[^/]+\.json|manifest\.json)"
)
NUM_SPEAKERS, NUM_EACH = 8, 6


def test_every_request_is_planned(server: Server, start_proxy: StartProxy, tmp_path: Path) -> None:
    """Driver and tasks make the requests of the benchmark's formulas, and no others.

    Every key that we write is hashed early or one small record; GETs in flight are as configured.
    """
    proxy = start_proxy(server.endpoint, 0.0)
    run_uri, corpus_uri = join_uri(server.uri, "run"), join_uri(server.uri, "corpus")
    before = REQUESTS.total()
    steps = count_requests(ObjectStore((server.uri,)), run_uri, corpus_uri, NUM_SPEAKERS, NUM_EACH)
    require_counts_agree(REQUESTS.total() - before, proxy)
    for step in steps:
        assert step.agrees, step
        assert step.tasks.list == step.tasks.head == step.driver.head == 0, step
    assert proxy.requests.keys() == {"GET", "PUT", "HEAD", "LIST"}, "no copy, rename or delete"
    assert proxy.requests["HEAD"] == 1, "the process's first contact"

    written = [path for operation, path in proxy.paths if operation == "PUT" and "/run/" in path]
    ours = [path.partition("/run")[2] for path in written if "/models/" not in path]
    assert len(ours) == sum(step.driver.put + step.tasks.put for step in steps)
    assert [path for path in ours if not PUT_KEY.fullmatch(path)] == []
    assert 1 < proxy.max_in_flight <= GETS_IN_FLIGHT
    require_as_many_on_local_paths(steps, tmp_path)


def require_as_many_on_local_paths(in_s3: list[StepRequests], folder: Path) -> None:
    """On local paths too an operation is one request, except for confirmations in S3.

    Those are of listings, and of absence: of a step's manifest and of its tasks' commits.
    """
    store, run_uri, corpus_uri = local_store(folder)
    local = count_requests(store, run_uri, corpus_uri, NUM_SPEAKERS, NUM_EACH)
    for ours, theirs in zip(local, in_s3, strict=True):
        assert ours.tasks.get == ours.expected_tasks.get
        assert ours.driver.get == ours.expected_driver.get
        assert replace(ours.tasks, get=theirs.tasks.get) == theirs.tasks
        assert ours.driver.put == theirs.driver.put
        assert 2 * ours.driver.list == theirs.driver.list
