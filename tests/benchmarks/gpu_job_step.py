"""Time the student's whole job step on one rank against a bare loop, on one device.

A job's step is the loop's own: Parquet partitions of a local store, minibatches by index, copies to
the device, loss, gradients, clipping, trainer, optimizer, totals. The bare loop has the same LSTM
by torch and cuDNN, one minibatch that is on the device already, cross-entropy, and fused Adam; in
bfloat16 its weights and moments are so, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_INPUTS
from tests.benchmarks.gpu_graphs import captured, synchronize
from tests.benchmarks.measure import Figure, ratios
from tests.benchmarks.reader import partitions
from tests.training.training_settings import training_settings
from training.data.dataset import Dataset, buffers_ahead, device_copies
from training.data.row_order import chunked_shape
from training.data.sub_epochs import SubEpoch
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.fit.steps import (
    GradientNorms,
    RunningTotals,
    compute_gradients,
    gradients_of,
    take_steps,
)
from training.models.lstm import LstmModel
from training.models.precision import set_float32_products
from training.settings.model_training import Precision
from training.settings.models import LstmConfig
from training.settings.trainers import (
    AdamConfig,
    BmufConfig,
    GtcConfig,
    SynchronousConfig,
    TrainerConfig,
)
from training.trainers.trainer import make_optimizer, make_trainer

SOFT_CHUNKS = SubEpoch(False, 0, 1, 0, False, 1e-4)
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bfloat16")
# HTM on one rank is BMUF, whose models no other rank joins.
TRAINERS: tuple[TrainerConfig, ...] = (SynchronousConfig(), GtcConfig(), BmufConfig())


@dataclass(frozen=True)
class Job:
    """Job holds a student's form and data; each of its partitions is the same object."""

    config: LstmConfig
    num_senones: int
    minibatch_frames: int
    partition_hours: float
    num_partitions: int
    num_first_steps: int

    def dataset(self, folder: str) -> Dataset:
        """Store the partition in `folder`, once."""
        form = (self.num_senones, True, "float16")
        store = ObjectStore((folder,))
        parts = partitions(store, folder, 1, self.partition_hours, *form) * self.num_partitions
        return Dataset(store, folder, (), parts, 3, self.minibatch_frames, 1, 0, 1)


PAPERS = Job(LstmConfig(5, 768, False, 3, 0.0), 3183, 2048, 2.0, 6, num_first_steps=120)
"""The 24 M parameters of 003 at the minibatch of 000; a partition has some 120 steps."""

GOALS = "goal 0.9"
GOAL_SPEEDS = "goal 1.3 M of 24 M parameters on an H100, 2 M by layer wavefront"


@dataclass(frozen=True)
class Bench:
    """Bench is where steps are timed: a job, a device, and a group of one rank."""

    job: Job
    dataset: Dataset
    device: torch.device
    group: ProcessGroup

    def bare_steps(self, precision: Precision, has_graphs: bool) -> Iterator[int]:
        """Take steps of the bare loop for ever; yield the frames of each."""
        step = bare_step(self.job, self.device, precision, has_graphs)
        step = captured(step, self.device) if has_graphs else step
        while True:
            step()
            yield self.job.minibatch_frames

    def job_steps(
        self, trainer: TrainerConfig, precision: Precision, has_graphs: bool
    ) -> Iterator[int]:
        """Take the steps of a sub-epoch as jobs do; yield the frames of each."""
        torch.manual_seed(0)
        model = LstmModel(self.job.config, self.job.num_senones).to(self.device)
        optimizer = make_optimizer(AdamConfig(), model.parameters())
        loop = training_settings(self.job.minibatch_frames, 1.0, precision=precision)
        compute = (
            gradients_of(model, loop) if has_graphs else partial(compute_gradients, model, loop)
        )
        plan = self.dataset.plan(SOFT_CHUNKS, 0)
        read = plan.minibatches(buffers_ahead=buffers_ahead(self.device))
        totals = RunningTotals()
        with (
            closing(device_copies(read, self.device)) as minibatches,
            make_trainer(trainer, model, optimizer, self.group),
        ):
            norms = GradientNorms(0, 0)
            num_steps = plan.num_minibatches()
            steps = take_steps(model, optimizer, minibatches, num_steps, loop, norms, compute)
            for result in steps:
                totals.add(result)
                yield result.num_frames

    def frames_per_s(self, steps: Iterator[int], num_steps: int) -> float:
        """Return the speed of `num_steps` steps, after the first ones."""
        for _ in range(self.job.num_first_steps):
            next(steps)
        synchronize(self.device)
        started = time.perf_counter()
        num_frames = sum(next(steps) for _ in range(num_steps))
        synchronize(self.device)
        seconds = time.perf_counter() - started
        steps.close()  # type: ignore[attr-defined]
        return num_frames / seconds


