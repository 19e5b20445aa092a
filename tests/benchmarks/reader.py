"""Compare the speed of reading minibatches with that of a trainer, on one core.

`python -m tests.benchmarks.reader [--rounds N] [--only-ceph] [--json]`. Speeds are per second of
this process's CPU time, all threads together, so other programs have no part in them. Utterances
are 3.6 s on average (1e9 in a million hours), partitions hold two hours, or as little as the
demo's. Reading with augmentation is compared with reading without. --only-ceph compares reading
from a Ceph on this machine with reading from a folder, and nothing else.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

# Before NumPy: one core, for all sides alike.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS, NUM_INPUTS
from pipeline.kbest import KBest
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.settings import Storage
from pipeline.shards import Alignment, PartitionRow, write_partition
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from tests.ceph_server import running_ceph
from tests.s3_server import fresh_bucket
from tests.training.training_settings import training_settings
from training.data import row_order
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch
from training.data.targets import HardTargets
from training.fit.steps import GradientNorms, take_steps
from training.models.lstm import LstmModel
from training.settings.model_training import AugmentationConfig
from training.settings.models import LstmConfig

K = 20
MEAN_UTTERANCE_FRAMES = 360
GPU_GOAL_FRAMES_PER_S = 1.4e6
NUM_DEMO_PARTITIONS, DEMO_RANKS, DEMO_SHARES = 16, 2, 6
NUM_POOLS = 8


@dataclass(frozen=True)
class Student:
    """Student holds a model, its senones and its minibatch."""

    name: str
    num_layers: int
    num_units: int
    num_senones: int
    minibatch_frames: int


STUDENTS = (
    Student("deployed student, 5 x 768", 5, 768, 3183, 2048),
    Student("demo's student, 2 x 160", 2, 160, 200, 256),
)


def utterances(
    num_hours: float, num_senones: int, soft: bool, storage: Storage
) -> Iterator[PartitionRow]:
    """Make rows of that many hours of noise; lengths are log-normal, as speech has them."""
    generator = np.random.default_rng([round(num_hours * 100), num_senones, soft])
    noise = generator.normal(size=(100_000, NUM_BINS)).astype(np.float16)
    left = num_hours * 360_000
    while left > 0:
        median = np.log(MEAN_UTTERANCE_FRAMES) - 0.6**2 / 2
        num_frames = int(np.clip(generator.lognormal(median, 0.6), 50, 2000))
        left -= num_frames
        first, offset = generator.integers(len(noise) - num_frames), int(generator.integers(3))
        yield PartitionRow(
            utterance_id=f"{left:.0f}",
            speaker_id="speaker",
            duration_ms=10 * num_frames,
            text=None,
            features=noise[first : first + num_frames],
            targets=kbest((num_frames - offset) // 3, num_senones, generator)
            if soft
            else Alignment(generator.integers(num_senones, size=num_frames).astype(np.uint16)),
            offset=offset if soft else 0,
            storage=storage,
        )


def kbest(num_frames: int, num_senones: int, generator: np.random.Generator) -> KBest:
    """Make targets that fall by some nats from best to worst."""
    falls = np.sort(generator.exponential(3, (num_frames, K)), axis=1)
    logits = (falls[:, :1] - falls).astype(np.float16)
    senones = generator.integers(num_senones, size=(num_frames, K)).astype(np.uint16)
    return KBest(senones, logits, np.ones(num_frames, np.float16))


def partitions(
    store: ObjectStore, run_uri: str, count: int, num_hours: float, *form: object
) -> tuple[Output, ...]:
    """Store that many partitions of that many hours each; all have the same rows."""
    rows = list(utterances(num_hours, *form))  # type: ignore[arg-type]
    data, tally = write_partition(rows), Tally(len(rows), 0)
    context = step_context(store, run_uri, PARTITIONS_STEP, {}, {})
    return tuple(
        context.put_output(
            f"{num_hours}-{'-'.join(map(str, form))}-{number}", ".parquet", data, tally
        )
        for number in range(count)
    )


def read_all(dataset: Dataset, sub_epoch: SubEpoch) -> int:
    """Make all minibatches of a sub-epoch and drop them; return their frames."""
    return sum(minibatch.num_frames for minibatch in dataset.plan(sub_epoch, 0).minibatches())


def step_of(student: Student) -> Callable[[], object]:
    """Return a training step on a minibatch of full chunks, as the trainer takes it."""
    config = LstmConfig(student.num_layers, student.num_units, False, 3, 0.0)
    model = LstmModel(config, student.num_senones)
    optimizer = torch.optim.Adam(model.parameters())
    batch = student.minibatch_frames // 32
    minibatch = Minibatch(
        torch.randn(batch, 32, NUM_INPUTS),
        torch.full((batch,), 32),
        HardTargets(torch.randint(student.num_senones, (batch, 32))),
    )
    loop = training_settings(student.minibatch_frames, 1.0)
    norms = GradientNorms(0, 0)
    return lambda: list(take_steps(model, optimizer, iter([minibatch]), 1, loop, norms))


def reading(folder: str, student: Student) -> dict[str, tuple[Dataset, SubEpoch]]:
    """Return what a student reads: all forms of two-hour partitions, or a rank's in the demo."""
    store = ObjectStore((folder,))
    empty = Dataset(store, folder, (), (), 3, student.minibatch_frames, 1, 0, 1)
    chunks = SubEpoch(False, 0, 1, 0, False, 0.1)
    if student.num_senones == 200:
        parts = partitions(store, folder, NUM_DEMO_PARTITIONS, 0.25, 200, True, "float16")
        whole = replace(empty, unlabelled=parts[:4])
        demo = replace(empty, unlabelled=parts, world_size=DEMO_RANKS)
        return {
            "soft targets, small minibatches": (whole, chunks),
            "the demo's: rows dealt to 12": (demo, replace(chunks, num_shares=DEMO_SHARES)),
        }
    hard = partitions(store, folder, 1, 2.0, 3183, False, "float16")
    soft = partitions(store, folder, 1, 2.0, 3183, True, "float16")
    small = partitions(store, folder, 1, 2.0, 3183, True, "uint8")
    whole = replace(chunks, whole_utterances=True)
    return {
        "hard labels, chunks": (replace(empty, labelled=hard), replace(chunks, labelled=True)),
        "hard labels, utterances": (replace(empty, labelled=hard), replace(whole, labelled=True)),
        "soft targets, chunks": (replace(empty, unlabelled=soft), chunks),
        "soft targets, utterances": (replace(empty, unlabelled=soft), whole),
        "soft targets, uint8, chunks": (replace(empty, unlabelled=small), chunks),
    }


