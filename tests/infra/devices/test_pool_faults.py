"""Sockets in use, devices that vanish or hang, two runs at once, and clients that are killed."""

import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra.devices import device_client, device_pool
from infra.devices.device_client import RequestStream
from infra.devices.device_pool import DevicePool, _private_directory, _try_connect
from infra.devices.messages import PoolRequest
from infra.task_metrics import FAULTS
from tests.infra.devices.device_clients import (
    ask,
    listening,
    run,
    served_by,
    server_of,
    socket_path,
    wait_until,
    where,
)
from tests.process_tree import lives

VANISHING = "tests.infra.devices.device_functions:Vanishing"


@pytest.mark.parametrize("left", ["socket", "file"])
def test_a_path_that_is_in_use_by_no_process_is_taken(pool: DevicePool, left: str) -> None:
    """A server that was killed leaves its socket; a file of this name is no obstacle either."""
    path = socket_path(pool)
    if left == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.write_bytes(b"")
    assert ask(pool, [b"ab"]) == [b"ba"]


def test_a_listener_that_never_answers_is_replaced(
    pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that accepts at a server's path, and sends no beat, is killed."""
    monkeypatch.setattr(device_client, "SILENCE_LIMIT_S", 2.5)
    pool = replace(pool, devices=("cuda:0",))
    with listening(socket_path(pool)) as foreign:
        assert ask(pool, [b"ab"]) == [b"ba"]
        assert foreign.wait(10) == -9


def test_a_listener_that_hangs_up_is_replaced(pool: DevicePool) -> None:
    """A process that ends with its first client has no log of a server's; a server follows it."""
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
    program += "s.listen(); print(flush=True); s.accept()"
    pool = replace(pool, devices=("cuda:0",))
    with run(program, str(socket_path(pool))) as foreign:
        assert foreign.stdout is not None
        foreign.stdout.readline()
        assert ask(pool, [b"ab"]) == [b"ba"]


def test_a_server_that_another_container_hides_is_not_killed(tmp_path: Path) -> None:
    """Its process id is 0 there, which is the whole group of who sends a signal to it."""
    path = str(tmp_path / "socket")
    program = "import socket, sys; from infra.devices.device_pool import kill_server;"
    connect = "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
    unshare: tuple[str, ...] = ("unshare", "--map-root-user", "--pid", "--fork")
    if subprocess.run((*unshare, "true"), check=False, capture_output=True).returncode:
        # Where users may make no container, a stand-in says what Linux says in one.
        unshare, connect = (), "s = type('', (), {'getsockopt': lambda *_: bytes(12)})();"
    program += f"{connect} kill_server(s); print('alive')"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = (*unshare, sys.executable, "-c", program, path)
        # A session of its own: without it the signal would end the tests.
        ended = subprocess.run(
            command, start_new_session=True, check=False, capture_output=True, text=True
        )
    assert (ended.returncode, ended.stdout) == (0, "alive\n")


def test_a_client_waits_while_others_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of connections that is full is no reason to leave a device out."""
    monkeypatch.setattr(device_pool, "_CONNECT_LIMIT_S", 0.5)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(path))
        listener.listen(0)
        first = _try_connect(path)
        waiting = threads.submit(_try_connect, path)
        time.sleep(0.2)
        assert not waiting.done()
        listener.accept()[0].close()
        second = waiting.result()
        assert first is not None
        assert second is not None
        with pytest.raises(TimeoutError, match=r"does not accept within 0.5 s: end the"):
            _try_connect(path)
        first.close()
        second.close()


def test_a_device_that_vanishes_is_left_out(
    pool: DevicePool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other device computes its requests, once; the stream says why."""
    stream = RequestStream(replace(pool, factory=VANISHING), 5000)

    def requests() -> Iterator[PoolRequest]:
        for payload in [b"sleep 0.1"] * 4 + [b"vanish"]:
            yield PoolRequest(1000, payload)
        while not stream._left_out:
            yield PoolRequest(1000, b"sleep 0.1")

    FAULTS.take()
    answers = list(stream.answers(requests()))
    assert answers.pop(4) == b"hsinav"
    assert served_by(answers[-1])[0] == "cuda:1"
    assert len({served_by(each) for each in answers}) == 2
    reason = "its server did not start: OSError: no such device: cuda:0"
    assert stream._left_out == {"cuda:0": reason}
    assert f"cuda:0 is left out: {reason}" in capfd.readouterr().err
    faults = {(each.device, each.kind): each.reason for each in FAULTS.take()}
    assert faults.keys() == {("cuda:0", "server lost"), ("cuda:0", "left out")}
    assert faults["cuda:0", "left out"] == reason
    assert faults["cuda:0", "server lost"].endswith("then OSError: no such device: cuda:0")


def test_a_server_whose_batch_never_ends_is_replaced(pool: DevicePool) -> None:
    """Its beats come, so it is itself that notices; the utterance is computed again."""
    pool = replace(pool, devices=("cuda:0",), start_timeout_s=3)
    FAULTS.take()
    assert ask(pool, [b"hang-once"]) == [b"ecno-gnah"]
    assert len(list(Path(pool.arguments["directory"]).glob("cuda:0-*"))) == 2
    (fault,) = FAULTS.take()
    assert (fault.device, fault.kind) == ("cuda:0", "server lost")
    stuck = r"its server ended: stuck: a batch of 10 frames takes \d s: the limit is 3 s"
    assert re.fullmatch(stuck, fault.reason)


def test_a_task_knows_why_its_batches_failed(pool: DevicePool) -> None:
    """Out of memory, and batches that were divided, each once, with the first reason."""
    pool = replace(pool, devices=("cuda:0",))
    FAULTS.take()
    answers = ask(pool, [b"sleep 0.3", *[b"large 3"] * 8])
    assert answers[1:] == [b"3 egral"] * 8
    (fault,) = FAULTS.take()
    assert (fault.device, fault.kind) == ("cuda:0", "out of memory")
    assert fault.reason == "RuntimeError: out of memory"
    ask(pool, [b"ab", b"fail", b"ab"])
    (fault,) = FAULTS.take()
    assert (fault.kind, fault.num_tasks) == ("batch failed", 1)
    assert fault.reason == "ValueError: payload = fail: need another"


def test_two_runs_at_once_have_their_own_servers(pool: DevicePool, tmp_path: Path) -> None:
    """They share a host's devices and nothing else: each has its own answers, and its own end."""
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = DevicePool(pool.factory, {"directory": str(other_folder)}, pool.devices, 1000, 1.0)
    pools = [replace(pool, idle_timeout_s=1.0), other]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, pools * 2, [[b"folder"] * 200] * 4))
        servers = [served_by(each) for each in threads.map(first_server, pools)]
    assert [{*each} for each in answers] == [
        {each.arguments["directory"].encode()} for each in pools * 2
    ]
    assert len({process for _, process in servers}) == 2
    wait_until(lambda: not {each.token for each in pools} & folders())


