"""AD-PSGD: pairs average whenever they can, on simulated ranks in virtual time and on real ones."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.training.trainers.decentralized.mixing_runs import SEED, TRAINERS, Quadratics, Vector
from tests.training.trainers.ranks import RankPool
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.tensor_encoding import decode_state, encode_state
from training.trainers import AdPsgd
from training.trainers.decentralized import ConcurrentModel, OwnModels
from training.trainers.trainer import State, Statistics

LINK = SimulatedLink(latency_s=0.05)
NUM_STEPS = 12


def train(
    group: SimulatedGroup, step_s: list[float], rate: float, max_staleness: int = 16
) -> tuple[Tensor, Tensor, Statistics, float]:
    """Return a rank's model before leaving and after, its counts, and its steps' seconds."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = AdPsgd(model, optimizer, group=group, mixing_seed=SEED, max_staleness=max_staleness)
    with trainer:
        start = group.now()
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            group.advance(step_s[group.rank()])
            optimizer.step()
        seconds, own = group.now() - start, trainer.own_model()
    statistics = trainer.statistics()
    return own, model.weights.detach(), statistics, seconds


@settings(max_examples=5)
@given(st.lists(st.sampled_from([0.1, 0.3, 1.0, 7.0]), min_size=1, max_size=6), st.integers(1, 3))
def test_any_ranks_finish_and_agree(step_s: list[float], max_staleness: int) -> None:
    """However fast or slow ranks are, none waits for ever; all leave with the same model.

    No step of any rank is staler than the bound, and a repetition has the same bits.
    """
    run = partial(simulate_ranks, len(step_s), train, step_s, 0.05, max_staleness, link=LINK)
    ranks = run()
    for _, left, statistics, _ in ranks:
        assert torch.equal(left, ranks[0][1])
        assert statistics["max_staleness"] <= max_staleness
        assert statistics["mean_staleness"] <= statistics["max_staleness"]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(ranks, run(), strict=True))


def test_no_rank_waits_for_a_slow_one() -> None:
    """Beside a rank whose steps take 100 s, the others take theirs of 1 s in 12 s."""
    ranks = simulate_ranks(4, train, [1.0, 100.0, 1.0, 1.0], 0.05, link=LINK)
    assert [seconds for *_, seconds in ranks] == pytest.approx([12.0, 1200.0, 12.0, 12.0])


def test_a_slow_rank_is_busy_rather_than_stale() -> None:
    """A slow passive rank takes part in as many exchanges a step as its bound, and declines more.

    Its two neighbours make 11 offers each in its first step; with room for all it declines none.
    """
    counts = {
        bound: simulate_ranks(4, train, [1.0, 100.0, 1.0, 1.0], 0.05, bound, link=LINK)[1][2]
        for bound in (2, 50)
    }
    assert counts[2]["max_staleness"] == 2
    assert counts[2]["num_busy"] > 0
    assert counts[50]["max_staleness"] > 2
    assert counts[50]["num_busy"] == 0


def count_by_step(group: SimulatedGroup, step_s: list[float]) -> tuple[list[int], list[Statistics]]:
    """Enter twice; return the exchanges between each two steps, and the counts after each step."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = AdPsgd(model, optimizer, group=group, mixing_seed=SEED)
    exchanges, found = [], []
    for _ in range(2):
        with trainer:
            before = num_exchanges_of(trainer)
            for _ in range(NUM_STEPS):
                model.weights.grad = torch.zeros_like(model.weights)
                group.advance(step_s[group.rank()])
                optimizer.step()
                counts = trainer.statistics()
                exchanges.append(counts["num_exchanges"] - before)
                before = counts["num_exchanges"]
                found.append(counts)
    return exchanges, found


def test_a_steps_staleness_is_the_exchanges_since_the_step_before() -> None:
    """Those after the last step are not of the next entry's first, whose weights are read later."""
    ranks = simulate_ranks(4, count_by_step, [1.0, 4.5, 1.0, 0.25], link=LINK)
    for exchanges, found in ranks:
        for num_steps, counts in enumerate(found, 1):
            assert counts["max_staleness"] == max(exchanges[:num_steps])
            assert counts["mean_staleness"] == pytest.approx(np.mean(exchanges[:num_steps]))
    assert {0, 1} < {each for exchanges, _ in ranks for each in exchanges}
    assert any(found[-1]["num_exchanges"] > sum(exchanges) for exchanges, found in ranks)


class TimedAdPsgd(AdPsgd):
    """TimedAdPsgd takes a virtual second a step."""

    def end_step(self) -> None:
        super().end_step()
        assert isinstance(self.group, SimulatedGroup)
        self.group.advance(1.0)


