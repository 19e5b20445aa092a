import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from infra.devices.device_pool import DeviceError, DevicePool, _private_directory
from infra.devices.device_server import (
    ANSWER,
    MAX_MESSAGE_BYTES,
    MessageError,
    receive_message,
    send_message,
)
from infra.devices.file_locks import least_busy
from infra.devices.pool_folder import held, remove_abandoned

MAKE = "tests.infra.devices.device_functions:make"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DevicePool]:
    pool = DevicePool(MAKE, {"directory": str(tmp_path)}, ("cuda:0", "cuda:1"), idle_timeout_s=30)
    yield pool
    for made in tmp_path.glob("cuda:*"):
        _kill(int(made.name.rpartition("-")[2]))
    shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    _wait_until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition: "object") -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _where(answer: bytes) -> tuple[str, int]:
    device, pid = answer.decode().split()
    return device, int(pid)


def test_answers_come_back_whole(pool: DevicePool) -> None:
    """Empty and large requests are answered by one server, which was made once."""
    large = os.urandom(20_000_000)
    assert pool.request(b"") == b""
    assert pool.request(large) == large[::-1]
    assert len(list(Path(pool.arguments["directory"]).glob("cuda:0-*"))) == 1


def test_every_process_finds_the_same_servers(pool: DevicePool) -> None:
    """Four processes that start at once make one server per device, not one each."""
    with get_context("spawn").Pool(4) as processes:
        answers = processes.map(pickle.loads(pickle.dumps(pool)).request, [b"sleep 0.3"] * 12, 1)
    assert {_where(answer)[0] for answer in answers} == {"cuda:0", "cuda:1"}
    assert len({_where(answer)[1] for answer in answers}) == 2
    assert len(list(Path(pool.arguments["directory"]).iterdir())) == 2


def test_simultaneous_requests_spread_over_the_devices(pool: DevicePool) -> None:
    """Of four requests at once each of two devices gets two."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(pool.request, [b"sleep 0.5"] * 4))
    devices = sorted(_where(answer)[0] for answer in answers)
    assert devices == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_a_killed_server_is_replaced(pool: DevicePool) -> None:
    """After SIGKILL other processes answer, and the device has a new server."""
    device, pid = _where(pool.request(b"where"))
    _kill(pid)
    # The first may still reach the dying server's socket, and then asks the other device.
    answers = [_where(pool.request(b"where")) for _ in range(2)]
    assert all(other != pid for _, other in answers)
    assert answers[-1][0] == device


def test_a_server_killed_at_work_does_not_lose_the_request(pool: DevicePool) -> None:
    """A request is retried when its server is killed; one that always kills is given up."""
    assert pool.request(b"die-once") == b"alive"
    with pytest.raises(DeviceError, match=r"cuda:\d: its server ended before .*3 attempts, logs"):
        pool.request(b"die")
    assert pool.request(b"ab") == b"ba"


def test_a_killed_client_frees_its_slot(pool: DevicePool, tmp_path: Path) -> None:
    """A task that is killed while it waits does not leave its device counted as busy."""
    program = "import pickle, sys; pickle.load(sys.stdin.buffer).request(b'sleep 60')"
    client = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert client.stdin is not None
    with client.stdin as stdin:
        stdin.write(pickle.dumps(pool))
    _wait_until(lambda: list(tmp_path.glob("cuda:0-*")))
    time.sleep(0.3)
    assert _where(pool.request(b"where"))[0] == "cuda:1", "cuda:0 is busy"
    client.kill()
    client.wait()
    with least_busy(pool._directory(), ["0", "1"]) as name:
        assert name == "0"


def test_the_function_s_errors_come_back(pool: DevicePool) -> None:
    """A ValueError leaves the server running; any other error is raised and replaces the server."""
    before = pool.request(b"where")
    with pytest.raises(ValueError, match=r"make on cuda:0: ValueError: payload = refuse: need"):
        pool.request(b"refuse")
    assert pool.request(b"where") == before
    with pytest.raises(DeviceError, match=r"make on cuda:0: RuntimeError: out of memory"):
        pool.request(b"fail")
    assert pool.request(b"where") != before


def test_a_device_that_cannot_start_is_passed_over(pool: DevicePool) -> None:
    """A broken device does not get all the tasks; if all are broken, the error says why."""
    factory = "tests.infra.devices.device_functions:broken"
    pool = replace(pool, factory=factory, arguments={}, devices=("bad", "good"), idle_timeout_s=1)
    assert pool.request(b"") == b"good"
    with pytest.raises(DeviceError, match="bad: its server did not start: OSError: no such device"):
        replace(pool, devices=("bad",)).request(b"")
    with pytest.raises(DeviceError, match="No module named 'no_such_module'"):
        replace(pool, factory="no_such_module:f", devices=("x",)).request(b"")


def test_waiting_has_limits(pool: DevicePool) -> None:
    """A server that starts or answers too late is killed, with the limit in the message."""
    hasty = replace(pool, request_timeout_s=1)
    pid = _where(hasty.request(b"where"))[1]
    with pytest.raises(DeviceError, match="no answer in 1 s, so its server was killed"):
        hasty.request(b"sleep 30")
    _wait_until(lambda: not _is_alive(pid))
    factory = "tests.infra.devices.device_functions:slow"
    slow = replace(pool, factory=factory, arguments={}, devices=("cpu",), start_timeout_s=0.5)
    with pytest.raises(DeviceError, match=r"cpu: its server did not start within 0.5 s"):
        slow.request(b"")


def test_an_idle_server_ends(pool: DevicePool) -> None:
    """A server ends when idle, not while it works, and starts again when it is needed."""
    brief = replace(pool, idle_timeout_s=0.5)
    pid = _where(brief.request(b"sleep 1.2"))[1]
    assert _is_alive(pid)
    _wait_until(lambda: not _is_alive(pid))
    assert _where(brief.request(b"where"))[1] != pid


def _folders() -> set[str]:
    return {folder.name for folder in _private_directory().iterdir()}


def test_a_pool_s_folder_is_removed_when_its_last_server_ends(pool: DevicePool) -> None:
    """Two servers that become idle leave nothing; a server that is terminated leaves nothing."""
    brief = replace(pool, idle_timeout_s=0.3, token=f"{pool.token}-brief")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(brief.request, [b"sleep 0.3"] * 2))
    assert brief.token in _folders()
    _wait_until(lambda: brief.token not in _folders())
    ended = replace(pool, token=f"{pool.token}-ended")
    os.kill(_where(ended.request(b"where"))[1], signal.SIGTERM)
    _wait_until(lambda: ended.token not in _folders())


def test_the_next_start_removes_the_folder_of_a_killed_server(pool: DevicePool) -> None:
    """SIGKILL leaves a folder, which another pool's start recognizes; those in use remain."""
    killed = replace(pool, token=f"{pool.token}-killed")
    busy = replace(pool, token=f"{pool.token}-busy")
    _kill(_where(killed.request(b"where"))[1])
    server = _where(busy.request(b"where"))[1]
    assert busy.token in _folders()
    pool.request(b"where")
    assert killed.token not in _folders()
    assert _where(busy.request(b"where"))[1] == server
    assert killed.request(b"ab") == b"ba"


