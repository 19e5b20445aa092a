"""Define functions for the device servers of tests."""

import os
import time
from collections.abc import Sequence
from pathlib import Path


class Commands:
    """Commands obeys each payload's command; others it reverses. A file a call says it was made."""

    def __init__(self, device: str, directory: str) -> None:
        self.device = device
        self.directory = Path(directory)
        (self.directory / f"{device}-{os.getpid()}").touch()

    def check(self) -> None:
        """Do nothing: this device always works."""

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> list[bytes]:
        """Copy the payloads."""
        return [bytes(each) for each in payloads]

    def compute(self, prepared: list[bytes]) -> list[bytes]:
        """Obey."""
        return [self.obey(each, len(prepared)) for each in prepared]

    def finish(self, computed: list[bytes]) -> list[bytes | Exception]:
        """Return the answers; "nan" fails alone."""
        return [ValueError("NaN") if each == b"nan" else each for each in computed]

    def obey(self, payload: bytes, batch_size: int) -> bytes:
        """Obey one payload."""
        command, _, rest = payload.partition(b" ")
        match command:
            case b"where":
                return f"{self.device} {os.getpid()}".encode()
            case b"size":
                return str(batch_size).encode()
            case b"sleep":
                time.sleep(float(rest))
                return f"{self.device} {os.getpid()}".encode()
            case b"nan":
                return b"nan"
            case b"fail":
                raise ValueError("payload = fail: need another")
            case b"large" if batch_size > int(rest):
                raise RuntimeError("out of memory")
            case b"die-once":
                if not (self.directory / "died").exists():
                    (self.directory / "died").touch()
                    os._exit(1)
                return b"alive"
            case b"die":
                os._exit(1)
        return payload[::-1]


class Broken(Commands):
    """Broken cannot be made on device "bad", and cannot compute on device "worse"."""

    def __init__(self, device: str, directory: str) -> None:
        super().__init__(device, directory)
        if device == "bad":
            raise OSError("no such device: bad")

    def check(self) -> None:
        """Fail on device "worse"."""
        if self.device == "worse":
            raise OSError("device does not answer: worse")


def slow(device: str) -> Commands:  # noqa: ARG001
    """Take longer to start than any test waits."""
    time.sleep(60)
    raise AssertionError
