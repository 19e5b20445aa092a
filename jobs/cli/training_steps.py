"""Run a step that trains or scores, on the ranks that torchrun started, or alone.

Each rank has a GPU of its own where its host has one, else the CPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch

from infra.log_lines import log
from infra.settings import ConfigurationError, Range
from infra.task_metrics import REQUESTS, RequestCounts
from infra.torchrun import is_launched, launched_local_rank, launched_ranks_per_host
from jobs.cli.arguments import add_device_argument, number_in
from jobs.cli.command_line import Step, StepResults, fail, main
from jobs.cli.host import Gpus, choose_device
from jobs.cli.job import Job
from jobs.run_table import STEPS
from pipeline.runs.names import ALIGNER, section_of
from training.distributed import process_group
from training.distributed.collectives import gather_text
from training.distributed.process_group import CPU, ProcessGroup
from training.fit.model_specs import Fit, sequence_fit
from training.fit.train_model import fit_model
from training.sequence_training.lattices import generate_lattices
from training.settings.recipe import check_ranks
from training.settings.trainers import TRAINERS, describe_trainers


def arguments_with_device(step: Step) -> argparse.Namespace:
    """Parse the command line of a step that has no other argument of its own."""
    parser = step.parser()
    add_device_argument(parser)
    return parser.parse_args()


def own_device(choice: str) -> torch.device:
    """Return the device of this process, as `choose_device` does."""
    ranks = launched_local_rank(), launched_ranks_per_host()
    return torch.device(choose_device(choice, *ranks, Gpus.of_host()))


def report_device(name: str, device: torch.device, num_ranks: int = 1) -> None:
    """Print where this process, the first of so many ranks, has its model, on a host with GPUs."""
    if device == CPU and Gpus.of_host().count == 0:
        return
    where = str(device)
    if device.type == "cuda":
        where = f"{where} ({torch.cuda.get_device_name(device)})"
    ranks = "" if num_ranks == 1 else f", rank 0 of {num_ranks}"
    log(f"on {where}{ranks}", name)


TIME_LIMIT_S = 300.0
"""Longer than the store retries one object (180 s and an attempt, infra.store.retry)."""

TIME_LIMITS_S = Range(1, 1_000_000)
"""The limits that a training step may be given."""

HOW_MODELS_TRAIN = (
    " torchrun starts it on several ranks; otherwise it trains on one. It resumes from its last"
    " checkpoint."
)
"""The end of the description of each step that trains a model."""

HOW_SEQUENCES_TRAIN = (
    " Where the recipe's sequence_training names the model, it then decodes the labelled data to"
    " lattices and trains the model on by sMBR (VII-C3)."
)
"""What follows for the models that sequence training can name."""


def training_step(name: str, description: str, due_fits: Callable[[Job], Sequence[Fit]]) -> Step:
    """Return the step that trains, on all ranks, each model that is due."""

    def run(job: Job) -> StepResults:
        due = due_fits(job)
        # A rank is a core: OpenMP's threads, two on busy cores, made an epoch 15 times longer.
        torch.set_num_threads(1)
        group, device = process_group.default_world(), own_device(job.arguments.device)
        if group.rank() == 0:
            report_device(job.name, device, group.size())
        before = REQUESTS.total()
        with process_group.reporting_failure():
            made = [each for fit in due for each in _trained(job, fit, group, device)]
            others = requests_of_others(REQUESTS.total() - before, group, device)
        job.tasks.requests += others
        return made

    of_sequences = "" if STEPS[name].trains == ALIGNER else HOW_SEQUENCES_TRAIN
    return Step(name, description + HOW_MODELS_TRAIN + of_sequences, run)


def requests_of_others(
    own: RequestCounts, group: ProcessGroup, device: torch.device
) -> RequestCounts:
    """Return, on rank 0, what the other ranks asked of the store, which its record counts too."""
    texts = gather_text(json.dumps(asdict(own)), group, "requests", device)
    found = [RequestCounts(**json.loads(text)) for text in texts[1:]]
    return sum(found, RequestCounts()) if group.rank() == 0 else RequestCounts()


def _trained(job: Job, fit: Fit, group: ProcessGroup, device: torch.device) -> StepResults:
    """Train a model, each rank with one thread.

    Where the recipe's sequence_training names the model, decode the labelled data to lattices and
    train it on by sMBR (003 VII-C3). Each of the three writes one manifest.
    """
    by_sequence, config = sequence_fit(job.recipe, fit), job.recipe.sequence_training
    has_sequences, place = section_of(fit.name) in config.models, job.place[:2]
    if has_sequences:  # now, not after hours of training
        num_ranks, per_host = group.size(), launched_ranks_per_host()
        check_ranks(by_sequence.training, by_sequence.name, num_ranks, per_host)
    take_pace = partial(job.take_pace, fit.name)
    made = [fit_model(fit, *place, group, device, take_pace=take_pace)]
    if has_sequences:
        lattices = generate_lattices(
            *job.place,
            fit.name,
            fit.model,
            config.lattices,
            config.acoustic_scale,
            job.recipe.loss_budget,
            group,
            device,
        )
        made += [lattices, fit_model(by_sequence, *place, group, device)]
    return made


def main_on_all_ranks(step: Step) -> None:
    """Run a step that trains models of a recipe's section, on all ranks; exit with its code."""
    arguments = _arguments(step, STEPS[step.name].trains)
    try:
        device = own_device(arguments.device)
        with process_group.open_world(arguments.time_limit_s, device):
            try:
                main(step, arguments)
            except SystemExit as ended:
                if not is_launched():
                    raise
                # Closing gloo's threads has aborted a rank whose work was done and stored.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(int(ended.code or 0))
    except ConfigurationError as error:
        raise SystemExit(fail(step.name, error, 2)) from error
    except process_group.CollectiveError as error:  # ranks did not meet
        raise SystemExit(fail(step.name, error, 1)) from error


def _arguments(step: Step, section: str) -> argparse.Namespace:
    """Parse a training step's command line; --trainer replaces that of the recipe's `section`."""
    parser = step.parser()
    parser.add_argument(
        "--trainer",
        choices=tuple(TRAINERS),
        help=f"default: the recipe's {section}.trainer. Another one has its own blocks and "
        "thresholds. Learning rates are rescaled where the ratio is known, and refused where it is "
        "not. A line says what changed, and --set has the last word. Sequence training has its "
        f"own, sequence_training.trainer. {describe_trainers()}",
    )
    parser.add_argument(
        "--time-limit-s",
        type=number_in(TIME_LIMITS_S),
        default=TIME_LIMIT_S,
        metavar="SECONDS",
        help="a rank that waits for another for longer names it and ends; need more than the "
        f"longest time that one rank works alone; default {TIME_LIMIT_S:g}",
    )
    add_device_argument(parser)
    arguments = parser.parse_args()
    if arguments.trainer:
        arguments.trainers = {section: arguments.trainer}
    return arguments
