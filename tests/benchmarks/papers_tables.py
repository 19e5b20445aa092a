"""Reproduce the papers' tables of accuracy (000 Tables 1 to 3, 003 Table I) in shape.

python -m tests.benchmarks.papers_tables --run runs/demo [--tables 1,2,3,3b,I] [--seeds 3]
    [--device cuda] [--resume FILE [--finished]] [--json]

Simulated ranks classify the frames of a finished demo run's corpus. A network of one hidden layer
learns the teacher's best senones of the unlabelled speakers. It is scored on the held-out speakers'
aligned frames, relative to one rank of the same seed. Each trainer's learning rate is tuned first,
on a separate seed. --resume keeps finished trainings; --finished only prints those. With --device
cuda the ranks share the GPU, and results are kept apart from a CPU's, whose bits differ.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from tests.benchmarks.measure import Figure
from tests.benchmarks.papers_tables_results import RATES, Job, Results, tuning_jobs
from tests.benchmarks.papers_tables_rows import (
    BASELINE,
    BLOCK_SIZES,
    FORMS,
    TABLES,
    Table,
    to_train,
)
from tests.benchmarks.papers_tables_task import MINIBATCH_FRAMES, Task, read_task
from training.simulation import CPU, simulate

# Of the initial rate, epoch by epoch: halved, as min-rate newbob ends (000 3.2).
RATE_FACTORS = (1.0, 0.5, 0.25)


def main() -> None:
    """Train what is not finished, then print the tables."""
    arguments = parsed()
    torch.set_num_threads(1)
    task = read_task(arguments.run)
    results = Results(arguments.resume, settings_of(task, arguments.device))
    seeds = range(1, arguments.seeds + 1)
    tables = [TABLES[name] for name in arguments.tables.split(",")]
    if not arguments.finished:
        train(task, tuning_jobs(), results, arguments.device)
        train(task, table_jobs(tables, seeds, results), results, arguments.device)
    print((as_json if arguments.json else as_text)(tables, results, seeds))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="a finished run of jobs.demo")
    parser.add_argument("--tables", default=",".join(TABLES), help="of 1, 2, 3, 3b, I")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu, cuda or cuda:N")
    parser.add_argument("--resume", type=Path, help="JSON-lines file that keeps what is finished")
    parser.add_argument("--finished", action="store_true", help="print what is finished, no more")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def settings_of(task: Task, device: torch.device) -> dict[str, object]:
    """Return the settings in which all results of one table must agree."""
    on_device = {} if device == CPU else {"device": device.type}
    return on_device | {
        "minibatch_frames": MINIBATCH_FRAMES,
        "rate_factors": list(RATE_FACTORS),
        "block_sizes": {str(papers): ours for papers, ours in BLOCK_SIZES.items()},
        "training_frames": len(task.training.labels),
        "heldout_frames": len(task.heldout.labels),
        "parameters": sum(p.numel() for p in task.new_model().parameters()),
    }


def table_jobs(tables: list[Table], seeds: Iterable[int], results: Results) -> Iterator[Job]:
    """List the trainings seed after seed, so that early results make whole tables."""
    for seed in seeds:
        for form in FORMS:
            for configuration in to_train(tables, form):
                yield results.tuned(configuration, seed)


def train(task: Task, jobs: Iterable[Job], results: Results, device: torch.device) -> None:
    """Train one after the other, all of a seed from the same pretrained network."""
    missing = [job for job in jobs if job not in results.accuracies]
    starts: dict[int, nn.Module] = {}
    with tqdm(missing, unit="training", mininterval=0) as bar:
        for job in bar:
            if job.seed not in starts:
                starts = {job.seed: task.pretrained(job.seed)}
            began = time.process_time()
            rates = tuple(job.learning_rate * factor for factor in RATE_FACTORS)
            training = task.training_from(starts[job.seed], job.seed, rates)
            trainer = job.configuration.make_trainer()
            outcome = simulate(training, job.configuration.num_ranks, trainer, device)
            accuracies = outcome.evaluations
            results.add(job, accuracies, round(time.process_time() - began, 1))
            bar.set_postfix_str(f"{job.configuration.trainer} {accuracies[-1]:.2f} %")


def as_text(tables: Sequence[Table], results: Results, seeds: Sequence[int]) -> str:
    """Lay out the tables beside the papers' values, as Markdown."""
    blocks = []
    for table in tables:
        lines = [
            f"{table.title}; percent relative to one rank, median (range) of the seeds",
            "",
            "| trainer | ranks | block size | group size | paper | nesterov | as printed |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in table.rows:
            values = [cell(results.relative(each, seeds)) for each in row.in_both_forms()]
            values += [""] * (len(FORMS) - len(values))
            cells = [*row.configuration.names(), row.published, *values]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        blocks.append("\n".join(lines))
    baselines = [found for seed in seeds if (found := results.final(BASELINE, seed)) is not None]
    rates = ", ".join(f"{name} {form} {results.best_rate(name, form)}" for name, form in RATES)
    head = f"one rank: {cell(baselines)} % of the held-out frames; rates: {rates}"
    return "\n\n".join([head, *blocks])


def cell(values: Sequence[float]) -> str:
    """Write median and range."""
    if not values:
        return ""
    figure = Figure.of("", values, "%")
    return f"{figure.median:.1f} ({figure.low:.1f}..{figure.high:.1f})"


def as_json(tables: Sequence[Table], results: Results, seeds: Sequence[int]) -> str:
    """Return each seed's value of every row, beside the papers'."""
    rows = [
        {
            "table": table.title,
            **asdict(configuration),
            "published": row.published,
            "relative": results.relative(configuration, seeds),
        }
        for table in tables
        for row in table.rows
        for configuration in dict.fromkeys(row.in_both_forms())
    ]
    return json.dumps({"title": "relative frame accuracy, percent", "rows": rows})


if __name__ == "__main__":
    main()
