"""One's own loop with one's own model: the whole state in checkpoints, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from infra.store.object_store import ObjectStore
from tests.training.trainers.ranks import minibatch, sgd, small_model, take_step, weights
from training.checkpoints import training_state
from training.checkpoints.checkpointer import Checkpointer
from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Bmuf, Gtc, Htm
from training.trainers.trainer import State

NUM_STEPS = 6


def train(group: ProcessGroup, folder: Path, stop_after: int = NUM_STEPS) -> torch.Tensor:
    """A loop with dropout, momentum and a schedule of the learning rate, saved at every step."""
    model = nn.Sequential(small_model(), nn.Dropout(0.2))
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer = Htm(
        model, optimizer, group=group, group_size=2, block_size=3, gradient_threshold=1 / 64
    )
    checkpoints = Checkpointer(ObjectStore((str(folder),)), str(folder), "mine", group, 100)
    if (state := checkpoints.restore(Htm)) is not None:
        load_whole_state(state, model, optimizer, trainer)
        schedule.load_state_dict(state["schedule"])
    with trainer:
        while trainer.num_steps < stop_after:
            inputs, targets = minibatch(trainer.num_steps, group.rank())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
            optimizer.step()
            schedule.step()
            state = whole_state(model, optimizer, trainer)
            checkpoints.save(trainer.num_steps, state | {"schedule": schedule.state_dict()})
    return weights(model)


def test_an_own_loop_resumes_where_it_stopped(tmp_path: Path) -> None:
    """Bitwise, from every step, mid-block too."""
    expected = simulate_ranks(4, train, tmp_path / "whole")
    for step in range(1, NUM_STEPS):
        simulate_ranks(4, train, tmp_path / str(step), step)
        # As if killed: what leaving did is lost.
        resumed = simulate_ranks(4, train, tmp_path / str(step))
        assert all(map(torch.equal, resumed, expected))


def test_an_own_loop_resumes_twice(tmp_path: Path) -> None:
    """What a resumed training saves can be resumed: the model is the undisturbed one, bitwise."""
    expected = simulate_ranks(4, train, tmp_path / "whole")
    for stop_after in (2, 4):
        simulate_ranks(4, train, tmp_path / "stopped", stop_after)
    assert all(map(torch.equal, simulate_ranks(4, train, tmp_path / "stopped"), expected))


def test_an_own_loop_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Four ranks, then two, then six: one model on all of them, and no step twice."""
    for num_ranks, num_steps in ((4, 2), (2, 4), (6, NUM_STEPS)):
        models = simulate_ranks(num_ranks, train, tmp_path, num_steps)
        assert all(torch.equal(model, models[0]) for model in models)
    records = sorted(int(path.stem) for path in tmp_path.glob("*.json"))
    assert records == list(range(1, NUM_STEPS + 1))


def load(group: ProcessGroup, make: Any, other: Any) -> None:
    states = []
    for build in (make, other):
        model = small_model()
        optimizer = sgd(model)
        trainer = build(model, optimizer, group)
        for state in states:
            load_whole_state(state, model, optimizer, trainer)
        with trainer:
            optimizer.step()
            states.append(whole_state(model, optimizer, trainer))


def test_a_checkpoint_of_another_trainer_is_refused() -> None:
    """By name, and within a block by the number of models."""

    def gtc(model: Any, optimizer: Any, group: ProcessGroup) -> Gtc:
        return Gtc(model, optimizer, group=group, gradient_threshold=1.0)

    def bmuf(model: Any, optimizer: Any, group: ProcessGroup) -> Bmuf:
        return Bmuf(model, optimizer, group=group, block_size=3)

    def htm(group_size: int) -> Any:
        return lambda model, optimizer, group: Htm(
            model,
            optimizer,
            group=group,
            group_size=group_size,
            block_size=3,
            gradient_threshold=1.0,
        )

    with pytest.raises(ValueError, match="the checkpoint is of Gtc, this trainer is Bmuf"):
        simulate_ranks(2, load, gtc, bmuf)
    with pytest.raises(ValueError, match="a block of 2 models, now there are 4: end the block"):
        simulate_ranks(4, load, htm(2), htm(1))


def drawn_after(random: State, monkeypatch: pytest.MonkeyPatch, device: str) -> tuple[str, float]:
    """Load `random` on a device; return what the GPU's generator was given, and the CPU's next."""
    given = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: given.append(bytes(state)))
    monkeypatch.setattr(torch.cuda, "manual_seed", given.append)
    training_state._restore_random(random, torch.device(device))
    return str(given), float(torch.rand(()))


def test_random_numbers_resume_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state saved on a GPU or a CPU repeats there; on the other it gives one seed for each."""
    torch.manual_seed(5)
    cpu = torch.get_rng_state()
    expected = float(torch.rand(()))
    early, late = ({"cpu": cpu, "cuda": torch.full((16,), n, dtype=torch.uint8)} for n in (1, 2))
    assert drawn_after({"cpu": cpu}, monkeypatch, "cpu") == ("[]", expected)
    assert drawn_after(early, monkeypatch, "cuda:0") == (str([b"\1" * 16]), expected)
    # From a GPU: the CPU's generator did not move, so that of the GPU must tell moments apart.
    drawn = [drawn_after(state, monkeypatch, "cpu") for state in (early, early, late)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][1] != expected
    # From a CPU, whose own numbers continue.
    seeded = [drawn_after({"cpu": cpu}, monkeypatch, "cuda:0") for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert seeded[0][1] == expected
    assert seeded[0][0] not in ("[]", drawn_after(early, monkeypatch, "cuda:0")[0])


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def compiled_in_part(model: nn.Module) -> nn.Module:
    model[2] = torch.compile(model[2])  # type: ignore[index, operator]
    return model


def train_through(group: ProcessGroup, first: Any, second: Any) -> torch.Tensor:
    """Four steps of one form of the model, then four of another, from the first one's state."""
    settings = {"group_size": 1, "block_size": 3, "gradient_threshold": 1 / 64}
    state = b""
    for form in (first, second):
        model = form(small_model())
        optimizer = sgd(model)
        trainer = Htm(model, optimizer, group=group, **settings)
        if state:
            load_whole_state(decode_state(state), model, optimizer, trainer)
        with trainer:
            for _ in range(4):
                take_step(model, optimizer, trainer.num_steps, group.rank())
            state = encode_state(whole_state(model, optimizer, trainer))
    return weights(model)


def test_compiled_models_share_checkpoints_with_plain_ones() -> None:
    """In both directions, compiled wholly or in part: the names are those of the plain model."""
    with torch.compiler.set_stance("force_eager"):
        expected = simulate_ranks(2, train_through, plain, plain)
        for forms in ((compiled, plain), (plain, compiled), (compiled, compiled_in_part)):
            assert all(map(torch.equal, simulate_ranks(2, train_through, *forms), expected))
