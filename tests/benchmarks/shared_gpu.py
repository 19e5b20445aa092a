"""Time ranks that share a device: simulated ranks in turns, and all ranks' products as one.

python -m tests.benchmarks.shared_gpu [--device cuda] [--ranks 1 8 64] [--rounds 5] [--json]

First the frames/s of BMUF's ranks against those of one rank, by `training.simulation`: on a GPU
each rank has a CUDA stream. Then what stacking would save, forwards and backwards: each rank's
weights in one tensor, and one batched product (torch.baddbmm) for all ranks instead of one for
each. `lstm layer` has the student's shape, 768 units on 64 chunks of 32 frames; `classifier` is the
network of the papers' tables, on 64 frames. On a CPU the process's own time counts.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tests.benchmarks.measure import Figure, interleaved, ratios, show
from training.simulation import CPU, Training, simulate
from training.trainers import Bmuf

NUM_STEPS, NUM_GPU_STEPS, BLOCK_SIZE = 8, 100, 4
"""On a GPU each rank's stream begins with memory of its own, which few steps would not hide."""
# Inputs, units, outputs, and the frames of a minibatch: chunks and frames of each.
CLASSIFIER, CLASSIFIER_FRAMES = (320, 48, 200), 64
LSTM_UNITS, NUM_CHUNKS, CHUNK_FRAMES = 768, 64, 32


class LstmLayer(nn.Module):
    """LstmLayer is one of the student's; its loss is the mean square of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(LSTM_UNITS, LSTM_UNITS, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(features)[0]
        return outputs


def classifier() -> nn.Module:
    """Make the papers' tables' network of one hidden layer."""
    inputs, units, outputs = CLASSIFIER
    return nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, outputs))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (classifier, (CLASSIFIER_FRAMES, CLASSIFIER[0])),
    "lstm layer": (LstmLayer, (NUM_CHUNKS, CHUNK_FRAMES, LSTM_UNITS)),
}


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the process's own time on a CPU, where other work runs beside, and time on a GPU."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def training_of(name: str, num_steps: int) -> Training[Tensor]:
    """Return training steps of a model on noise."""
    make_model, shape = MODELS[name]

    def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Tensor]:
        del epoch, rank, num_ranks
        for _ in range(num_steps):
            yield torch.randn(shape)

    return Training(
        make_model,
        _sgd,
        minibatches,
        lambda model, inputs: model(inputs).square().mean(),
        lambda model: float(next(model.parameters()).detach().sum()),  # waits for the device
        (1e-3,),
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def speeds(name: str, numbers: list[int], device: torch.device, num_rounds: int) -> list[Figure]:
    """Return frames/s of each number of ranks, relative to those of the first number."""
    training = training_of(name, NUM_STEPS if device.type == "cpu" else NUM_GPU_STEPS)
    trained = {
        str(number): partial(
            simulate, training, number, partial(Bmuf, block_size=BLOCK_SIZE), device
        )
        for number in numbers
    }
    trained[str(numbers[0])]()  # the first makes memory
    seconds = interleaved(trained, num_rounds, clock_of(device))
    first, *_ = numbers
    return [
        Figure.of(
            f"{name}: {number} ranks, frames/s against {first}",
            [ratio * number / first for ratio in ratios(seconds[str(first)], seconds[str(number)])],
            "",
        )
        for number in numbers
    ]


def stacked_classifier(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """Apply each rank's network to its inputs, (ranks, frames, inputs)."""
    first, first_bias, second, second_bias = weights
    hidden = torch.baddbmm(first_bias, inputs, first).relu()
    return torch.baddbmm(second_bias, hidden, second)


def stacked_lstm(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """Apply each rank's LSTM layer to its inputs, (ranks, chunks x frames, inputs)."""
    of_inputs, of_outputs, bias = weights
    num_ranks = len(inputs)
    projected = torch.baddbmm(bias, inputs, of_inputs)
    frames = projected.view(num_ranks, NUM_CHUNKS, CHUNK_FRAMES, -1).unbind(2)
    output = inputs.new_zeros(num_ranks, NUM_CHUNKS, LSTM_UNITS)
    cell, outputs = torch.zeros_like(output), []
    for frame in frames:
        gates = torch.baddbmm(frame, output, of_outputs)
        into, forget, new, out = gates.chunk(4, dim=2)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        output = out.sigmoid() * cell.tanh()
        outputs.append(output)
    return torch.stack(outputs, 2)


def stacked_step(name: str, num_ranks: int, device: torch.device) -> Callable[[], None]:
    """Return forward and backward of all ranks by batched products."""
    inputs, units, outputs = CLASSIFIER
    shapes, of_inputs, forward = {
        "classifier": (
            [(inputs, units), (1, units), (units, outputs), (1, outputs)],
            (CLASSIFIER_FRAMES, inputs),
            stacked_classifier,
        ),
        "lstm layer": (
            [(LSTM_UNITS, 4 * LSTM_UNITS), (LSTM_UNITS, 4 * LSTM_UNITS), (1, 4 * LSTM_UNITS)],
            (NUM_CHUNKS * CHUNK_FRAMES, LSTM_UNITS),
            stacked_lstm,
        ),
    }[name]
    weights = [
        (0.02 * torch.randn(num_ranks, *shape, device=device)).requires_grad_() for shape in shapes
    ]
    features = torch.randn(num_ranks, *of_inputs, device=device)

    def step() -> None:
        for each in weights:
            each.grad = None
        forward(features, weights).square().mean().backward()
        _wait(device)

    return step


def separate_steps(name: str, num_ranks: int, device: torch.device) -> Callable[[], None]:
    """Return forward and backward of one rank after the other, as torch's layers do them."""
    make_model, shape = MODELS[name]
    models = [make_model().to(device) for _ in range(num_ranks)]
    features = [torch.randn(shape, device=device) for _ in range(num_ranks)]

    def steps() -> None:
        for model, values in zip(models, features, strict=True):
            model.zero_grad()
            model(values).square().mean().backward()
        _wait(device)

    return steps


def savings(name: str, num_ranks: int, device: torch.device, num_rounds: int) -> list[Figure]:
    """Return the time of separate steps against that of stacked ones."""
    functions = {
        "separate": separate_steps(name, num_ranks, device),
        "stacked": stacked_step(name, num_ranks, device),
    }
    for function in functions.values():
        function()  # the first makes memory
    seconds = interleaved(functions, num_rounds, clock_of(device))
    quotients = ratios(seconds["separate"], seconds["stacked"])
    each = [1e3 * value / num_ranks for value in seconds["separate"]]
    return [
        Figure.of(f"{name}: {num_ranks} ranks stacked, speed against separate", quotients, ""),
        Figure.of(f"{name}: one of {num_ranks} separate steps", each, "ms"),
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=CPU)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        many = [number for number in arguments.ranks if number > 1]
        found = speeds(name, arguments.ranks, arguments.device, arguments.rounds)
        for number in many:
            found += savings(name, number, arguments.device, arguments.rounds)
        show(f"{name} on {arguments.device}", found, arguments.json)
