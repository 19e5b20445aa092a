"""Compare training, reader to optimizer, with a bare loop over `torch.nn.LSTM`, on one core.

`python -m tests.benchmarks.cpu_training [--corpus C] [--case C] [--rounds N] [--clock C] [--json]`.
All loops take the same steps on the same minibatches by turns. The bare loop clips as training
does, counts nothing, and finds its minibatches in memory; to `take_steps` the reader of stored
partitions is added, sub-epoch after sub-epoch, and a trainer of one rank. Ratios are of CPU time:
other programs, which share the caches alone, have little part in them.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import Alignment, PartitionRow, write_partition
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from tests.benchmarks.reader import kbest
from tests.training.training_settings import training_settings
from training.data.dataset import Dataset, SubEpochReader
from training.data.minibatch import Minibatch
from training.data.sub_epochs import DataCursor, SubEpoch
from training.data.targets import HardTargets
from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.fit.steps import GradientNorms, RunningTotals, take_steps
from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig
from training.settings.trainers import AdamConfig
from training.trainers import Synchronous
from training.trainers.from_recipe import make_optimizer

NUM_SENONES = 200
PARTITION_HOURS = 0.1

Clock: TypeAlias = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {
    "process": time.process_time,
    "thread": time.thread_time,
    "wall": time.perf_counter,
}
"""CPU time of all threads, or of the one that trains, without the reader's; or all time."""


@dataclass(frozen=True)
class Corpus:
    """Corpus holds how long utterances are, and the recipe's models and minibatches.

    `seconds` are the shortest, the quantiles at 5, 25, 50, 75 and 95 %, and the longest.
    """

    seconds: tuple[float, ...]
    num_units: int
    student_dropout: float
    student_frames: int
    teacher_frames: int


CORPORA = {
    "demo": Corpus((1.0, 1.4, 1.9, 2.4, 2.9, 3.7, 5.0), 160, 0.1, 256, 512),
    "an4": Corpus((0.7, 0.9, 1.8, 2.5, 3.4, 4.8, 6.4), 256, 0.2, 256, 256),
}


@dataclass(frozen=True)
class Case:
    """Case: one model on minibatches of one kind."""

    name: str
    is_teacher: bool
    labelled: bool
    whole_utterances: bool


CASES = (
    Case("student, soft targets, chunks", False, False, False),
    Case("student, soft targets, utterances", False, False, True),
    Case("student, hard targets, chunks", False, True, False),
    Case("student, hard targets, utterances", False, True, True),
    Case("teacher, hard targets, chunks", True, True, False),
    Case("teacher, hard targets, utterances", True, True, True),
)


def rows(corpus: Corpus, soft: bool) -> Iterator[PartitionRow]:
    """Make a partition's utterances of noise, as long as the corpus has them."""
    generator = np.random.default_rng(soft)
    left = PARTITION_HOURS * 3600
    while left > 0:
        places = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
        seconds = float(np.interp(generator.random(), places, corpus.seconds))
        left -= seconds
        num_frames, offset = int(100 * seconds), int(generator.integers(3)) if soft else 0
        yield PartitionRow(
            utterance_id=f"{left:.3f}",
            speaker_id="speaker",
            duration_ms=10 * num_frames,
            text=None,
            features=generator.normal(size=(num_frames, 64)).astype(np.float16),
            targets=kbest((num_frames - offset) // 3, NUM_SENONES, generator)
            if soft
            else Alignment(generator.integers(NUM_SENONES, size=num_frames).astype(np.uint16)),
            offset=offset,
        )


def partitions(store: ObjectStore, folder: str, corpus: Corpus, soft: bool) -> tuple[Output, ...]:
    """Store a partition of the corpus."""
    chosen = list(rows(corpus, soft))
    data, tally = write_partition(chosen), Tally(len(chosen), 0)
    context = step_context(store, folder, PARTITIONS_STEP, {}, {})
    return (context.put_output(str(soft), ".parquet", data, tally),)


def bare_loop(
    model: AcousticModel,
    optimizer: Optimizer,
    minibatches: list[Minibatch],
    bound: float | None = None,
) -> None:
    """Train as anyone would write it: the whole padded minibatch through `nn.LSTM`.

    Gradients are clipped at a norm of `bound`, if any.
    """
    model.train()
    for minibatch in minibatches:
        optimizer.zero_grad()
        logits = model.output(model.lstm(minibatch.features)[0])
        targets = minibatch.targets
        if isinstance(targets, HardTargets):
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.labels.flatten(), ignore_index=-1, reduction="sum"
            )
        else:
            log_posteriors = torch.log_softmax(logits, dim=-1).gather(-1, targets.senones)
            loss = -(log_posteriors * targets.probabilities).sum()
        loss.backward()
        if bound is not None:
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()


