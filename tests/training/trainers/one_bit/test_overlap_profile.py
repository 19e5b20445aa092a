"""The profile that shows 1-bit SGD's exchanges beside computation, of two real ranks."""

from argparse import Namespace
from pathlib import Path

import pytest

from tests.benchmarks.one_bit_overlap import (
    TRACED_STEPS,
    Timeline,
    read_trace,
    train,
    train_traced,
    verdict,
)
from tests.training.trainers.ranks import RankPool

SMALL = Namespace(units=8, layers=2, frames=4)


def test_a_trace_has_each_exchange_in_a_thread_beside_the_passes(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """The profiler's own thread has the passes alone, one for each exchange."""
    file = tmp_path / "trace.json"
    rank_pool.run(2, train_traced, SMALL, file)
    seen, is_apart = read_trace(file)
    assert is_apart
    assert (len(seen.exchanges), len(seen.passes)) == (TRACED_STEPS, TRACED_STEPS)
    assert 0 <= seen.hidden_share <= 1


def alternate(group: object, options: Namespace) -> float:
    return train(group, options, 4, double_buffering=False).hidden_share


def test_without_double_buffering_nothing_is_hidden(rank_pool: RankPool) -> None:
    """A step's passes have ended when its exchange begins."""
    assert rank_pool.run(2, alternate, SMALL) == [0.0, 0.0]


def test_shares_are_those_of_the_time_line() -> None:
    """Of exchanges of 4 and 2 s, 3 s lie within passes, which last 4 s in all."""
    steps = [(0.0, 5.0), (5.0, 9.0)]
    beside = Timeline([(0.0, 4.0), (6.0, 8.0)], [(1.0, 3.0), (7.0, 9.0)], steps)
    assert beside.overlap_s == 3.0
    assert (beside.hidden_share, beside.used_share) == (0.5, 0.75)
    late = Timeline([(0.0, 1.0)], [(1.0, 2.0)], [(0.0, 2.0)])
    assert verdict(late, beside).startswith("Verdict: exchanges overlap computation: 50 % of")
    assert "75 % of what these can hide. A step takes 4500 ms, and 2000" in verdict(late, beside)
    assert verdict(late, late).startswith("Verdict: exchanges hardly overlap computation: 0 % of")


@pytest.mark.parametrize("thread", [1, 2])
def test_a_trace_of_one_thread_is_said_so(tmp_path: Path, thread: int) -> None:
    """An exchange in the passes' own thread can hide nothing."""
    file = tmp_path / "trace.json"
    file.write_text(
        '{"traceEvents": [{"name": "1-bit exchange", "ph": "X", "ts": 5, "dur": 2, "tid": 1},'
        f' {{"name": "forward, backward", "ph": "X", "ts": 0, "dur": 6, "tid": {thread}}}]}}'
    )
    seen, is_apart = read_trace(file)
    assert is_apart == (thread == 2)
    assert seen.exchanges == [(5e-6, 7e-6)]
