"""Secrets are in no output, log, command line or stored object, whatever fails."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from tests.job_programs import RunJob
from tests.s3_server import free_port
from tests.small_corpus import flac, tone
from tests.whole_path.processes import REPOSITORY, TINY

CANARIES = ("CANARYKEY", "CANARYSECRET", "CANARYTOKEN", "CANARYUSER", "CANARYSIGNATURE")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYKEY",
    "AWS_SECRET_ACCESS_KEY": "CANARYSECRET",
    "AWS_SESSION_TOKEN": "CANARYTOKEN",
    "AWS_MAX_ATTEMPTS": "1",
}
QUERY = "X-Amz-Credential=CANARYKEY&X-Amz-Signature=CANARYSIGNATURE"


@dataclass
class Watched:
    """Watched holds what the processes of a test printed, and their command lines meanwhile."""

    environment: dict[str, str]
    mark: str
    said: list[str] = field(default_factory=list)
    commands: set[str] = field(default_factory=set)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a job as a user does; its processes are looked at ten times a second."""
        done, stop = None, threading.Event()
        watch = threading.Thread(target=self._watch, args=(stop,))
        watch.start()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                cwd=REPOSITORY,
                env={**self.environment, "MEGAHOUR_TEST_MARK": self.mark},
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
        finally:
            stop.set()
            watch.join()
        self.said += [done.stdout, done.stderr]
        return done

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.1):
            for process in Path("/proc").iterdir():
                try:
                    if self.mark.encode() in (process / "environ").read_bytes():
                        self.commands.add((process / "cmdline").read_text())
                except OSError:  # no process, another user's, or ended meanwhile
                    continue

    def require_no_canary(self) -> None:
        """Look for each canary in all that was printed, and in every command line."""
        assert self.commands
        for canary in CANARIES:
            for text in (*self.said, *self.commands):
                assert canary not in text, text[:3000]


def arguments_of(run: str, *more: str) -> list[str]:
    return ["--recipe", str(TINY), "--run", run, "--log-format", "json", *more]


@pytest.fixture
def watched(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    assert s3_bucket  # which the environment points to
    # The last two, which a job within this process sets, are as before at the end.
    log = {"MEGAHOUR_LOG_FORMAT": "text", "MEGAHOUR_LOG_STEP": ""}
    for name, value in (ENVIRONMENT | log).items():
        monkeypatch.setenv(name, value)
    return Watched(dict(os.environ), f"secrets-{tmp_path}")


PLACES = (
    "s3://CANARYUSER:CANARYSECRET@{bucket}/run",
    "s3://{bucket}/run?" + QUERY,
    "https://CANARYUSER:CANARYSECRET@{bucket}.s3.amazonaws.com/run?" + QUERY,
)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("place", PLACES)
def test_secrets_in_arguments_are_not_repeated(run_job: RunJob, s3_bucket: str, place: str) -> None:
    """A run at a URI with a password or a signature is refused, or not there, without them.

    The command line itself has them: the user gave them.
    """
    given = place.format(bucket=s3_bucket)
    for job, *arguments in (["inspect_object", given], ["verify", *arguments_of(given)]):
        said = run_job(job, *arguments)
        assert said.code in (1, 2), said.err
        assert "Traceback" not in said.err
        for canary in CANARIES:
            assert canary not in said.out + said.err


def test_a_store_that_fails_shows_no_credentials(watched: Watched, s3_bucket: str) -> None:
    """With no server, and with a bucket that is not there: outputs and command lines have none."""
    watched.run("jobs.verify", *arguments_of(f"s3://absent-{s3_bucket}/run"))
    watched.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    watched.environment["AWS_CONFIG_FILE"] = os.devnull
    done = watched.run("jobs.inspect_object", "s3:///", "--json")
    assert done.returncode != 0
    watched.require_no_canary()


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_three_steps_leave_no_secret(
    watched: Watched, environment: dict[str, str], s3_bucket: str, tmp_path: Path
) -> None:
    """Manifests with passwords and presigned URLs: ledgers, records, metrics and Spark's events."""
    run, audio = f"s3://{s3_bucket}/run", f"s3://{s3_bucket}/audio"
    store = ObjectStore((f"s3://{s3_bucket}/",))
    for number in range(4):
        store.put(f"{audio}/{number}.flac", flac(tone(number, 1.0)))
    store.put(f"s3://{s3_bucket}/manifest.jsonl", _manifest(s3_bucket, audio))
    events = tmp_path / "events"
    events.mkdir()
    settings = Path(environment["SPARK_CONF_DIR"]) / "spark-defaults.conf"
    settings.write_text(f"spark.eventLog.enabled true\nspark.eventLog.dir {events.as_uri()}\n")
    watched.environment = {**environment, **watched.environment}
    watched.environment["SPARK_CONF_DIR"] = environment["SPARK_CONF_DIR"]
    shared = ("--set", f'corpus.audio_prefixes=["{audio}"]', "--set", "loss_budget=0.9")
    options = arguments_of(run, *shared, "--set", "selection.hours=1")
    given = ("--manifest", f"s3://{s3_bucket}/manifest.jsonl", "--format", "table")
    metrics = tmp_path / "metrics.prom"
    ingested = watched.run("jobs.ingest", *options, *given, "--metrics-file", str(metrics))
    assert ingested.returncode == 0, ingested.stderr
    for step in ("select_utterances", "extract_features", "status"):
        watched.run(f"jobs.{step}", *options)
    watched.require_no_canary()
    stored = {each.uri: store.get(each.uri) for each in store.list(run)}
    assert any("ledger" in uri for uri in stored)
    logs = {str(file): file.read_bytes() for file in events.rglob("*") if file.is_file()}
    assert logs
    for place, data in {**stored, **logs, "metrics": metrics.read_bytes()}.items():
        assert not any(canary.encode() in data for canary in CANARIES), place


def _manifest(bucket: str, audio: str) -> bytes:
    uris: Sequence[str] = (
        *(f"{audio}/{number}.flac" for number in range(4)),
        f"s3://CANARYUSER:CANARYSECRET@{bucket}/audio/1.flac",
        f"https://CANARYUSER:CANARYSECRET@host/audio/1.flac?{QUERY}",
        f"https://host/audio/1.flac?{QUERY}",
        f"{audio}/absent.flac?{QUERY}",
    )
    rows = [
        {"utterance_id": f"u{n}", "speaker_id": "s", "duration_s": 1.0, "audio_uri": uri}
        | {"created_at": "2019-05-12T10:00:00+00:00", "locale": "en"}
        for n, uri in enumerate(uris)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
