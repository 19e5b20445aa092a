"""Streams of requests to real servers, some of which die, hang or do not start."""

import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from infra.devices import device_client
from infra.devices.device_client import RequestFailure, RequestStream, ServerLink
from infra.devices.device_pool import DeviceError, DevicePool, _private_directory
from infra.devices.messages import (
    MAX_MESSAGE_BYTES,
    Batch,
    Kind,
    Message,
    MessageError,
    PoolRequest,
    receive_message,
    send_message,
)
from tests.infra.devices.device_clients import (
    WINDOW,
    ask,
    kill,
    served_by,
    server_of,
    wait_until,
    where,
)
from tests.process_tree import lives

BROKEN = "tests.infra.devices.device_functions:Broken"
SLOW = "tests.infra.devices.device_functions:slow"


def test_answers_come_back_whole_and_in_order(pool: DevicePool) -> None:
    """Empty and large requests are answered by one server, which was made once."""
    large = os.urandom(20_000_000)
    payloads = [b"", large, *(str(number).encode() for number in range(300))]
    assert ask(pool, payloads) == [each[::-1] for each in payloads]
    assert len(list(Path(pool.arguments["directory"]).glob("cuda:0-*"))) == 1


def test_every_process_finds_the_same_servers(pool: DevicePool) -> None:
    """Four processes that start at once make one server a device, not one each."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.infra.devices.device_clients"])
    with context.Pool(4) as processes:
        copies = [(pickle.loads(pickle.dumps(pool)), [b"sleep 0.1"] * 12, 1000)] * 4
        answers = [each for part in processes.starmap(ask, copies, 1) for each in part]
    assert {served_by(answer)[0] for answer in answers} == {"cuda:0", "cuda:1"}
    assert len({served_by(answer)[1] for answer in answers}) == 2
    assert len(list(Path(pool.arguments["directory"]).iterdir())) == 2


def test_more_devices_are_opened_while_requests_wait(pool: DevicePool) -> None:
    """Of 30 batches two devices compute about half each; one batch opens one device alone."""
    assert ask(pool, [b"abc"])
    assert len(list(Path(pool.arguments["directory"]).iterdir())) == 1
    # Until the second server has started, which a busy machine delays.
    wait_until(lambda: len(set(map(served_by, ask(pool, [b"sleep 0.2"] * 12, 1000)))) == 2)
    devices = [served_by(each)[0] for each in ask(pool, [b"sleep 0.2"] * 30, 1000)]
    assert 9 <= devices.count("cuda:1") <= 15
    assert len({devices[-3], devices[-2], devices[-1]}) == 2


def test_a_server_that_has_just_connected_has_time_to_ask(pool: DevicePool) -> None:
    """However long it took to start, requests wait 0.2 s for it before another is started."""
    stream = RequestStream(pool, WINDOW)
    stream._in_flight.add(Batch([0], [PoolRequest(10, b"ab")]))
    stream._links["cuda:0"] = link = ServerLink(pool, "cuda:0", stream._in_flight, lambda: None)
    stream._waiting_since_s = time.monotonic() - 60
    link.connected_at_s = time.monotonic()
    assert not stream._need_another()
    link.connected_at_s -= 60
    assert stream._need_another()


def test_another_task_takes_the_device_that_is_free(pool: DevicePool) -> None:
    """A task whose requests fit one device leaves the other to the next task."""
    with ThreadPoolExecutor(2) as threads:
        busy = threads.submit(ask, pool, [b"sleep 1"])
        wait_until(lambda: list(Path(pool.arguments["directory"]).glob("cuda:0-*")))
        assert where(pool)[0] == "cuda:1"
        assert served_by(*busy.result())[0] == "cuda:0"


def test_the_batches_of_two_tasks_are_their_own(pool: DevicePool) -> None:
    """However many requests wait at a device, each batch is the one that its task formed alone."""
    pool = replace(pool, devices=("cuda:0",))
    with ThreadPoolExecutor(3) as threads:
        busy = threads.submit(ask, pool, [b"sleep 1"] * 3, 1000)
        wait_until(lambda: list(Path(pool.arguments["directory"]).glob("cuda:0-*")))
        both = list(threads.map(ask, [pool] * 2, [[b"size"] * 20, [b"size"] * 30]))
        busy.result()
    assert both == [[b"20"] * 20, [b"30"] * 30]


def test_what_is_given_ahead_is_bounded(pool: DevicePool) -> None:
    """A task reads no farther than it looks for batches and has in flight, six batches each."""
    given: list[int] = []

    def requests() -> Iterator[PoolRequest]:
        for number in range(100):
            given.append(number)
            yield PoolRequest(100, b"x")

    answers = RequestStream(replace(pool, batch_frames=200)).answers(requests())
    for taken, _ in enumerate(answers):
        assert len(given) <= taken + 6 * 2 + 6 * 2 + 2
    assert len(given) == 100


def test_servers_killed_at_work_lose_nothing(pool: DevicePool, tmp_path: Path) -> None:
    """Each of 40 requests is answered once, though servers are killed all the time."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, pool, [b"sleep 0.05"] * 40, 250)
        for _ in range(4):
            time.sleep(0.3)
            for made in tmp_path.glob("cuda:*"):
                kill(server_of(made))
        answers = running.result()
    assert len(answers) == 40
    assert all(isinstance(each, bytes) for each in answers)


