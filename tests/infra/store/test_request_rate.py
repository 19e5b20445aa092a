"""A host's rate follows what a throttling store serves, and is shared by the host's processes."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra import host_folder
from infra.store import retry, s3_limits
from infra.store.s3_errors import NoTurnError
from infra.store.s3_limits import (
    FIRST_PER_S,
    INCREASE_PER_S,
    LEAST_PER_S,
    LEAST_SERVED_PER_S,
    UNLIMITED,
    WINDOW_S,
    RequestRate,
    SharedRates,
    after_answer,
    place_of,
    rates_of_host,
    take_turn,
)

LIMIT = RequestRate(100.0, 10.0, 10.0, cut_s=10.0, throttled_s=10.0)


def window(rate: RequestRate, num_sent: int, num_throttled: int) -> RequestRate:
    """Send at the rate's turns, and answer in the order of sending, 0.1 s later."""
    sent = []
    for _ in range(num_sent):
        rate, turn_s = take_turn(rate, rate.window_s)
        sent.append(turn_s)
    for number, sent_s in enumerate(sent[:-1]):
        rate = after_answer(rate, min(sent_s + 0.1, 10.49), sent_s, number < num_throttled)
    return after_answer(rate, 10.0 + WINDOW_S, sent[-1], is_throttled=False)


def test_nothing_waits_before_the_first_throttled_answer() -> None:
    """Without a limit every turn is now, and answers change nothing; the first 503 sets S3's."""
    assert take_turn(UNLIMITED, 5.0) == (UNLIMITED, 5.0)
    assert after_answer(UNLIMITED, 5.0, 4.9, is_throttled=False) == UNLIMITED
    limited = after_answer(UNLIMITED, 5.0, 4.9, is_throttled=True)
    assert (limited.per_s, limited.is_limited) == (FIRST_PER_S, True)


def test_turns_are_spaced_by_the_rate() -> None:
    """Turns follow each other at the rate; a pause gives no right to a burst."""
    rate, turns = LIMIT, []
    for _ in range(4):
        rate, turn_s = take_turn(rate, 10.0)
        turns.append(turn_s)
    assert turns == pytest.approx([10.0, 10.01, 10.02, 10.03])
    rate, turn_s = take_turn(rate, 20.0)
    assert turn_s == 20.0
    assert take_turn(rate, 20.0)[1] == pytest.approx(20.01)


def test_the_cut_is_to_the_share_that_was_served() -> None:
    """Of 50 answers in half a second 10 were throttled: 80 % of the rate remains."""
    assert window(LIMIT, 50, 10).per_s == pytest.approx(80.0)
    assert window(LIMIT, 50, 1).per_s == pytest.approx(98.0)
    # A rate that did not limit is cut to what was sent.
    assert window(LIMIT._replace(per_s=5000.0), 50, 10).per_s == pytest.approx(80.0)


def test_one_window_cuts_to_a_tenth_at_most() -> None:
    """All of a window may be bad luck; and a host always asks once a second, or 20 if served."""
    assert window(LIMIT._replace(per_s=500.0), 250, 249).per_s == pytest.approx(50.0)
    assert window(LIMIT, 50, 49).per_s == LEAST_SERVED_PER_S
    rate = LIMIT._replace(num_sent=3.0)
    for number in range(3):
        rate = after_answer(rate, 10.2 + 0.2 * number, 10.0, is_throttled=True)
    assert rate.per_s == LEAST_PER_S


def test_503s_that_no_rate_causes_do_not_stop_a_host() -> None:
    """A store that answers three of ten requests with 503, however few they are, serves 14/s."""
    chance, rate, now_s, num_served = random.Random(1), UNLIMITED, 0.0, 0
    while now_s < 60.0:
        rate, sent_s = take_turn(rate, now_s)
        now_s, is_throttled = sent_s + 0.01, chance.random() < 0.3
        rate = after_answer(rate, now_s, sent_s, is_throttled)
        num_served += not is_throttled
    assert num_served > 60 * 0.7 * LEAST_SERVED_PER_S