def test_a_folder_that_is_removed_and_held_at_once_is_there(tmp_path: Path) -> None:
    """Of 500 holders beside a process that removes all it can, each has its folder."""
    program = "import sys; from pathlib import Path; from infra.devices import pool_folder\n"
    program += "while True: pool_folder.remove_abandoned(Path(sys.argv[1]))"
    remover = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        for _ in range(500):
            with held(tmp_path / "pool"):
                (tmp_path / "pool" / "file").write_bytes(b"")
    finally:
        remover.kill()
        remover.wait()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_message_has_a_longest_length(pool: DevicePool) -> None:
    """A longer one, and one of no known kind, is refused by its header, before memory is taken."""
    pool.request(b"")
    path = next(pool._directory().glob("[0-9]"))
    for header, refusal in (
        (b"A" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "little"), b"4294967297 bytes: need at most 4"),
        (b"A" + b"\xff" * 8, b"18446744073709551615 bytes: need at most 4294967296"),
        (b"Z" + bytes(8), b"kind b'Z': need A, B or F"),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(header)
            kind, body = receive_message(connection)
        assert kind == b"B"
        assert refusal in body
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"A" + (2**40).to_bytes(8, "little"))
        with pytest.raises(MessageError, match="1099511627776 bytes: need at most"):
            receive_message(far)
        with pytest.raises(MessageError, match="need at most"):
            send_message(near, ANSWER, Endless())  # type: ignore[arg-type]


class Endless:
    """Endless claims one byte more than a message may have."""

    def __len__(self) -> int:
        return MAX_MESSAGE_BYTES + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factory": "os.system"}, "factory = 'os.system': need 'module:function'"),
        ({"devices": ()}, "need one or more"),
        ({"devices": ("cpu", "cpu")}, "each once"),
        ({"idle_timeout_s": 0}, "idle_timeout_s = 0: need more than 0 seconds"),
    ],
)
def test_bad_pools_are_refused(pool: DevicePool, change: dict[str, object], message: str) -> None:
    """Factory, devices and time limits are checked when the pool is made."""
    with pytest.raises(ValueError, match=message):
        replace(pool, **change)  # type: ignore[arg-type]