def test_a_request_that_ends_every_server_fails_alone(pool: DevicePool) -> None:
    """Two of them in one batch, and what they were with is answered, by devices that remain."""
    answers = ask(pool, [b"ab", b"die", b"cd", b"die"])
    ended = "its server ended 3 times, at last: its server ended: it was killed, or crashed"
    assert answers == [b"ba", RequestFailure(ended), b"dc", RequestFailure(ended)]


def test_a_batch_whose_server_ends_once_is_computed_as_it_was(pool: DevicePool) -> None:
    """By the next server, together: no request's company differs from a run without the loss."""
    assert ask(pool, [b"die-once", b"size", b"size"]) == [b"alive", b"3", b"3"]


def test_requests_that_fail_alone_are_failures(pool: DevicePool) -> None:
    """The errors come back with the device's; the server remains."""
    before = where(pool)
    answers = ask(pool, [b"ab", b"fail", b"nan", b"large 3"] * 4)
    failed = RequestFailure("ValueError: payload = fail: need another")
    assert answers == [b"ba", failed, RequestFailure("ValueError: NaN"), b"3 egral"] * 4
    assert where(pool) == before


def test_a_stopped_server_is_killed_after_ten_seconds(
    pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends no beat; what it had is computed by another."""
    monkeypatch.setattr(device_client, "SILENCE_LIMIT_S", 2.5)
    pool = replace(pool, devices=("cuda:0",))
    pid = where(pool)[1]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, pool, [b"sleep 1.5"] * 3, 1000)
        time.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        others = {served_by(answer)[1] for answer in running.result()}
    assert pid not in others
    wait_until(lambda: not lives(pid))


def test_a_device_that_cannot_be_used_is_left_out(pool: DevicePool) -> None:
    """The others compute, and the stream says why; without another the error says it."""
    pool = replace(pool, factory=BROKEN, devices=("bad", "good", "worse"), idle_timeout_s=1)
    stream = RequestStream(pool, WINDOW)
    answers = list(stream.answers(PoolRequest(1000, b"sleep 0.3") for _ in range(30)))
    assert {served_by(each)[0] for each in answers} == {"good"}
    assert stream._left_out == {
        "bad": "its server did not start: OSError: no such device: bad",
        "worse": "its server did not start: OSError: device does not answer: worse",
    }
    with pytest.raises(DeviceError, match=r"no device of this host .* bad: .* no such device: bad"):
        ask(replace(pool, devices=("bad",)), [b""])
    with pytest.raises(DeviceError, match="No module named 'no_such_module'"):
        ask(replace(pool, factory="no_such_module:f", devices=("x",)), [b""])


def test_starting_has_a_limit(pool: DevicePool) -> None:
    """A server that starts too late is killed, with the limit in the message."""
    slow = replace(pool, factory=SLOW, arguments={}, devices=("cpu",), start_timeout_s=0.5)
    with pytest.raises(DeviceError, match=r"cpu: its server did not start within 0.5 s"):
        ask(slow, [b""])


def test_an_idle_server_ends(pool: DevicePool) -> None:
    """A server ends when idle, not while it works, and its folder with it; it starts again."""
    brief = replace(pool, idle_timeout_s=0.5, token=f"{pool.token}-brief")
    pid = served_by(*ask(brief, [b"sleep 1.2"]))[1]
    assert lives(pid)
    assert brief.token in _folders()
    wait_until(lambda: not lives(pid))
    wait_until(lambda: brief.token not in _folders())
    assert where(brief)[1] != pid
    ended = replace(pool, token=f"{pool.token}-ended")
    os.kill(where(ended)[1], signal.SIGTERM)
    wait_until(lambda: ended.token not in _folders())


def _folders() -> set[str]:
    return {folder.name for folder in _private_directory().iterdir()}


def test_the_next_start_removes_the_folder_of_a_killed_server(pool: DevicePool) -> None:
    """SIGKILL leaves a folder, which another pool's start recognizes; those in use remain."""
    killed = replace(pool, token=f"{pool.token}-killed")
    busy = replace(pool, token=f"{pool.token}-busy")
    kill(where(killed)[1])
    server = where(busy)[1]
    assert busy.token in _folders()
    where(pool)
    assert killed.token not in _folders()
    assert where(busy)[1] == server
    assert ask(killed, [b"ab"]) == [b"ba"]


def test_a_message_has_a_longest_length(pool: DevicePool) -> None:
    """A longer one, and one of no known kind, ends its connection before memory is taken."""
    ask(pool, [b""])
    path = next(each for each in pool._directory().iterdir() if each.is_socket())
    for header in (
        Kind.REQUEST.value + bytes(12) + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "little"),
        Kind.REQUEST.value + b"\xff" * 20,
        b"Z" + bytes(20),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(header)
            with pytest.raises(EOFError):
                all(receive_message(connection) for _ in range(10))
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"A" + bytes(12) + (2**40).to_bytes(8, "little"))
        with pytest.raises(MessageError, match="1099511627776 bytes: need at most"):
            receive_message(far)
        with pytest.raises(MessageError, match="need at most 4294967296"):
            send_message(near, Message(Kind.ANSWER, body=Endless()))  # type: ignore[arg-type]
    assert ask(pool, [b"ab"]) == [b"ba"]


