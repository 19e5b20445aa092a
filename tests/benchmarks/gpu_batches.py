"""Measure how a GPU's speed depends on the size and the form of a batch; profile a job's step.

python -m tests.benchmarks.gpu_batches [--device cuda] [--profile]

First the bare loop of `gpu_job_step`, by precision and minibatch, with graphs and without. Then a
step of one LSTM of five layers, and of five of one layer. Then the papers' teacher on one batch of
padded frames: utterances as they come, and those next to the median length. `--device cpu` runs
small sizes, to see that it runs.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from tests.benchmarks.device_pool.workload import FORM, PAPERS_FORM, PAPERS_SENONES, K, lengths
from tests.benchmarks.gpu import SMALL
from tests.benchmarks.gpu_graphs import captured, synchronize
from tests.benchmarks.gpu_job_step import PAPERS, PRECISIONS, TRAINERS, Bench, Job, bare_step
from tests.benchmarks.measure import Figure, show
from training.distributed import process_group
from training.models.lstm import LstmModel
from training.models.precision import fastest_precision, set_float32_products
from training.targets.teacher_messages import select_on_device

MINIBATCHES = (2_048, 8_192, 32_768)
PADDED_FRAMES = (8_192, 65_536, 262_144, 524_288)
NUM_LAYERS, NUM_UNITS, NUM_CHUNKS, NUM_FRAMES = 5, 768, 64, 32


def seconds(work: Callable[[], object], device: torch.device, num_times: int = 30) -> float:
    """Return the mean time of some runs, after a few more."""
    for _ in range(3):
        work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(num_times):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / num_times


def bare_loops(job: Job, minibatches: Sequence[int], device: torch.device) -> Iterator[Figure]:
    """Yield frames a second of the bare loop."""
    for precision in PRECISIONS:
        set_float32_products(precision)
        for frames in minibatches:
            for has_graphs in (False, True):
                step = bare_step(
                    replace(job, minibatch_frames=frames), device, precision, has_graphs
                )
                work = captured(step, device) if has_graphs else step
                name = f"{precision}, {frames} frames, {'' if has_graphs else 'no '}graphs"
                yield Figure.of(name, [frames / seconds(work, device)], "frames/s")


def layers(num_units: int, device: torch.device) -> Iterator[Figure]:
    """Yield the time forwards and backwards of five layers in one LSTM, and in five, as graphs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = torch.randn(NUM_FRAMES, NUM_CHUNKS, num_units, device=device, dtype=dtype)
    for name, parts in (("one LSTM", [NUM_LAYERS]), ("five LSTMs", [1] * NUM_LAYERS)):
        lstms = nn.ModuleList(nn.LSTM(num_units, num_units, each) for each in parts)
        work = captured(partial(_step, lstms.to(device, dtype), inputs), device)
        yield Figure.of(f"five layers, {name}", [1e3 * seconds(work, device)], "ms")


def _step(lstms: nn.ModuleList, inputs: Tensor) -> None:
    lstms.zero_grad()
    for lstm in lstms:
        inputs = lstm(inputs)[0]
    inputs.sum().backward()  # type: ignore[no-untyped-call]


def batch_of(found: Sequence[int], padded_frames: int) -> list[int]:
    """Take the first lengths that, padded to the longest, have at most so many frames."""
    batch: list[int] = []
    for each in found:
        if (len(batch) + 1) * max([*batch, each]) > padded_frames:
            break
        batch.append(each)
    return batch


def teacher_batches(
    model: LstmModel, padded: Sequence[int], device: torch.device
) -> Iterator[Figure]:
    """Yield frames a second of the forward pass alone, and with the k best."""
    precision = fastest_precision(device)
    set_float32_products("tf32" if precision == "bfloat16" else "float32")
    drawn = lengths(20_000)
    orders = {"as they come": drawn, "of like lengths": sorted(drawn)[len(drawn) // 2 :]}
    for frames in padded:
        for name, order in orders.items():
            batch = batch_of(order, frames)
            utterances = [torch.randn(each, 192, device=device) for each in batch]
            forward = partial(model.utterance_logits, utterances, precision)

            def labelled(forward=forward) -> object:
                return select_on_device(forward(), K)

            for what, work in (("forward", forward), ("with k best", labelled)):
                speed = sum(batch) / seconds(work, device, 8)
                title = f"teacher, {frames} padded frames, {name} ({len(batch)}), {what}"
                yield Figure.of(title, [speed], "frames/s")


def profile_steps(job: Job, device: torch.device) -> str:
    """Return where 40 of the job's steps spend the host's time and the device's."""
    with TemporaryDirectory() as folder, process_group.open_world(device=device) as group:
        bench = Bench(job, job.dataset(folder), device, group)
        tables = []
        for trainer in TRAINERS:
            steps = bench.job_steps(trainer, fastest_precision(device), has_graphs=True)
            for _ in range(job.num_first_steps // 2):
                next(steps)
            with torch.profiler.profile() as found:
                for _ in range(min(40, job.num_first_steps)):
                    next(steps)
                synchronize(device)
            steps.close()  # type: ignore[attr-defined]
            tables.append(f"{trainer.name}\n{found.key_averages().table(row_limit=16)}")
    return "\n".join(tables)


def main() -> None:
    """Print the figures, and the profile if it is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", action="store_true", help="only the job's steps, profiled")
    arguments = parser.parse_args()
    device, is_full = torch.device(arguments.device), arguments.device == "cuda"
    torch.set_num_threads(1)  # as ranks do
    job = PAPERS if is_full else SMALL
    if arguments.profile:
        print(profile_steps(job, device))
        return
    form, senones = (PAPERS_FORM, PAPERS_SENONES) if is_full else (replace(FORM, num_units=8), 30)
    teacher = LstmModel(form, senones).eval().to(device)
    found = [
        *bare_loops(job, MINIBATCHES if is_full else (64,), device),
        *layers(NUM_UNITS if is_full else 8, device),
        *teacher_batches(teacher, PADDED_FRAMES if is_full else (1_000,), device),
    ]
    show("Batches of a GPU" if is_full else "small sizes on a CPU", found, False)


if __name__ == "__main__":
    main()
