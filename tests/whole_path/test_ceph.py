"""The four Spark steps run as processes on a real S3 server that fails one request in twenty."""

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.names import SUBSETS
from tests.faults.failing_store.faulty_proxy import FaultyProxy, faulty_proxy
from tests.faults.killed_processes.chaos_run import STEPS, run_plainly, store_random_teacher
from tests.s3_server import CREDENTIALS, set_endpoint
from tests.small_corpus import write_corpus
from tests.whole_path.manifests import manifest_bytes
from tests.whole_path.processes import TINY, run_step
from training.settings.recipe import read_recipe

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

RUN_URI = "s3://megahour/run"
# A stall costs a read timeout of 20 s; tests/faults has them with shorter ones.
WEIGHTS = {"stall": 0.0}


@pytest.fixture
def proxy(ceph_endpoint: str) -> Iterator[FaultyProxy]:
    """Put a proxy before Ceph that begins when the test says so; point the environment to it."""
    with (
        pytest.MonkeyPatch.context() as patch,
        faulty_proxy(ceph_endpoint, 0.0, seed=6, weights=WEIGHTS) as proxy,
    ):
        set_endpoint(proxy.endpoint, patch)
        boto3.client("s3", endpoint_url=ceph_endpoint).create_bucket(Bucket="megahour")
        yield proxy


def write_inputs(store: ObjectStore, run_uri: str) -> None:
    for number, subset in enumerate(SUBSETS):
        write_corpus(store, join_uri(run_uri, "corpus"), subset, 3 + number, 6)
    store_random_teacher(store, run_uri)


def test_spark_on_a_failing_server_gives_the_same_bytes(
    proxy: FaultyProxy, environment: dict[str, str], tmp_path: Path
) -> None:
    """Manifests equal those of a plain loop on local paths; each step reports bounded retries.

    It does so as one JSON object: Spark writes nothing to standard output.
    """
    store, local, local_uri = ObjectStore((RUN_URI,)), ObjectStore((str(tmp_path),)), str(tmp_path)
    write_inputs(store, RUN_URI)
    write_inputs(local, local_uri)
    for step in STEPS:
        run_plainly(step, local, local_uri, join_uri(local_uri, "corpus"), read_recipe(str(TINY)))
    settings = {**environment, **CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.rate, printed = 0.05, []
    for step in STEPS:
        done = run_step(step, RUN_URI, settings, "--json")
        assert done.returncode == 0, done.stderr[-4000:]
        printed.append(json.loads(done.stdout))
    proxy.rate = 0.0
    assert manifest_bytes(store, RUN_URI) == manifest_bytes(local, local_uri)
    retries = sum(each["requests"]["retries"] for each in printed)
    assert 0 < retries <= proxy.num_faults
    for step, each in zip(STEPS, printed, strict=True):
        kept = json.loads(store.get(join_uri(RUN_URI, "steps", f"{step}.json")))
        assert kept["requests"] == each["requests"]
        assert kept["task_seconds"] > 0
        assert each["requests"]["head"] > 0
