"""Run a real S3 server process (moto) for tests; import the fixtures into a conftest or a test."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}

# moto looks for an object and then writes it; between the two its threads are not to change.
_MOTO = "import sys, moto.server; sys.setswitchinterval(10); moto.server.main()"

OTHER_SETTINGS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3")
"""Variables that would lead to another server or account."""


def free_port() -> int:
    """Draw a free TCP port of the loopback interface.

    It lies below those that the kernel gives away, so that no connection takes it meanwhile.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@contextmanager
def running_s3_server(log: Path = Path(os.devnull)) -> Iterator[str]:
    """Run moto's server in its own process, write requests to `log`, and yield its URL."""
    port = free_port()
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, **CREDENTIALS}
    with log.open("ab") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_for(endpoint, server)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _wait_for(endpoint: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"moto's server at {endpoint} did not start within 60 s")


@pytest.fixture(scope="session")
def s3_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of all requests to the session's S3 server."""
    return tmp_path_factory.mktemp("s3") / "requests.log"


@pytest.fixture(scope="session")
def s3_endpoint(s3_log: Path) -> Iterator[str]:
    """Return the endpoint URL of the session's S3 server."""
    with running_s3_server(s3_log) as endpoint:
        yield endpoint


@pytest.fixture
def s3_bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a fresh bucket's name; the environment points boto3 and s3fs to its server."""
    return fresh_bucket(s3_endpoint, monkeypatch)


def fresh_bucket(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, key_id: str = CREDENTIALS["AWS_ACCESS_KEY_ID"]
) -> str:
    """Point the environment to the server at `endpoint`, and make a bucket there."""
    set_endpoint(endpoint, monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
    bucket = f"test-{time.time_ns()}"
    # The default session would keep the credentials of the first server.
    boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
    return bucket


def set_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the environment to the server at `endpoint`, with credentials."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    for name in OTHER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
