"""Time a training step by minibatch, precision and threads: what a core or two can give.

`python -m tests.benchmarks.cpu_steps [--threads N] [--rounds N] [--clock C] [--json]`. Steps are
the jobs' own, without a trainer, on minibatches of chunks in memory, of which every third is half
padding. With two threads the clock must be `wall`, on a machine that does nothing else: compare one
rank's frames a second with twice those of one thread.
"""

import argparse
from collections.abc import Callable

import torch

from tests.benchmarks.cpu_training import CLOCKS, NUM_SENONES
from tests.benchmarks.measure import Figure, interleaved, show
from training.data.minibatch import Minibatch
from training.data.row_order import CHUNK_FRAMES
from training.data.targets import HardTargets
from training.fit.model_specs import LoopConfig
from training.fit.steps import GradientNorms, take_steps
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig
from training.settings.trainers import AdamConfig
from training.settings.values import Precision
from training.trainers.registry import make_optimizer

MODELS = {
    "student 2 x 160": LstmConfig(2, 160, False, 3, 0.1),
    "student 2 x 256": LstmConfig(2, 256, False, 3, 0.2),
    "teacher 2 x 160": LstmConfig(2, 160, True, 0, 0.3),
}
MINIBATCH_FRAMES = (256, 512, 1024, 2048)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
STEPS = 4


def steps_of(
    config: LstmConfig, num_frames: int, precision: Precision
) -> tuple[int, Callable[[], object]]:
    """Return how many frames some steps have, padding left out, and what takes them."""
    num_chunks = num_frames // CHUNK_FRAMES
    lengths = torch.full((num_chunks,), CHUNK_FRAMES)
    lengths[::3] //= 2
    labels = torch.randint(NUM_SENONES, (num_chunks, CHUNK_FRAMES))
    labels[torch.arange(CHUNK_FRAMES) >= lengths.unsqueeze(1)] = -1
    minibatch = Minibatch(torch.randn(num_chunks, CHUNK_FRAMES, 192), lengths, HardTargets(labels))
    model = LstmModel(config, NUM_SENONES)
    optimizer = make_optimizer(AdamConfig(), model.parameters())
    loop, norms = LoopConfig(num_frames, 1.0, precision=precision), GradientNorms(0, 0)
    given = [minibatch] * STEPS
    return STEPS * minibatch.num_frames, lambda: list(
        take_steps(model, optimizer, iter(given), STEPS, loop, norms)
    )


def main() -> None:
    """Measure all models by turns and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="thread")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = []
    for name, config in MODELS.items():
        forms = [(frames, form) for frames in MINIBATCH_FRAMES for form in PRECISIONS]
        steps = {f"{name}, {f} frames, {p}": steps_of(config, f, p) for f, p in forms}
        functions = {key: function for key, (_, function) in steps.items()}
        for function in functions.values():
            function()
        seconds = interleaved(functions, arguments.rounds, CLOCKS[arguments.clock])
        for key, values in seconds.items():
            speeds = [steps[key][0] / each for each in values]
            found.append(Figure.of(key, speeds, "frames/s"))
    show(f"a step, {arguments.threads} threads, {arguments.clock} clock", found, arguments.json)


if __name__ == "__main__":
    main()
