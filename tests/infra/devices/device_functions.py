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
            case b"size":
                return str(batch_size).encode()
            case b"where" | b"sleep":
                time.sleep(float(rest or 0))
                return f"{self.device} {os.getpid()}".encode()
            case b"nan":
                return b"nan"
            case b"fail":
                raise ValueError("payload = fail: need another")
            case b"large" if batch_size > int(rest):
                raise RuntimeError("out of memory")
            case b"note":
                with (self.directory / "noted").open("ab") as file:
                    file.write(b"x")
                time.sleep(float(rest))
            case b"folder":
                return str(self.directory).encode()
            case b"hang-once" if self._is_first("hung"):
                time.sleep(60)
            case b"die-once":
                if self._is_first("died"):
                    os._exit(1)
                return b"alive"
            case b"die":
                os._exit(1)
        return payload[::-1]

    def _is_first(self, name: str) -> bool:
        """Return whether no call of this directory asked before."""
        is_first = not (self.directory / name).exists()
        (self.directory / name).touch()
        return is_first


class Vanishing(Commands):
    """Vanishing fails on device "cuda:0", and cannot be made there, once it was asked to vanish."""

    def __init__(self, device: str, directory: str) -> None:
        super().__init__(device, directory)
        self.check()

    def check(self) -> None:
        """Fail if the device is gone."""
        if self.device == "cuda:0" and (self.directory / "gone").exists():
            raise OSError("no such device: cuda:0")

    def obey(self, payload: bytes, batch_size: int) -> bytes:
        """Obey, unless the device is gone."""
        if payload == b"vanish":
            (self.directory / "gone").touch()
        self.check()
        return super().obey(payload, batch_size)


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
