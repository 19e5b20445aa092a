"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver and no port."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """Browser is one tab: it opens files, and answers questions about them."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer; keep the events before it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == number:
                assert "error" not in received, f"{method}: {received}"
                result: dict[str, Any] = received["result"]
                return result
            self.events.append(received)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Show a file at a width in CSS pixels, in a light or a dark scheme, and wait for it."""
        is_phone = width < 600
        size = {"width": width, "height": 844 if is_phone else 900}
        self.call(
            "Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=is_phone, **size
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the console says, exceptions, and requests beyond the page itself."""
        self.evaluate("1")  # what happened before is among the events then
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        pages = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e for e in self.events if e.get("method") in bad] + pages[1:]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = self._answers.read(1 << 16)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        received: dict[str, Any] = json.loads(line)
        return received


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a Chromium with a fresh profile; end it and all its processes."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("no chromium: sh tests/install_packages.sh installs it")
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4; moving them up first keeps both.
        inherited = [os.dup2(fd, 200 + fd) for fd in (commands_read, answers_write)]
        process = os.posix_spawn(
            found,
            [found, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": profile},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, inherited[0], 3),
                (os.POSIX_SPAWN_DUP2, inherited[1], 4),
                (os.POSIX_SPAWN_OPEN, 2, f"{profile}/stderr", os.O_WRONLY | os.O_CREAT, 0o600),
            ],
            setpgroup=0,
        )
        for fd in (commands_read, answers_write, *inherited):
            os.close(fd)
        try:
            yield Browser(commands_write, answers_read)
        finally:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(commands_write)