def test_one_overload_is_cut_once() -> None:
    """Answers to requests from before a cut cut no more."""
    cut = window(LIMIT, 50, 25)
    late = after_answer(cut, 11.2, 10.4, is_throttled=True)
    assert (late.per_s, late.num_throttled) == (cut.per_s, 0.0)
    assert late.throttled_s == 11.2


def test_the_rate_grows_where_it_limits() -> None:
    """Half a second without a 503 adds to a rate that is used, and more the longer it lasts."""
    grown = window(LIMIT, 50, 0)
    assert grown.per_s == pytest.approx(100.0 + INCREASE_PER_S * (1.0 + 5.0 + 0.0625))
    assert window(LIMIT, 30, 0).per_s == 100.0
    later = window(LIMIT._replace(throttled_s=5.0), 50, 0)
    assert later.per_s > grown.per_s + 90.0


def test_a_limit_is_forgotten() -> None:
    """A minute without a 503 ends the limit, and not 59 s."""
    assert take_turn(LIMIT, 69.0)[0].is_limited
    assert take_turn(LIMIT, 70.1) == (UNLIMITED, 70.1)


@pytest.mark.parametrize(
    "rate",
    [
        LIMIT._replace(per_s=math.nan),
        LIMIT._replace(per_s=math.inf),
        LIMIT._replace(per_s=-1.0),
        LIMIT._replace(per_s=LEAST_PER_S / 2),
        LIMIT._replace(window_s=21.0),
        LIMIT._replace(throttled_s=-1.0),
        LIMIT._replace(num_sent=-1.0),
        LIMIT._replace(next_turn_s=400.0),
    ],
)
def test_impossible_rates_are_no_rates(rate: RequestRate) -> None:
    """Numbers that none of us stores, or from after now, as before a restart, are refused."""
    assert LIMIT.is_valid(20.0)
    assert not rate.is_valid(20.0)


def test_patience_ends() -> None:
    """An operation waits half an hour while others are served, and three minutes while none is."""
    attempts = retry.Attempts(10, 180.0)
    assert attempts.after_throttling(1799.0, 179.0, 0.5) is not None
    assert attempts.after_throttling(1800.1, 0.0, 0.5) is None
    assert attempts.after_throttling(200.0, 180.1, 0.5) is None
    assert attempts.num_failed == 0


def limited(path: Path, per_s: float) -> SharedRates:
    """Open rates at `path` where the key "k" has a limit."""
    rates, now_s = SharedRates(path), time.monotonic()
    rate = RequestRate(per_s, now_s, now_s, cut_s=now_s, throttled_s=now_s, served_s=now_s)
    rates._update(s3_limits._cell_of("k"), lambda *_: (rate, None))
    return rates


TAKE_TURNS = """
import sys, time
from pathlib import Path
from infra.store.s3_limits import SharedRates
rates = SharedRates(Path(sys.argv[1]))
print("ready", flush=True)
while sys.stdin.readline():
    begun_s, count = time.monotonic(), 0
    while time.monotonic() < begun_s + 1.0:
        rates.wait_for_turn("k", begun_s)
        count += 1
    print(count, flush=True)
"""

NUM_SECONDS = 20

HOLD_LOCK = """
import sys, time
from pathlib import Path
from infra.store.s3_limits import SharedRates, _cell_of
rates = SharedRates(Path(sys.argv[1]))
with rates._locked(_cell_of("k")):
    print("ready", flush=True)
    time.sleep(60)
"""