def make_model(corpus: Corpus, case: Case) -> tuple[AcousticModel, Optimizer]:
    """Make a recipe's model, and its optimizer."""
    dropout, look_ahead = (0.3, 0) if case.is_teacher else (corpus.student_dropout, 3)
    config = LstmConfig(2, corpus.num_units, case.is_teacher, look_ahead, dropout)
    model = LstmModel(config, NUM_SENONES)
    return model, make_optimizer(AdamConfig(), model.parameters())


@contextmanager
def loops(
    dataset: Dataset, corpus: Corpus, case: Case, group: ProcessGroup
) -> Iterator[Mapping[str, Callable[[], object]]]:
    """Yield the loops over a sub-epoch, from the bare one to the jobs', to be called often."""
    num_frames = corpus.teacher_frames if case.is_teacher else corpus.student_frames
    look_ahead = 0 if case.is_teacher else 3
    dataset = replace(dataset, minibatch_frames=num_frames, delay=look_ahead)
    sub_epoch = SubEpoch(case.labelled, 0, 1, 0, case.whole_utterances, 1e-3)
    minibatches = list(dataset.plan(sub_epoch, 0).minibatches())
    norms, config = GradientNorms(0, 0), training_settings(num_frames, 1.0)

    def train(model: AcousticModel, optimizer: Optimizer, given: Iterable[Minibatch]) -> None:
        totals = RunningTotals()
        steps = take_steps(model, optimizer, iter(given), len(minibatches), config, norms)
        for result in steps:
            totals.add(result)

    def train_read(model: AcousticModel, optimizer: Optimizer) -> Callable[[], None]:
        """Read a sub-epoch at each call, as a job does: the next is begun beside the steps."""
        reader = SubEpochReader(dataset, [sub_epoch] * 1000, group)
        cursors = map(DataCursor, itertools.count())

        def run() -> None:
            with closing(reader.begin(next(cursors))[1]) as given:
                train(model, optimizer, given)

        return run

    def read_alone() -> int:
        return sum(each.num_frames for each in dataset.plan(sub_epoch, 0).minibatches())

    bare, unclipped, stepped, read, trained = (make_model(corpus, case) for _ in range(5))
    with Synchronous(*trained, group=group):
        yield {
            "bare loop": lambda: bare_loop(*bare, minibatches, num_frames),
            "bare loop without clipping": lambda: bare_loop(*unclipped, minibatches),
            "take_steps": lambda: train(*stepped, minibatches),
            "take_steps, reader": train_read(*read),
            "take_steps, trainer": lambda: train(*trained, minibatches),
            "take_steps, reader, trainer": train_read(*trained),
            "reader alone": read_alone,
        }


def figures(
    case: Case, functions: Mapping[str, Callable[[], object]], num_rounds: int, clock: Clock
) -> list[Figure]:
    """Return each loop's speed over the bare one's, and the bare loop's frames a second."""
    num_frames = int(functions["reader alone"]())  # type: ignore[call-overload]
    for function in functions.values():
        function()
    seconds = interleaved(functions, num_rounds, clock)
    bare = seconds.pop("bare loop")
    found = [Figure.of(f"{case.name}: bare loop", [num_frames / s for s in bare], "frames/s")]
    for name, values in seconds.items():
        found.append(Figure.of(f"{case.name}: {name}", ratios(bare, values), "of the bare speed"))
    return found


def main() -> None:
    """Measure all cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", choices=CORPORA, default="demo")
    parser.add_argument("--case", default="", help="only the cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus, found = CORPORA[arguments.corpus], []
    with tempfile.TemporaryDirectory() as folder, process_group.open_world() as group:
        store = ObjectStore((folder,))
        hard, soft = (partitions(store, folder, corpus, soft) for soft in (False, True))
        dataset = Dataset(store, folder, hard, soft, 0, 1, 1, 0, 1)
        for case in CASES:
            if case.name.startswith(arguments.case):
                with loops(dataset, corpus, case, group) as functions:
                    found += figures(case, functions, arguments.rounds, CLOCKS[arguments.clock])
    show(f"training on one core, {arguments.corpus}", found, arguments.json)


if __name__ == "__main__":
    main()