def figures(folder: str, student: Student, num_rounds: int) -> list[Figure]:
    """Return frames a second of the step and of every form of reading, and their ratios."""
    forms = reading(folder, student)
    num_frames = {name: read_all(*form) for name, form in forms.items()}
    step = step_of(student)
    step()
    functions = {name: lambda form=form: read_all(*form) for name, form in forms.items()}
    seconds = interleaved({"step": step, **functions}, num_rounds, time.process_time)
    steps = [student.minibatch_frames / each for each in seconds["step"]]
    found = [Figure.of(f"{student.name}: step", steps, "frames/CPU s")]
    for name, frames in num_frames.items():
        speeds = [frames / each for each in seconds[name]]
        found += [
            Figure.of(f"{name}: reader", speeds, "frames/CPU s"),
            Figure.of(f"{name}: reader / step", ratios(speeds, steps), "x"),
        ]
        if student.num_senones == 3183:
            cores = [GPU_GOAL_FRAMES_PER_S / each for each in speeds]
            found.append(Figure.of(f"{name}: cores for 1.4 M frames/s", cores, "cores"))
    return found


def augmented(folder: str, num_rounds: int) -> list[Figure]:
    """Return the reader's speed with each augmentation, relative to its speed without.

    Speeds are per low-rate frame read, since slower speech has more of them.
    """
    store = ObjectStore((folder,))
    masks = AugmentationConfig(frequency_masks=2, time_masks=2)
    speeds = AugmentationConfig(speed=(0.9, 1.0, 1.1))
    configs = {
        "masks": masks,
        "speeds": speeds,
        "masks and speeds": replace(masks, speed=speeds.speed),
    }
    found = []
    for soft in (False, True):
        parts = partitions(store, folder, 1, 2.0, 3183, soft, "float16")
        plain = Dataset(store, folder, parts, parts, 3, 2048, 1, 0, 1)
        chunks = SubEpoch(not soft, 0, 1, 0, False, 0.1)
        datasets = {"plain": plain} | {
            name: replace(plain, augmentation=config) for name, config in configs.items()
        }
        num_frames = {name: read_all(each, chunks) for name, each in datasets.items()}
        functions = {
            name: lambda each=each, chunks=chunks: read_all(each, chunks)
            for name, each in datasets.items()
        }
        seconds = interleaved(functions, num_rounds, time.process_time)
        speed = {name: [num_frames[name] / s for s in each] for name, each in seconds.items()}
        kind = "soft targets" if soft else "hard labels"
        found += [Figure.of(f"{kind}, chunks: reader", speed["plain"], "frames/CPU s")]
        found += [
            Figure.of(f"{kind}, {name} / without", ratios(speed[name], speed["plain"]), "x")
            for name in configs
        ]
    return found


