"""Model parallelism: a split model computes and trains what the whole one does, in fits too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from infra.settings import ConfigurationError
from pipeline.filterbank import NUM_INPUTS
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.training.trainers.ranks import RankPool
from tests.whole_path.processes import TINY
from training.distributed.collectives import Traffic
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit, sequence_fit, sibling_fits, student_fit
from training.model_parallel import ParallelRanks, merged_state, split_model
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig, check_ranks, read_recipe
from training.trainers import OneBit, Synchronous

pytestmark = pytest.mark.chaos

NUM_SENONES = 7


def feed_forward() -> nn.Module:
    """Return a network whose units do not divide evenly."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, 9),
        nn.Sigmoid(),
        nn.Linear(9, 6),
        nn.Tanh(),
        nn.Linear(6, NUM_SENONES),
    )


def student() -> nn.Module:
    """Return an LSTM student of two layers."""
    torch.manual_seed(1)
    return LstmModel(LstmConfig(2, 5, False, 3, 0.0), NUM_SENONES)


MODELS: dict[str, Callable[[], nn.Module]] = {"feed-forward": feed_forward, "student": student}


def minibatch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    frames = torch.randn(3, 8, NUM_INPUTS, generator=generator)
    return frames, torch.randint(NUM_SENONES, (3, 8), generator=generator)


def loss_of(model: nn.Module, frames: Tensor, labels: Tensor) -> Tensor:
    logits = model(frames).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 24


def logits_and_gradients(group: ProcessGroup, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a split model's logits, and its gradients in the places of the whole one's."""
    part = split_model(MODELS[name](), group)
    frames, labels = minibatch(0, 0)
    loss_of(part, frames, labels).backward()
    logits = part(frames).detach()
    with torch.no_grad():
        for parameter in part.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return logits, merged_state(part, group)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_split_model_equals_the_whole_one(name: str, num_ranks: int) -> None:
    """Logits and gradients agree to float32's precision, and each rank has the same logits."""
    whole = MODELS[name]()
    frames, labels = minibatch(0, 0)
    loss_of(whole, frames, labels).backward()
    parts = simulate_ranks(num_ranks, logits_and_gradients, name)
    for logits, gradients in parts:
        assert torch.equal(logits, parts[0][0])
        torch.testing.assert_close(logits, whole(frames).detach(), atol=1e-6, rtol=1e-5)
        for parameter_name, parameter in whole.named_parameters():
            expected = parameter.grad
            torch.testing.assert_close(gradients[parameter_name], expected, atol=1e-7, rtol=1e-4)


def train_split(group: ProcessGroup, name: str) -> tuple[dict[str, Tensor], int]:
    """Train on 2 nodes of 2 ranks; return the merged model, and a rank's parameters."""
    ranks = ParallelRanks.of(group, 2)
    part = split_model(MODELS[name](), ranks.model)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.9)
    with Synchronous(part, optimizer, group=ranks.data):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(part, *minibatch(step, ranks.data.rank())).backward()
            optimizer.step()
    num_own = sum(parameter.numel() for parameter in part.parameters())
    return merged_state(part, ranks.model), num_own


@pytest.mark.parametrize("name", sorted(MODELS))
def test_two_nodes_of_two_ranks_train_one_model(rank_pool: RankPool, name: str) -> None:
    """2 x 2 ranks, real and simulated alike bit for bit, train what one process does.

    A rank holds about half of the parameters.
    """
    whole = MODELS[name]()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.2, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for node in range(2):
            loss_of(whole, *minibatch(step, node)).backward()
        optimizer.step()
    simulated = simulate_ranks(4, train_split, name)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    for (state, num_own), (other, _) in zip(
        simulated, rank_pool.run(4, train_split, name), strict=True
    ):
        assert num_own < 0.6 * num_parameters
        for parameter_name, tensor in whole.state_dict().items():
            torch.testing.assert_close(state[parameter_name], tensor, atol=2e-6, rtol=1e-4)
            assert torch.equal(state[parameter_name], other[parameter_name])


def without_biases() -> nn.Module:
    """Return a feed-forward network of weights alone, all of whose columns are of one unit."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, 9, bias=False), nn.Sigmoid(), nn.Linear(9, NUM_SENONES, bias=False)
    )


def train_split_by_one_bit(
    group: ProcessGroup, make_model: Callable[[], nn.Module], num_parts: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Train by 1-bit SGD among the ranks that hold the same units; the merged model and losses."""
    ranks = ParallelRanks.of(group, num_parts)
    part = split_model(make_model(), ranks.model)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    losses = []
    with OneBit(part, optimizer, group=ranks.data, momentum=0.5):
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(part, *minibatch(0, ranks.data.rank()))
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    return merged_state(part, ranks.model), losses


def test_one_bit_sgd_of_parts_is_that_of_whole_models() -> None:
    """2 x 2 ranks train what two ranks of whole models do: a part has whole columns of weights."""
    (whole, _), *_ = simulate_ranks(2, train_split_by_one_bit, without_biases, 1)
    for state, _ in simulate_ranks(4, train_split_by_one_bit, without_biases, 2):
        for name, tensor in whole.items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-3)


def bytes_of_a_step(group: ProcessGroup) -> int:
    part = split_model(feed_forward(), group)
    traffic = Traffic()
    with traffic.counting([group]):
        loss_of(part, *minibatch(0, 0)).backward()
    return traffic.num_bytes


