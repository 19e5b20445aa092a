"""The slow link's benchmark orders, tabulates and makes frames correctly, without hosts."""

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.slow_link.contestants import CONTESTANTS
from tests.benchmarks.slow_link.hosts import Rates
from tests.benchmarks.slow_link.method import Ranks, Settings
from tests.benchmarks.slow_link.rank import Point
from tests.benchmarks.slow_link.report import Standing, expected_s, ranking, table
from tests.benchmarks.slow_link.task import Frames
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks

TARGET_LOSS = 1.0
RATES = Rates(between_mbit=8, within_mbit=96)


def point(duration_s: float, loss: float, between_bytes: int = 0) -> Point:
    return Point(100, duration_s, between_bytes, 0, loss)


def test_expected_time_adds_that_of_each_hosts_bytes() -> None:
    """8 Mbit/s are 1 MB/s: 6 MB of two hosts take three seconds more."""
    end = Point(100, 2.0, 6_000_000, 24_000_000, 0.9)
    assert expected_s(end, TARGET_LOSS, 2, RATES) == (False, 2.0 + 3.0 + 1.0)


def test_settings_that_fail_come_after_all_that_do_not() -> None:
    """A diverged training, its loss NaN, comes last, after one that was only slow."""
    ends = [point(1, float("nan")), point(1, 1.5), point(900, 0.9), point(1, 1.2)]
    order = sorted(ends, key=lambda end: expected_s(end, TARGET_LOSS, 2, RATES))
    assert order == [ends[2], ends[3], ends[1], ends[0]]


def test_one_seed_that_misses_the_target_costs_a_method_its_place() -> None:
    """Methods rank by their median time, but only if every seed reached the target."""
    fast = Standing("fast", Settings(0.1), [point(1, 0.9), point(1, 1.1)], TARGET_LOSS)
    slow = Standing("slow", Settings(0.1), [point(9, 0.9), point(7, 0.8)], TARGET_LOSS)
    slowest = Standing("slowest", Settings(0.1), [point(30, 0.9), point(31, 0.9)], TARGET_LOSS)
    assert ranking([fast, slowest, slow]) == [slow, slowest, fast]


def test_a_row_holds_medians_and_ranges() -> None:
    """A row has the median of three seeds, and in parentheses the range."""
    ends = [point(3, 0.9, 10**6), point(2, 0.9, 2 * 10**6), point(9, 0.9, 10**6)]
    text = table([Standing("HTM", Settings(0.1, 50, 0.25), ends, TARGET_LOSS)])
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    further = "block 50, threshold 0.25"
    seconds, step_ms, megabytes = "3.0 (2.0..9.0)", "30 (20..90)", "1 (1..2)"
    assert cells == ["HTM", "0.1", further, seconds, "100", step_ms, megabytes, "0"]


def test_no_two_settings_of_a_grid_are_equal() -> None:
    """No method tries the same settings twice."""
    assert all(len(set(each.grid)) == len(each.grid) for each in CONTESTANTS.values())


def test_frames_are_each_ranks_and_steps_own_and_always_the_same() -> None:
    """The same rank and step give the same frames; another rank or step gives others."""
    frames = Frames(3)
    first, _ = frames.minibatch(5, 1, 4)
    again, _ = Frames(3).minibatch(5, 1, 4)
    assert torch.equal(first, again)
    assert not any(torch.equal(first, frames.minibatch(*at, 4)[0]) for at in ((6, 1), (5, 2)))


SETTINGS = Settings(0.05, block_size=2, gradient_threshold=0.01, density=0.1)
OURS = ("GTC", "BMUF", "HTM", "SparseLoCo")


def race(group: SimulatedGroup, method: str) -> Tensor:
    """Return the weights that are evaluated after two blocks on two hosts of two ranks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=SETTINGS.learning_rate)
    torch.manual_seed(group.rank())
    with CONTESTANTS[method].enter(model, optimizer, Ranks(group, 2, "", ""), SETTINGS) as entered:
        for inputs in torch.randn(4, 8, 4):
            entered.optimizer.zero_grad()
            (entered.module(inputs).square().sum() / 32).backward()
            entered.optimizer.step()
        return torch.cat([each.detach().flatten() for each in entered.weights().values()])


@pytest.mark.parametrize("method", [each for each in CONTESTANTS if each.startswith(OURS)])
def test_a_method_evaluates_one_model_on_all_hosts(method: str) -> None:
    """At a block's end the ranks' weights are equal to the bit, and have moved; bfloat16 rounds."""
    ends = simulate_ranks(4, race, method)
    torch.manual_seed(0)
    start = torch.cat([each.detach().flatten() for each in nn.Linear(4, 3).parameters()])
    assert all(torch.equal(ends[0], end) for end in ends[1:])
    assert not torch.equal(ends[0], start)
    exact = method.removesuffix(", bfloat16")
    if exact != method:
        [other, *_] = simulate_ranks(4, race, exact)
        assert 0 < float((ends[0] - other).abs().max()) < 2**-8