def read_ahead(folder: str, num_rounds: int) -> list[Figure]:
    """Return the time with a remote device as fast as the reader, relative to no prefetch.

    A shuffle buffer is a partition of a quarter of an hour here, an eighth of its real size.
    """
    store = ObjectStore((folder,))
    parts = partitions(store, folder, NUM_POOLS, 0.25, 200, True, "float16")
    dataset = Dataset(store, folder, (), parts, 3, 2048, 1, 0, 1)
    with mock.patch.object(row_order, "BUFFER_FRAMES", row_order.BUFFER_FRAMES // 8):
        plan = dataset.plan(SubEpoch(False, 0, 1, 0, False, 0.1), 0)
    started = time.perf_counter()
    num_minibatches = sum(1 for _ in plan.minibatches())
    step_s = (time.perf_counter() - started) / num_minibatches

    def train(minibatches: Iterator[Minibatch]) -> None:
        for _ in minibatches:
            time.sleep(step_s)

    def one_after_the_other() -> Iterator[Minibatch]:
        for buffer, _ in plan.pieces:
            frames = plan.dataset.read(buffer)
            yield from frames.minibatches(buffer.batches(), plan.dataset.delay)

    seconds = interleaved(
        {
            "ahead": lambda: train(plan.minibatches()),
            "not ahead": lambda: train(one_after_the_other()),
        },
        num_rounds,
    )
    shares = ratios(seconds["ahead"], seconds["not ahead"])
    return [
        Figure.of(
            f"{len(plan.pieces)} pools, read ahead / not, beside a device as fast", shares, "x"
        )
    ]


def from_ceph(folder: str, num_rounds: int) -> list[Figure]:
    """Return the speed of reading by S3 from Ceph, and what it costs beside reading from a folder.

    Ceph works in processes of its own: their CPU time is in the elapsed time alone.
    """
    chunks = SubEpoch(False, 0, 1, 0, False, 0.1)
    found = []
    with running_ceph() as endpoint, pytest.MonkeyPatch.context() as monkeypatch:
        bucket = f"s3://{fresh_bucket(endpoint, monkeypatch)}"
        for soft in (False, True):
            sub_epoch = replace(chunks, labelled=not soft)
            datasets = {}
            for place, uri in (("folder", folder), ("Ceph", bucket)):
                store = ObjectStore((uri,))
                parts = partitions(store, uri, 1, 2.0, 3183, soft, "float16")
                datasets[place] = Dataset(store, uri, parts, parts, 3, 2048, 1, 0, 1)
            num_frames = read_all(datasets["folder"], sub_epoch)
            assert read_all(datasets["Ceph"], sub_epoch) == num_frames
            functions = {
                place: lambda each=each, sub_epoch=sub_epoch: read_all(each, sub_epoch)
                for place, each in datasets.items()
            }
            kind = "soft targets" if soft else "hard labels"
            for clock, unit in ((time.process_time, "CPU s"), (time.perf_counter, "s")):
                seconds = interleaved(functions, num_rounds, clock)
                speeds = [num_frames / each for each in seconds["Ceph"]]
                shares = ratios(seconds["folder"], seconds["Ceph"])
                found += [
                    Figure.of(f"{kind}, chunks, from Ceph: reader", speeds, f"frames/{unit}"),
                    Figure.of(f"{kind}, chunks, from Ceph / from a folder, by {unit}", shares, "x"),
                ]
    return found


def main() -> None:
    """Measure both students and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-ceph", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only_ceph:
            found += from_ceph(folder, arguments.rounds)
        else:
            for student in STUDENTS:
                found += figures(folder, student, arguments.rounds)
            found += augmented(folder, arguments.rounds)
            found += read_ahead(folder, arguments.rounds)
    show("reader and training step, one core", found, arguments.json)


if __name__ == "__main__":
    main()
