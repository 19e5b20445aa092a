"""A pool of two devices, whose servers end with the test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.devices.device_pool import DevicePool, _private_directory
from tests.infra.devices.device_clients import COMMANDS, kill, server_of


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DevicePool]:
    devices = ("cuda:0", "cuda:1")
    pool = DevicePool(COMMANDS, {"directory": str(tmp_path)}, devices, 1000, idle_timeout_s=30)
    yield pool
    for made in tmp_path.glob("cuda:*"):
        kill(server_of(made))
    shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)
