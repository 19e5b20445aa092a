"""The teacher, the utterances and the records that every harness of this folder shares."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.filterbank import NUM_INPUTS
from pipeline.steps.targets import TeacherInput
from training.models.lstm import LstmModel
from training.models.precision import fastest_precision, set_float32_products
from training.settings.models import LstmConfig
from training.targets.teacher import (
    SEED_BYTES,
    TeacherFunction,
    encode_input,
    kbest_encoder,
    torch_device,
)

FORM = LstmConfig(2, 256, True, 0, 0.0)
NUM_SENONES = 2000
BATCH_FRAMES = 4096

PAPERS_FORM = LstmConfig(5, 768, True, 0, 0.0)
PAPERS_SENONES = 3183
PAPERS_BATCH_FRAMES = 65_536
"""On a GPU: the teacher of 003 V-A, which has 67.5 million parameters (the paper says 78)."""

K = 20
BYTES_A_FRAME = NUM_INPUTS * 4
RECORDED = "tests.benchmarks.device_pool.workload:serve_recorded"


def lengths(count: int, seed: int = 0) -> list[int]:
    """Return skewed low-rate lengths: a median of 4.5 s, one of a hundred above 36 s."""
    drawn = np.random.default_rng(seed).lognormal(np.log(150), 0.9, count)
    return [int(each) for each in np.clip(drawn, 10, 2500)]


def utterances(count: int, seed: int = 0) -> Iterator[TeacherInput]:
    """Yield utterances of noise, which are named by their seeds of the tail's draws."""
    generator = np.random.default_rng(seed)
    for number, length in enumerate(lengths(count, seed)):
        frames = generator.standard_normal((length, NUM_INPUTS), dtype=np.float32)
        yield TeacherInput(frames, number)


def write_files(folder: Path, count: int, num_files: int) -> list[Path]:
    """Write utterances to Parquet files of about as many each, as a step's shards hold them."""
    payloads = [encode_input(each) for each in utterances(count)]
    files = [folder / f"{number}.parquet" for number in range(num_files)]
    for number, file in enumerate(files):
        pq.write_table(pa.table({"payload": pa.array(payloads[number::num_files])}), file)
    return files


def read_payloads(file: Path) -> list[bytes]:
    """Read what `write_files` wrote to one file."""
    return [each.as_py() for each in pq.read_table(file)["payload"]]


def num_frames(payload: bytes) -> int:
    """Count the low-rate frames of an utterance."""
    return (len(payload) - SEED_BYTES) // BYTES_A_FRAME


def make_function(device: str) -> TeacherFunction:
    """Make the teacher, the same in each process, with one thread."""
    place = torch_device(device)
    torch.manual_seed(0)
    is_gpu = place.type == "cuda"
    form, senones = (PAPERS_FORM, PAPERS_SENONES) if is_gpu else (FORM, NUM_SENONES)
    model = LstmModel(form, senones).eval().to(place)
    if is_gpu:
        set_float32_products("tf32")
    label = partial(model.utterance_logits, precision=fastest_precision(place))
    return TeacherFunction([label], place, kbest_encoder(place, str(K), "0"))


@dataclass(frozen=True)
class Span:
    """Span: when a step of a batch began and ended, by a clock that all processes share."""

    began: float
    ended: float
    numbers: tuple[int, ...]


class RecordedFunction:
    """RecordedFunction writes the times of each step of another function to a file of its own.

    `batches` holds the numbers of the utterances of each batch, in the order of computing.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self._function = make_function(device)
        self._file = (folder / f"{device.replace(':', '-')}-{os.getpid()}.jsonl").open("a")
        self._write("loaded", time.monotonic(), ())

    def _write(self, step: str, began: float, numbers: Sequence[int]) -> None:
        line = [step, began, time.monotonic(), list(numbers)]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def prepare(self, payloads):
        began, prepared = time.monotonic(), self._function.prepare(payloads)
        self._write("prepare", began, prepared.seeds)
        return prepared

    def compute(self, prepared):
        began, computed = time.monotonic(), self._function.compute(prepared)
        self._write("compute", began, prepared.seeds)
        return computed, prepared.seeds

    def finish(self, computed_and_seeds):
        computed, seeds = computed_and_seeds
        began, answers = time.monotonic(), self._function.finish(computed)
        self._write("finish", began, seeds)
        return answers

    def check(self) -> None:
        self._function.check()

    def label(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Do a batch's three steps one after another, as a peer's worker does."""
        return [bytes(each) for each in self.finish(self.compute(self.prepare(payloads)))]


def serve_recorded(device: str, folder: str) -> RecordedFunction:
    """Make a device server's function."""
    return RecordedFunction(device, Path(folder))


@dataclass(frozen=True)
class Record:
    """Record: what the workers of one run wrote, by worker."""

    spans: dict[str, list[Span]]
    batches: dict[str, list[tuple[int, ...]]]

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read all workers' files."""
        spans, batches = {}, {}
        for file in sorted(folder.glob("*.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            steps = [Span(began, ended, tuple(each)) for _, began, ended, each in lines[1:]]
            spans[file.stem] = steps
            batches[file.stem] = [tuple(e) for step, _, _, e in lines if step == "compute"]
        return cls(spans, batches)

    @property
    def num_loads(self) -> int:
        """Count the models that were loaded."""
        return len(self.spans)

    @property
    def began(self) -> float:
        """Return when the first batch began."""
        return min(each.began for spans in self.spans.values() for each in spans)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first batch's beginning to the last one's end."""
        ends = [each.ended for spans in self.spans.values() for each in spans]
        return max(ends) - self.began

    @property
    def first_target(self) -> float:
        """Return when the first batch was done."""
        done = [spans[2].ended for spans in self.spans.values() if len(spans) > 2]
        return min(done)

    def busy_share(self, num_workers: int) -> float:
        """Return the share of the makespan in which a worker had a step at work, of all workers."""
        return sum(map(covered, self.spans.values())) / (num_workers * self.makespan)


def covered(spans: Sequence[Span]) -> float:
    """Return the seconds in which at least one span was."""
    total, end = 0.0, float("-inf")
    for each in sorted(spans, key=lambda span: span.began):
        total += max(0.0, each.ended - max(each.began, end))
        end = max(end, each.ended)
    return total