class BareModel(nn.Module):
    """BareModel is torch's LSTM and a linear layer, no more."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        num_layers, num_units = job.config.num_layers, job.config.num_units
        self.lstm = nn.LSTM(NUM_INPUTS, num_units, num_layers, batch_first=True)
        self.output = nn.Linear(num_units, job.num_senones)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.output(self.lstm(features)[0])
        return logits


def bare_step(
    job: Job, device: torch.device, precision: Precision, has_graphs: bool
) -> Callable[[], Tensor]:
    """Return the step of a bare loop, which returns its mean loss and waits for no device."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = BareModel(job).to(device, dtype)
    is_captured = has_graphs and device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=is_captured)
    shape = chunked_shape(job.minibatch_frames)
    features = torch.randn(*shape, NUM_INPUTS, device=device, dtype=dtype)
    labels = torch.randint(job.num_senones, shape, device=device).flatten()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(features).flatten(0, 1).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def figures(
    job: Job,
    device: torch.device,
    folder: str,
    num_rounds: int,
    precisions: Sequence[Precision] = PRECISIONS,
) -> list[Figure]:
    """Return frames a second of bare loops, of the reader alone and of jobs, and their ratios."""
    dataset = job.dataset(folder)
    num_steps = dataset.plan(SOFT_CHUNKS, 0).num_minibatches() - job.num_first_steps
    with process_group.open_world(device=device) as group:
        bench = Bench(job, dataset, device, group)
        in_order = [_figures_of(bench, each, num_steps, num_rounds) for each in precisions]
    return [reader_speed(dataset, device, num_rounds), *chain.from_iterable(in_order)]


def reader_speed(dataset: Dataset, device: torch.device, num_rounds: int) -> Figure:
    """Return the speed of reading alone, which no job's step can exceed."""
    speeds = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        read = dataset.plan(SOFT_CHUNKS, 0).minibatches(buffers_ahead=buffers_ahead(device))
        num_frames = sum(minibatch.num_frames for minibatch in read)
        speeds.append(num_frames / (time.perf_counter() - started))
    return Figure.of("reader alone", speeds, "frames/s")


def _figures_of(
    bench: Bench, precision: Precision, num_steps: int, num_rounds: int
) -> list[Figure]:
    set_float32_products(precision)
    kinds = ["graphs", "no graphs"] if bench.device.type == "cuda" else ["no graphs"]
    ways: dict[str, Callable[[], Iterator[int]]] = {}
    for kind in kinds:
        chosen = (precision, kind == "graphs")
        ways[f"bare, {kind}"] = partial(bench.bare_steps, *chosen)
        # Without graphs a GPU's steps are the host's launches, whatever the trainer.
        for trainer in TRAINERS if kind == kinds[0] else TRAINERS[:1]:
            ways[f"{trainer.name}, {kind}"] = partial(bench.job_steps, trainer, *chosen)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):  # by turns, so that other work slows all alike
        for name, way in ways.items():
            speeds[name].append(bench.frames_per_s(way(), num_steps))
    best = [max(each) for each in zip(*(speeds[f"bare, {kind}"] for kind in kinds), strict=True)]
    found = []
    for name, values in speeds.items():
        if name.startswith("bare"):
            found.append(Figure.of(f"{precision}, {name}", values, "frames/s"))
            continue
        found += [
            Figure.of(f"{precision}, {name} ({GOAL_SPEEDS})", values, "frames/s"),
            Figure.of(
                f"{precision}, {name}, of the best bare loop ({GOALS})", ratios(values, best), "x"
            ),
        ]
    return found
