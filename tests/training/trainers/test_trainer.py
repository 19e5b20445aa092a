"""Entering, leaving, checkpoints and mistakes, on real ranks."""

import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import (
    TRAINERS,
    RankPool,
    all_equal,
    build,
    impatient,
    take_step,
    weights,
)
from training.distributed.process_group import CollectiveError
from training.trainers import Gtc, RandPsgd, Synchronous

NUM_STEPS = 7


def train(group: ProcessGroup, name: str) -> Tensor:
    model, optimizer, trainer = build(group, name)
    with trainer:
        for step in range(NUM_STEPS):
            take_step(model, optimizer, step, group.rank())
    return weights(model)


def train_resumed_everywhere(group: ProcessGroup, name: str) -> list[Tensor]:
    """The final models of a run that saves before every step, and of each run resumed from it."""
    parts = build(group, name)
    checkpoints = []
    with parts[2]:
        for step in range(NUM_STEPS):
            checkpoints.append(save(*parts))
            take_step(parts[0], parts[1], step, group.rank())
    checkpoints.append(save(*parts))
    finals = [weights(parts[0])]
    for done, checkpoint in enumerate(checkpoints):
        resumed = build(group, name, seed=100 + group.rank())
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for part, part_state in zip(resumed, state, strict=True):
            part.load_state_dict(part_state)
        with resumed[2]:
            for step in range(done, NUM_STEPS):
                take_step(resumed[0], resumed[1], step, group.rank())
        finals.append(weights(resumed[0]))
    return finals


def save(*parts: Any) -> bytes:
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue()


def enter_with_differences(group: ProcessGroup, what: str) -> None:
    rank = group.rank()
    model = nn.Linear(5, 4 if what == "shape" and rank == 1 else 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if what == "rate" and rank else 0.1)
    tau = 2.0 if what == "threshold" and rank else 1.0
    with Gtc(model, optimizer, group=group, gradient_threshold=tau):
        pass


def fail_in_the_body(group: ProcessGroup, name: str) -> tuple[str, float, Tensor]:
    """Rank 0 fails mid-block and leaves at once; afterwards its optimizer is its own again."""
    model, optimizer, trainer = build(impatient(), name)
    start = time.monotonic()
    message = ""
    try:
        with trainer:
            take_step(model, optimizer, 0, group.rank())
            if group.rank() == 0:
                raise ZeroDivisionError("mine")
            take_step(model, optimizer, 1, group.rank())
    except (ZeroDivisionError, CollectiveError) as error:
        message = str(error)
    waited_s = time.monotonic() - start
    before = weights(model)
    take_step(model, optimizer, 1, group.rank())
    return message, waited_s, weights(model) - before


def take_uneven_steps(group: ProcessGroup, name: str) -> None:
    model, optimizer, trainer = build(impatient(), name)
    with trainer:
        for step in range(4 + group.rank()):
            take_step(model, optimizer, step, group.rank())


def misuse(group: ProcessGroup) -> list[str]:
    model, optimizer, trainer = build(group, "bmuf")
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    take_step(model, optimizer, 0, group.rank())
    mistakes = [
        lambda: Synchronous(model, stranger, group=group),
        lambda: Synchronous(model, optimizer, group=None),
        lambda: optimizer.step(lambda: 0.0),
        trainer.__enter__,
        lambda: trainer.load_state_dict(trainer.state_dict()),
        lambda: (trainer.finish(), optimizer.step()),
        trainer.finish,
        build(group, "bmuf")[2].finish,
        lambda: RandPsgd(model, optimizer, group=group, seed=1, mixing_seed=2),
    ]
    messages = []
    with trainer:
        for mistake in mistakes:
            try:
                mistake()
                messages.append("no error")
            except (ValueError, RuntimeError) as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_resumes_bitwise_from_every_step(rank_pool: RankPool, name: str) -> None:
    """Saving changes nothing, and a run resumed from any step, mid-block too, ends bitwise same."""
    undisturbed = rank_pool.run(4, train, name)
    assert all_equal(undisturbed)
    for finals in rank_pool.run(4, train_resumed_everywhere, name):
        assert len(finals) == NUM_STEPS + 2
        assert all_equal([undisturbed[0], *finals])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"parameter weight: torch.float32 (4, 5) on rank 1, torch.float32 (3, 5) on"),
        ("rate", "'lr': 0.2"),
        ("threshold", "gradient_threshold: 2.0 on rank 1, 1.0 on rank 0"),
    ],
)
def test_refuses_ranks_that_differ(rank_pool: RankPool, what: str, message: str) -> None:
    """Every rank, not only the odd one, says which rank differs and in what."""
    for error in rank_pool.errors(2, enter_with_differences, what):
        assert message in error


@pytest.mark.parametrize("name", ["bmuf", "gtc"])
def test_an_error_leaves_at_once(rank_pool: RankPool, name: str) -> None:
    """A failing rank starts no exchange; its hooks are gone; the others end by their limit."""
    failing, other = rank_pool.run(2, fail_in_the_body, name)
    assert failing[0] == "mine"
    assert failing[1] < 1.5
    assert torch.any(failing[2] != 0)
    assert "failed on rank 1 of 2" in other[0]
    assert other[1] < 5


@pytest.mark.parametrize("name", ["synchronous", "gtc", "bmuf"])
def test_uneven_steps_end_in_an_error(rank_pool: RankPool, name: str) -> None:
    """Ranks that take different numbers of steps get an error that says so within the limit."""
    for message in rank_pool.errors(2, take_uneven_steps, name):
        assert "same number of steps" in message or "num_steps: 5 on rank 1" in message


def test_refuses_misuse(rank_pool: RankPool) -> None:
    """Each mistake is named with its remedy."""
    remedies = [
        "build both from the same model",
        "need a process group that this rank is in",
        "call backward() first",
        "entered already",
        "load before entering",
        "leave the with block and enter it again",
        "finish() twice",
        "outside of the trainer's with block",
        "seed and mixing_seed are the same setting",
    ]
    for messages in rank_pool.run(2, misuse):
        for message, remedy in zip(messages, remedies, strict=True):
            assert remedy in message