def first_server(pool: DevicePool) -> bytes:
    (answer,) = ask(pool, [b"where"])
    assert isinstance(answer, bytes)
    return answer


def folders() -> set[str]:
    return {folder.name for folder in _private_directory().iterdir()}


def test_a_client_killed_with_requests_in_flight_harms_no_other(
    pool: DevicePool, tmp_path: Path
) -> None:
    """Its requests are dropped, another client's are answered; no process or folder remains."""
    pool = replace(pool, devices=("cuda:0",), idle_timeout_s=0.5)
    program = (
        "import pickle, sys; from tests.infra.devices.device_clients import ask;"
        "ask(pickle.load(sys.stdin.buffer), [b'note 0.1'] * 40, 1000)"
    )
    with run(program, given=pickle.dumps(pool)) as client, ThreadPoolExecutor(1) as threads:
        wait_until((tmp_path / "noted").exists)
        others = threads.submit(ask, pool, [b"sleep 0.05"] * 20, 1000)
        time.sleep(0.3)
        client.kill()
        answers = others.result()
    assert len({served_by(each) for each in answers}) == 1
    noted = (tmp_path / "noted").stat().st_size
    assert where(pool) == served_by(answers[0])
    assert (tmp_path / "noted").stat().st_size == noted < 20
    (server,) = {server_of(each) for each in tmp_path.glob("cuda:0-*")}
    wait_until(lambda: not lives(server))
    wait_until(lambda: pool.token not in folders())
