"""AD-PSGD on other numbers of ranks: each rank's own state becomes the mean, or starts at zero."""

import pytest
import torch
from torch import Tensor

from tests.training.trainers.decentralized.mixing_runs import SEED, Quadratics, Vector
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.tensor_encoding import decode_state, encode_state
from training.trainers import AdPsgd
from training.trainers.trainer import State, Statistics

LINK = SimulatedLink(latency_s=0.05)
NUM_OLD, NUM_STEPS = 4, 7


def make(group: SimulatedGroup) -> tuple[Vector, torch.optim.SGD, AdPsgd]:
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return model, optimizer, AdPsgd(model, optimizer, group=group, mixing_seed=SEED)


def take_steps(parts: tuple[Vector, torch.optim.SGD, AdPsgd], num_steps: int) -> None:
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
        take_steps(parts, NUM_STEPS)
        state, own = encode_state(whole_state(*parts)), parts[2].own_model()
    return state, own, parts[0].weights.detach()


def resume(group: SimulatedGroup, states: list[State]) -> tuple[int, Tensor, Statistics]:
    """Return the offers and the counts of three more steps, and the model that leaving gives."""
    parts = make(group)
    load_whole_state(states[group.rank()], *parts)
    with parts[2]:
        take_steps(parts, 3)
        statistics = parts[2].statistics()
    return parts[2].num_offers, parts[0].weights.detach(), statistics


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
        assert state["trainer"]["num_steps"] == NUM_STEPS
    resumed = simulate_ranks(num_new, resume, states, link=LINK)
    assert all(torch.equal(model, resumed[0][1]) for _, model, _ in resumed)
    # An active rank with a neighbour offers again, from the first of the new ranks' exchanges on.
    is_offering = [rank % 2 == 0 and num_new > 1 for rank in range(num_new)]
    assert [offers > 0 for offers, *_ in resumed] == is_offering
    # Each exchange makes one step staler by one; no step before resharding is in the mean.
    for *_, counts in resumed:
        assert counts["mean_staleness"] == pytest.approx(counts["num_exchanges"] / 3)
    assert any(counts["mean_staleness"] for *_, counts in resumed) == (num_new > 1)
