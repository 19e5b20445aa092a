"""Queries of a run in S3 ask for what their roles allow, and roles allow no more than they need."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from infra.store.object_store import ObjectStore
from jobs.cli.megahour import module_of
from jobs.roles import template
from tests.infra.aws.role_policy import Request, allows, logged_requests, role_of
from tests.job_programs import RunJob
from tests.s3_server import set_endpoint
from tests.training.export.heard_run import SETTINGS, write_heard_run
from tests.whole_path.processes import TINY

RUN = "s3://megahour/runs/tiny"


@dataclass(frozen=True)
class HeardRun:
    """HeardRun is a run with a student and held-out audio in S3, and its server's log."""

    log: Path
    names: tuple[str, ...]

    def requests_of(self, act: Callable[[], None]) -> set[Request]:
        """Return the requests that a call makes."""
        before = len(self.log.read_text())
        act()
        return set(logged_requests(self.log.read_text()[before:]))


@pytest.fixture(scope="module")
def heard(
    s3_endpoint: str, s3_log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeardRun]:
    local, run_uri, corpus_uri = write_heard_run(tmp_path_factory.mktemp("heard"))
    with pytest.MonkeyPatch.context() as patch:
        set_endpoint(s3_endpoint, patch)
        boto3.client("s3").create_bucket(Bucket="megahour")
        there = ObjectStore((f"{RUN}/",))
        for base, place in ((run_uri, RUN), (corpus_uri, f"{RUN}/corpus")):
            for each in local.list(base):
                there.put(f"{place}/{each.uri.removeprefix(f'{base}/')}", local.get(each.uri))
        yield HeardRun(s3_log, tuple(each.uri for each in there.list(RUN)))


def options(*more: str) -> list[str]:
    sets = [part for each in (*SETTINGS, 'cluster=""') for part in ("--set", each)]
    return ["--recipe", str(TINY), "--run", RUN, *sets, *more]


def test_roles_allow_what_queries_ask_for(heard: HeardRun, run_job: RunJob, tmp_path: Path) -> None:
    """Each with its own cluster file: `export` with its score, `status`, `inspect` of an id."""
    given = {
        "export": options("--out", str(tmp_path / "x.zip"), "--score"),
        "status": options(),
        "inspect": options("nobody"),
    }
    for query, arguments in given.items():
        expected = 1 if query == "inspect" else 0

        def ask(query: str = query, arguments: list[str] = arguments, code: int = expected) -> None:
            done = run_job(module_of(query), *arguments)
            assert done.code == code, done.err

        requests = heard.requests_of(ask)
        assert requests
        denied = sorted(str(each) for each in requests if not allows(role_of(query), each))
        assert denied == [], query


def test_inspect_s_role_allows_what_objects_need(heard: HeardRun, run_job: RunJob) -> None:
    """A shard, a step's manifest and a commit in S3 are shown by their URIs."""
    shard = next(uri for uri in heard.names if "/features/" in uri and uri.endswith(".parquet"))
    folder = f"{RUN}/features/heldout"
    commit = next(uri for uri in heard.names if uri.startswith(f"{folder}/commits/"))
    said: list[dict[str, object]] = []

    def ask() -> None:
        for target in (shard, folder, commit):
            done = run_job("inspect_object", target, "--json")
            assert done.code == 0, done.err
            said.append(json.loads(done.out))

    requests = heard.requests_of(ask)
    assert [each["kind"] for each in said] == ["shard", "manifest", "record"]
    assert said[0]["uri"] == shard
    assert said[1]["made"] == "features/heldout"
    role = role_of("inspect")
    assert sorted(str(each) for each in requests if not allows(role, each)) == []


def test_audio_elsewhere_is_read_by_the_steps_that_hear_it() -> None:
    """With --audio-prefix, and by those alone; nobody writes there."""
    plain, more = template({}), template({}, ["s3://speech/v1.0"])
    place = "arn:${AWS::Partition}:s3:::speech/v1.0/*"
    reading = set()
    for name, resource in more["Resources"].items():  # type: ignore[attr-defined]
        if name.endswith("Role"):
            (policy,) = resource["Properties"]["Policies"]
            for statement in policy["PolicyDocument"]["Statement"]:
                if {"Fn::Sub": place} in statement["Resource"]:
                    assert statement["Action"] == ["s3:GetObject"]
                    reading.add(name.removesuffix("Role"))
    assert reading == {
        *("Ingest", "ExtractFeatures", "GenerateTargets"),
        *("Export", "Inspect", "Verify"),
    }
    assert "speech" not in json.dumps(plain)


@pytest.mark.parametrize("prefix", ["/local/audio", "s3://speech/*", "s3://speech/${x}"])
def test_other_audio_prefixes_are_refused(run_job: RunJob, prefix: str) -> None:
    """A role has no local paths, and what CloudFormation would replace is none of ours."""
    done = run_job("roles", "--audio-prefix", prefix)
    assert done.code == 2
    assert f"--audio-prefix {prefix}: need s3://bucket/prefix" in done.err
