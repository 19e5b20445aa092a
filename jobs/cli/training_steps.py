"""Run a training step on the ranks that torchrun started, or alone."""

import os
import sys
from collections.abc import Callable

import torch

from infra.torchrun import is_launched
from jobs.cli.command_line import Result, Step, execute, fail
from jobs.cli.job import Job
from training.distributed import process_group
from training.fit.model_specs import Fit
from training.fit.train_model import fit_model
from training.recipes import Recipe
from training.trainers.registry import TRAINERS, describe_trainers

TIME_LIMIT_S = 300.0
"""Longer than the store retries one object (180 s and an attempt, infra.store.retry)."""


def run_fit(make_fit: Callable[[Recipe], Fit]) -> Callable[[Job], Result]:
    """Return a step's function that fits the model of `make_fit` on all ranks of the world."""

    def run(job: Job) -> Result:
        # A rank is a core: OpenMP's threads, two on busy cores, made an epoch 15 times longer.
        torch.set_num_threads(1)
        group = process_group.default_world()
        with process_group.reporting_failure():
            return [fit_model(make_fit(job.recipe), job.store, job.run_uri, group)]

    return run


def main(step: Step, section: str) -> None:
    """Run a training step's command line; --trainer sets the trainer of the recipe's `section`."""
    parser = step.parser()
    parser.add_argument(
        "--trainer",
        choices=tuple(TRAINERS),
        help=f"default: the recipe's {section}.trainer, whose settings another one keeps where it "
        f"has them too. {describe_trainers()}",
    )
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=TIME_LIMIT_S,
        metavar="SECONDS",
        help="a rank that waits for another for longer names it and ends; need more than the "
        f"longest time that one rank works alone; default {TIME_LIMIT_S:g}",
    )
    arguments = parser.parse_args()
    if arguments.trainer:
        arguments.trainers = {section: arguments.trainer}
    try:
        with process_group.open_world(arguments.time_limit_s):
            code = execute(step, arguments, process_group.is_leader())
            if is_launched():
                # Closing gloo's threads has aborted a rank whose work was done and stored.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    except process_group.CollectiveError as error:  # ranks did not meet
        code = fail(step.name, error, 1)
    raise SystemExit(code)
