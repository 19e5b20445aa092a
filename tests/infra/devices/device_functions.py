"""Define functions for the device servers of tests."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def make(device: str, directory: str) -> Callable[[bytes], bytes]:
    """Leave a file per call in `directory`; return a function that obeys simple commands."""
    Path(directory, f"{device}-{os.getpid()}").touch()

    def answer(payload: bytes) -> bytes:
        command, _, rest = payload.partition(b" ")
        match command:
            case b"where":
                return f"{device} {os.getpid()}".encode()
            case b"sleep":
                time.sleep(float(rest))
                return f"{device} {os.getpid()}".encode()
            case b"refuse":
                raise ValueError("payload = refuse: need another")
            case b"fail":
                raise RuntimeError("out of memory")
            case b"die-once":
                if not Path(directory, "died").exists():
                    Path(directory, "died").touch()
                    os._exit(1)
                return b"alive"
            case b"die":
                os._exit(1)
        return payload[::-1]

    return answer


def broken(device: str) -> Callable[[bytes], bytes]:
    """Fail to start on device "bad"; on others answer with the device's name."""
    if device == "bad":
        raise OSError("no such device: bad")
    return lambda _: device.encode()


def slow(device: str) -> Callable[[bytes], bytes]:  # noqa: ARG001
    """Take longer to start than any test waits."""
    time.sleep(60)
    raise AssertionError