def test_ranks_exchange_activations_alone() -> None:
    """Of 24 frames, two ranks send their own units forward, and the other's gradients back.

    Of 9, 6 and 7 units the first rank has 4, 3 and 3; the last layer's gradients stay.
    """
    forward, back = (4 + 3 + 3, 5 + 3 + 4), (5 + 3, 4 + 3)
    expected = [4 * 24 * (there + here) for there, here in zip(forward, back, strict=True)]
    assert simulate_ranks(2, bytes_of_a_step) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "layer 1, LayerNorm: need a linear"),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), "layer 0, ReLU: need a linear layer first"),
        (nn.Linear(4, 4), "model parallelism of a Linear: need an nn.Sequential"),
        (nn.Sequential(nn.Linear(4, 1)), "a layer of 1 units on 2 ranks: need one for each"),
    ],
)
def test_refuses_models_that_it_cannot_split(model: nn.Module, message: str) -> None:
    """A layer that sees all units at once, and too few units, are refused by name."""
    with pytest.raises(ValueError, match=message):
        simulate_ranks(2, split, model)


def split(group: ProcessGroup, model: nn.Module) -> None:
    split_model(model, group)


EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)
PLAIN_SGD = 'student.optimizer={ name = "sgd", momentum = 0.0 }'


def divided(trainer: str, num_parts: int = 2, num_layers: int = 1, dropout: float = 0.0) -> Fit:
    """An LSTM of one layer of nine units; gradients are clipped in every step.

    Each frame is an exchange, so that more of layers or steps would take a minute.
    """
    what = small_fit(trainer, True, checkpoints=EVERY_STEP, minibatch_frames=64)
    return replace(
        what,
        model=LstmConfig(num_layers, 9, bidirectional=False, look_ahead=1, dropout=dropout),
        training=replace(what.training, max_gradient_norm=0.01, model_parallel_ranks=num_parts),
        sub_epochs=what.sub_epochs[:2],
    )


@pytest.mark.parametrize("trainer", ["synchronous", "bmuf"])
def test_two_nodes_of_two_ranks_train_what_two_ranks_do(tmp_path: Path, trainer: str) -> None:
    """Losses are those of whole models on two ranks, clipped by the whole norm; one model is left.

    1-bit SGD's are near, as a part's biases are quantized apart: without biases they
    are equal, as the tests above state.
    """
    curves = []
    for num_ranks, num_parts in ((2, 1), (4, 2)):
        folder = tmp_path / str(num_ranks)
        write_run(folder)
        results = simulate_ranks(num_ranks, fit, folder, divided(trainer, num_parts))
        assert len({model for _, model in results}) == 1
        curves.append(results[0][0].statistics["curve"])
    for whole, split in zip(*curves, strict=True):
        assert split["num_frames"] == whole["num_frames"]
        assert split["cross_entropy"] == pytest.approx(whole["cross_entropy"], rel=2e-4)


def test_other_numbers_of_ranks_resume(tmp_path: Path) -> None:
    """Four ranks from a step of four bitwise, with dropout; 2 and 6 resharded, each frame once."""
    what = divided("one_bit", num_layers=2, dropout=0.1)
    write_run(tmp_path / "whole")
    expected = simulate_ranks(4, fit, tmp_path / "whole", what)
    curve = expected[0][0].statistics["curve"]
    # The first step that is kept: what is left of the training differs with the number of ranks.
    step = steps_saved(tmp_path / "whole", what)[0]
    for num_ranks in (4, 2, 6):
        stopped = tmp_path / f"stopped-{num_ranks}"
        copy_stopped(tmp_path / "whole", what, step, stopped)
        results = simulate_ranks(num_ranks, fit, stopped, what)
        assert len({model for _, model in results}) == 1
        found = results[0][0].statistics["curve"]
        assert [point["num_frames"] for point in found] == [p["num_frames"] for p in curve]
        assert (results[0][1] == expected[0][1]) == (num_ranks == 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("student.model_parallel_ranks=0",), r"model_parallel_ranks = 0: need 1\.\.64"),
        (("models.student.num_units=1",), "= 2: need at most 1, models.student.num_units"),
        (('student.precision="bfloat16"',), "precision = 'bfloat16': need 'float32'"),
    ],
)
def test_a_recipe_names_what_cannot_be_divided(settings: tuple[str, ...], message: str) -> None:
    """The value and the remedy, when the recipe is read."""
    with pytest.raises(ConfigurationError, match=message):
        read_recipe(
            str(TINY), ["student.model_parallel_ranks=2", *settings], {"student": "synchronous"}
        )


def test_a_trainer_of_groups_is_refused() -> None:
    """HTM divides the ranks itself."""
    with pytest.raises(ConfigurationError, match="trainer 'htm' divides ranks into groups itself"):
        read_recipe(str(TINY), ["student.model_parallel_ranks=2"], {"student": "htm"})


def test_the_check_of_a_recipe_counts_ranks() -> None:
    """Three ranks are no multiple of two; four are two copies of the model."""
    settings = ["student.model_parallel_ranks=2", PLAIN_SGD]
    recipe = read_recipe(str(TINY), settings, {"student": "one_bit"})
    check_ranks(recipe.student, "student", 4, 4)
    with pytest.raises(ConfigurationError, match="model_parallel_ranks = 2: need a divisor of 3"):
        check_ranks(recipe.student, "student", 3, 3)


def test_the_student_alone_is_divided() -> None:
    """Not its sMBR training, nor the bidirectional siblings of later rounds of targets."""
    settings = ["student.model_parallel_ranks=2", "targets.rounds=2"]
    recipe = read_recipe(str(TINY), settings, {"student": "synchronous"})
    student = student_fit(recipe)
    assert student.training.model_parallel_ranks == 2
    assert sequence_fit(recipe, student).training.model_parallel_ranks == 1
    assert [each.training.model_parallel_ranks for each in sibling_fits(recipe)] == [1]
    assert "model_parallel_ranks" not in student_fit(read_recipe(str(TINY))).config
