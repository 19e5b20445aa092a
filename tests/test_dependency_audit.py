"""`make audit` fails for a known vulnerability, and says what it could not look up."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.dependency_audit import OSV, PINS, REPOSITORY, read_report, report
from tests.s3_server import free_port

ADVISORY = {
    "id": "GHSA-0000-0000-0000",
    "modified": "2026-01-01T00:00:00Z",
    "published": "2026-01-01T00:00:00Z",
    "summary": "a template escapes its sandbox",
    "affected": [
        {
            "package": {"name": "jinja2", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.7"}]}],
            "versions": ["3.1.6"],
        }
    ],
}


class OsvAnswers(BaseHTTPRequestHandler):
    """OsvAnswers knows one advisory, in the format of osv.dev."""

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        asked = json.loads(self.rfile.read(size))["package"]["name"]
        answer = json.dumps({"vulns": [ADVISORY]} if asked == "jinja2" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def osv_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OsvAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/query"
    server.shutdown()
    server.server_close()


def test_a_known_vulnerability_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pip-audit asks a server in OSV's format; the package, the advisory and the fix are named."""
    pins = tmp_path / "pins.txt"
    with osv_server() as url:
        pins.write_text("numpy==2.4.0\n")
        assert report(pins, [(*OSV, "--osv-url", url)]) == 0
        assert "1 packages looked up" in capsys.readouterr().out
        pins.write_text("jinja2==3.1.6\nnumpy==2.4.0\n")
        assert report(pins, [(*OSV, "--osv-url", url)]) == 1
    said = capsys.readouterr().out
    assert "VULNERABLE: jinja2 3.1.6: GHSA-0000-0000-0000, fixed in 3.1.7" in said


def test_a_service_that_does_not_answer_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens at the port: the report says so, and the audit does not fail."""
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==2.4.0\n")
    url = f"http://127.0.0.1:{free_port()}/v1/query"
    assert report(pins, [(*OSV, "--osv-url", url)]) == 0
    assert "NOT AUDITED" in capsys.readouterr().out


def test_a_package_that_an_index_does_not_know_is_not_called_safe() -> None:
    """pip-audit ends with 0 and an entry with a reason where an index has no advisories."""
    skipped = {"name": "numpy", "skip_reason": "Dependency not found on PyPI"}
    found = read_report({"dependencies": [skipped], "fixes": []})
    assert (found.vulnerable, found.unknown) == ((), ("numpy",))


def test_every_change_is_audited() -> None:
    """.ci/run and the workflow run `make audit`, which reads every file of pins."""
    assert "make audit" in (REPOSITORY / ".ci/run").read_text()
    assert "make audit" in (REPOSITORY / ".github/workflows/ci.yml").read_text()
    found = [*REPOSITORY.glob("constraints.txt"), *REPOSITORY.glob("[!.]*/*/constraints.txt")]
    assert {str(each.relative_to(REPOSITORY)) for each in found} == set(PINS)