def started(program: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def turns_of_a_second(children: "list[subprocess.Popen[str]]") -> list[int]:
    for child in children:
        child.stdin.write("go\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
    return [int(child.stdout.readline()) for child in children]  # type: ignore[union-attr]


def test_processes_share_one_rate(tmp_path: Path) -> None:
    """Three processes together send what one may, each its part; a killed one takes nothing."""
    limited(tmp_path / "rates", 120.0)
    children = [started(TAKE_TURNS, tmp_path / "rates") for _ in range(4)]
    children.pop().kill()
    # Beside other work a process may miss its turns of a second, but never take others'.
    for _ in range(NUM_SECONDS):
        counts = turns_of_a_second(children)
        assert sum(counts) <= 130
        if sum(counts) >= 80 and min(counts) > 10:
            break
    for child in children:
        child.communicate(timeout=30)
    assert sum(counts) >= 80
    assert min(counts) > 10


def test_a_killed_process_frees_its_lock_and_a_stopped_one_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is to be had at once after a kill, and within seconds beside a stopped process."""
    rates = limited(tmp_path / "rates", 1000.0)
    holder = started(HOLD_LOCK, tmp_path / "rates")
    holder.send_signal(signal.SIGSTOP)
    begun_s = time.monotonic()
    rates.wait_for_turn("k", begun_s)
    assert 0.9 < time.monotonic() - begun_s < 30.0
    holder.kill()
    holder.wait()
    monkeypatch.setattr(s3_limits, "_LOCK_PATIENCE_S", 60.0)
    begun_s = time.monotonic()
    rates.wait_for_turn("k", begun_s)
    assert time.monotonic() - begun_s < 30.0


def test_a_damaged_file_limits_nothing(tmp_path: Path) -> None:
    """Bytes that no process of ours wrote are no limit, nor a wait; answers to us are one."""
    (tmp_path / "rates").write_bytes(random.Random(1).randbytes(2**23))
    rates = SharedRates(tmp_path / "rates")
    begun_s, throttled = time.monotonic(), set[int]()
    for key in map(str, range(1000)):
        waited_s, cell = rates.wait_for_turn(key, begun_s), s3_limits._cell_of(key)
        assert waited_s == 0.0 or cell in throttled
        if int(key) % 2 == 0:
            throttled.add(cell)
        rates.count_answer(key, begun_s, is_throttled=cell in throttled)
    assert all(rates._read(cell).is_limited for cell in throttled)


def test_a_directory_open_to_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are read from a directory that is ours alone; else each process has its own."""
    monkeypatch.setattr(host_folder, "_TEMPORARY", tmp_path)
    ours = tmp_path / f"megahour-store-{os.getuid()}"
    for make in (lambda: ours.mkdir(mode=0o777), lambda: ours.symlink_to(tmp_path)):
        make()
        if not ours.is_symlink():
            ours.chmod(0o777)
        rates = rates_of_host()
        rates.count_answer("k", time.monotonic(), is_throttled=True)
        assert rates.unserved_s("k", 0.0) > 0.0
        assert not (ours / "rates").exists()
        ours.unlink() if ours.is_symlink() else ours.rmdir()
    rates_of_host().count_answer("k", time.monotonic(), is_throttled=True)
    assert (ours / "rates").stat().st_mode & 0o777 == 0o600
    assert rates_of_host()._read(s3_limits._cell_of("k")).is_limited


def test_a_line_ends_when_the_store_serves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations in line give up as the one at its head does."""
    rates = limited(tmp_path / "rates", 1.0)
    monkeypatch.setattr(retry, "LIMIT_S", 0.5)
    monkeypatch.setattr(s3_limits, "_LINE_INTERVAL_S", 0.2)
    rates._lines[s3_limits._cell_of("k")].acquire()
    with pytest.raises(NoTurnError, match="no turn among the host's requests in 1 s"):
        rates.wait_for_turn("k", time.monotonic() - 0.4)


def test_places_are_two_folders() -> None:
    """Reads and writes, buckets, and the first two folders of a key have rates of their own."""
    assert place_of("read", "b", "corpus/audio/0f/x.flac") == "read/b/corpus/audio"
    assert place_of("write", "b", "runs/demo/features/x") == "write/b/runs/demo"
    assert place_of("read", "b", "x") == place_of("read", "b", "") == "read/b"