def save_within(group: ProcessGroup, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the own model of a state, the mean model asked for then, and what leaving gives."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = TRAINERS["ad_psgd"](model, optimizer, group=group)
    with trainer:
        for step in range(num_steps):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            optimizer.step()
        saved = trainer.state_dict()["own_model"]["weights"]
        mean_model = trainer.mean_model()["weights"]
    return saved, mean_model, model.weights.detach()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_state_is_of_one_moment(rank_pool: RankPool, num_ranks: int) -> None:
    """On real ranks the saved models' mean is that of leaving, as no exchange is half done."""
    ranks = rank_pool.run(num_ranks, save_within, 25)
    saved = torch.stack([own for own, *_ in ranks]).mean(0)
    for _, mean_model, left in ranks:
        torch.testing.assert_close(saved, left, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(mean_model, left, rtol=1e-13, atol=1e-14)


@dataclass(frozen=True)
class Asked:
    """Asked is a rank's steps when it asked for the mean, the mean, and what went on meanwhile."""

    steps: Tensor
    mean_model: Tensor
    at_s: float
    num_exchanges: int
    seconds: float


def ask_between(group: SimulatedGroup, step_s: list[float], num_asked: int) -> Asked:
    """Start the mean after some steps, train on, and wait for it at the end."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = AdPsgd(model, optimizer, group=group, mixing_seed=SEED)
    steps = torch.zeros_like(model.weights.detach())
    pending, asked, num_before, at_s = None, steps, 0, -1.0
    with trainer:
        start = group.now()
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            group.advance(step_s[group.rank()])
            optimizer.step()
            assert model.weights.grad is not None
            steps = steps - 0.05 * model.weights.grad
            if step + 1 == num_asked:
                pending, asked = trainer.start_mean_model(), steps
                num_before = num_exchanges_of(trainer)
        assert pending is not None
        seconds, num_since = group.now() - start, num_exchanges_of(trainer) - num_before
        mean_model, at_s = pending.wait()["weights"], group.now() - start
    return Asked(asked, mean_model, at_s, num_since, seconds)


def num_exchanges_of(trainer: AdPsgd) -> int:
    statistics = trainer.statistics()
    return statistics["num_exchanges"]


STEP_S = ([1.0, 1.0, 1.0, 1.0], [1.0, 20.0, 1.0, 2.0, 1.0, 1.0])


@pytest.mark.parametrize("step_s", STEP_S)
@pytest.mark.parametrize("num_asked", [1, 5, 11])
def test_the_mean_is_of_all_steps_that_ranks_had_applied(
    step_s: list[float], num_asked: int
) -> None:
    """It is the first model and the mean of the ranks' own steps when each asked, to 1e-13.

    Exchanges are half done at these moments; the mean of the models as they lay there would be off.
    """
    ranks = simulate_ranks(len(step_s), ask_between, step_s, num_asked, link=LINK)
    expected = 1 + torch.stack([each.steps for each in ranks]).mean(0)
    for each in ranks:
        torch.testing.assert_close(each.mean_model, expected, rtol=1e-13, atol=1e-14)


def test_ranks_exchange_while_the_mean_is_under_way() -> None:
    """A rank of 20 s a step brings its model after 100 s; the fast ones have ended 12 steps of 1 s.

    They have averaged with others since they asked, and waited for no rank but at the end.
    """
    step_s = STEP_S[1]
    ranks = simulate_ranks(len(step_s), ask_between, step_s, 5, link=LINK)
    assert [each.seconds for each in ranks] == pytest.approx([NUM_STEPS * each for each in step_s])
    fast = [each for each, seconds in zip(ranks, step_s, strict=True) if seconds == 1.0]
    assert all(each.num_exchanges > 0 for each in fast)
    assert all(each.at_s > 5 * max(step_s) > each.seconds for each in fast)


def save_and_resume(group: SimulatedGroup, num_before: int) -> list[tuple[Tensor, Any]]:
    """Stop after some steps, resume from the state in new objects; both own models and counts."""
    found = []
    state: dict[str, Any] = {}
    for num_steps in (num_before, 0):
        model = Vector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = TimedAdPsgd(model, optimizer, group=group, mixing_seed=SEED)
        if state:
            trainer.load_state_dict(state)
        with trainer:
            for step in range(num_steps):
                optimizer.zero_grad()
                Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
                optimizer.step()
            state = trainer.state_dict()
            counts = state["num_offers"], state["exchanges"]
            found.append((trainer.own_model(), counts))
            assert torch.equal(model.weights.detach(), found[-1][0]) or num_steps > 0
    return found


def test_resumes_with_the_models_it_saved() -> None:
    """Every rank continues from its own model, with the counts of its exchanges."""
    ranks = simulate_ranks(4, save_and_resume, 7, link=LINK)
    for (before, counts), (after, resumed) in ranks:
        assert torch.equal(before, after)
        assert resumed == counts
    offers, exchanges = zip(*(counts for (_, counts), _ in ranks), strict=True)
    assert sum(offers) > 0
    assert all(each["num_exchanges"] > 0 for each in exchanges)


def test_a_step_is_applied_where_the_model_has_moved_to() -> None:
    """x moves by the exchange and by the step, whichever was first, to float64's precision."""
    concurrent = ConcurrentModel(torch.tensor([1.0, 2.0], dtype=torch.float64), 2)
    read = concurrent.step(concurrent.snapshot())
    answer = concurrent.answer(torch.tensor([3.0, 2.0], dtype=torch.float64))
    assert answer is not None
    assert answer.tolist() == [1.0, 2.0]
    assert concurrent.step(read - 0.25).tolist() == [1.75, 1.75]
    assert concurrent.counts.largest == 1


NUM_OLD, NUM_SAVED = 4, 7


def make(group: SimulatedGroup) -> tuple[Vector, torch.optim.SGD, AdPsgd]:
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return model, optimizer, AdPsgd(model, optimizer, group=group, mixing_seed=SEED)


def take_steps(parts: tuple[Vector, torch.optim.SGD, OwnModels], num_steps: int) -> None:
    model, optimizer, trainer = parts
    assert isinstance(trainer.group, SimulatedGroup)
    for _ in range(num_steps):
        optimizer.zero_grad()
        Quadratics(SEED).loss(model.weights, trainer.group.rank(), trainer.num_steps).backward()
        trainer.group.advance(1.0 + trainer.group.rank() / 8)
        optimizer.step()


def save(group: SimulatedGroup) -> tuple[bytes, Tensor, Tensor]:
    """Return a state within the training, the rank's own model in it, and what leaving gives."""
    parts = make(group)
    with parts[2]:
        take_steps(parts, NUM_SAVED)
        state, own = encode_state(whole_state(*parts)), parts[2].own_model()
    return state, own, parts[0].weights.detach()


def leave(group: SimulatedGroup, name: str) -> State:
    """Return the state after some steps and leaving."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    trainer = TRAINERS[name](model, optimizer, group=group)
    with trainer:
        take_steps((model, optimizer, trainer), 4)
    return whole_state(model, optimizer, trainer)


def resume(group: SimulatedGroup, states: list[State]) -> tuple[int, Tensor, Statistics]:
    """Return the offers and the counts of three more steps, and the model that leaving gives."""
    parts = make(group)
    load_whole_state(states[group.rank()], *parts)
    with parts[2]:
        take_steps(parts, 3)
        statistics = parts[2].statistics()
    return parts[2].num_offers, parts[0].weights.detach(), statistics


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_other_ranks_have_the_mean_moments_of_ranks_that_left(name: str) -> None:
    """Leaving gives all ranks one model, but each keeps its optimizer's moments."""
    left = simulate_ranks(NUM_OLD, leave, name)
    moments = torch.stack([each["optimizer"]["state"][0]["momentum_buffer"] for each in left])
    assert float((moments - moments[0]).abs().max()) > 1e-3
    state = reshard(left, NUM_OLD, 0, 2, getattr(TRAINERS[name], "func", TRAINERS[name]))
    moment = state["optimizer"]["state"][0]["momentum_buffer"]
    torch.testing.assert_close(moment, moments.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_new", [1, 3, 6])
def test_other_ranks_begin_from_the_mean_of_all_models(num_new: int) -> None:
    """It is what leaving gives; moments are averaged; exchanges and offers are counted from 0."""
    ends = simulate_ranks(NUM_OLD, save, link=LINK)
    owns = torch.stack([own for _, own, _ in ends])
    assert float((owns - owns.mean(0)).abs().max()) > 1e-3
    old = [decode_state(state) for state, _, _ in ends]
    moments = torch.stack([each["optimizer"]["state"][0]["momentum_buffer"] for each in old])
    states = [reshard(old, NUM_OLD, rank, num_new, AdPsgd) for rank in range(num_new)]
    for state in states:
        torch.testing.assert_close(state["model"]["weights"], owns.mean(0), rtol=0, atol=1e-14)
        torch.testing.assert_close(state["model"]["weights"], ends[0][2], rtol=0, atol=1e-13)
        moment = state["optimizer"]["state"][0]["momentum_buffer"]
        torch.testing.assert_close(moment, moments.mean(0), rtol=0, atol=1e-14)
        assert not any(state["trainer"]["exchanges"].values())
        assert state["trainer"]["num_offers"] == 0
        assert state["trainer"]["num_steps"] == NUM_SAVED
    resumed = simulate_ranks(num_new, resume, states, link=LINK)
    assert all(torch.equal(model, resumed[0][1]) for _, model, _ in resumed)
    # An active rank with a neighbour offers again, from the first of the new ranks' exchanges on.
    is_offering = [rank % 2 == 0 and num_new > 1 for rank in range(num_new)]
    assert [offers > 0 for offers, *_ in resumed] == is_offering
    # Each exchange makes one step staler by one; no step before resharding is in the mean.
    for *_, counts in resumed:
        assert counts["mean_staleness"] == pytest.approx(counts["num_exchanges"] / 3)
    assert any(counts["mean_staleness"] for *_, counts in resumed) == (num_new > 1)