def test_a_time_limit_is_of_silence_and_not_of_a_long_message() -> None:
    """A server that reads steadily for longer than the limit is not silent."""
    near, far = socket.socketpair()
    num_bytes = 24 << 20

    def read_slowly() -> None:
        left = num_bytes  # and a header, which fits the buffer
        while left and (data := far.recv(min(left, 1 << 20))):
            left -= len(data)
            time.sleep(0.0125)  # a pipe holds some 0.2 MB: 1.5 s in all

    with ThreadPoolExecutor(1) as thread, far, near:
        near.settimeout(1.0)
        reading = thread.submit(read_slowly)
        began = time.monotonic()
        send_message(near, Message(Kind.REQUEST, body=bytes(num_bytes)))
        reading.result()
        assert time.monotonic() - began > 1.0


class Endless:
    """Endless claims one byte more than a message may have."""

    def __len__(self) -> int:
        return MAX_MESSAGE_BYTES + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factory": "os.system"}, "factory = 'os.system': need .* 'module:function'"),
        ({"devices": ()}, "need one or more"),
        ({"devices": ("cpu", "cpu")}, "each once"),
        ({"batch_frames": 0}, "batch_frames = 0: need 1..4294967295"),
        ({"idle_timeout_s": 0}, "idle_timeout_s = 0: need 0.001"),
    ],
)
def test_bad_pools_are_refused(pool: DevicePool, change: dict[str, object], message: str) -> None:
    """Factory, devices, frames and time limits are checked when the pool is made."""
    with pytest.raises(ValueError, match=message):
        replace(pool, **change)  # type: ignore[arg-type]
