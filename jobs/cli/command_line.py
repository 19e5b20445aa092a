"""Run steps and queries: open the job, run it, print its answer, exit with its code.

Exit codes: 0 done (also when the step was finished before), 1 failed, 2 bad usage or recipe,
3 loss budget exceeded, 130 interrupted, 141 if the reader of the output ended first. With --json
one object goes to standard output; logs go to standard error.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from infra.log_lines import (
    begin_log,
    elapsed_text,
    log,
    printed,
    report_error,
    separate_standard_error,
)
from infra.settings import ConfigurationError, printable
from infra.store.object_store import PrefixError, StoreError, join_uri
from infra.task_metrics import REQUESTS
from jobs.cli.arguments import add_base_arguments
from jobs.cli.job import (
    Job,
    begin,
    changes_since_start,
    end,
    job_parser,
    open_job,
    remove_start_record,
    take_over,
)
from jobs.cli.megahour import ended_by_closed_pipe
from jobs.cli.record import (
    describe,
    describe_dry_run,
    dry_run_summary,
    metrics_path,
    metrics_text,
    store_record,
    tallies,
    there_or_needed,
    write_metrics,
)
from jobs.run_table import STEPS, written_steps
from pipeline.runs.commit import RecipeConflictError
from pipeline.runs.engine import LossBudgetExceededError, StepResult
from pipeline.runs.names import STORE_CHECK_FOLDER, metrics_file
from training.data.sub_epochs import last_measures

StepResults = Sequence[StepResult]
"""The manifests that a job wrote or found."""


@dataclass(frozen=True)
class Answer:
    """Answer holds the output of a command as lines and as JSON; `is_good` gives exit code 0."""

    is_good: bool
    text: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """Step is a command that reads and writes manifests, and its function."""

    name: str
    description: str
    run: Callable[[Job], StepResults]

    def parser(self) -> argparse.ArgumentParser:
        """Return a parser of the arguments that every step takes."""
        codes = "0 done or nothing to do, 1 failed, 2 bad usage or recipe, 3 loss budget exceeded."
        again = "A finished step is never done again."
        parser = job_parser(self.name, self.description, f"{codes} {again}")
        text = "list what the step would read and write, and write nothing"
        parser.add_argument("--dry-run", action="store_true", help=text)
        add_base_arguments(parser)
        parser.add_argument(
            "--metrics-file",
            metavar="FILE",
            help="write metrics for Prometheus's textfile collector here; default: "
            f"<run>/{metrics_file(self.name)}",
        )
        return parser

    def answer(self, job: Job) -> Answer:
        """Run the step; store its record in the run."""
        row = STEPS[self.name]
        writes, reads = written_steps(job.recipe, self.name), row.reads(job.recipe)
        if job.arguments.metrics_file:
            metrics_path(job.arguments.metrics_file)  # now, not after hours
        if job.arguments.dry_run:
            summary = dry_run_summary(job, reads, writes)
            return Answer(not summary["conflicts"], describe_dry_run(summary), summary)
        if job.bases.runs:
            take_over(job)
        # The leader begins where a manifest is missing, and some input of the step is there.
        begins = (
            job.is_leader
            and not all(map(job.has, there_or_needed(job, writes)))
            and (not reads or any(map(job.has, reads)))
        )
        if begins:
            job.store.check(join_uri(job.run_uri, STORE_CHECK_FOLDER))
            begin(job, row.writes(job.recipe))
            log(f"begins: recipe {job.recipe.name}, run {printable(job.run_uri)}")
        started, before = time.monotonic(), REQUESTS.total()
        try:
            results = self.run(job)
        except RecipeConflictError as error:
            raise RecipeConflictError(error.said, error.remedy, changes_since_start(job)) from error
        except Exception:
            if begins:
                remove_start_record(job, writes)
            raise
        seconds = time.monotonic() - started
        is_fresh = not all(result.was_finished for result in results)
        summary = {
            "step": self.name,
            "status": "done" if is_fresh else "nothing to do",
            "seconds": round(seconds, 2),
            "task_seconds": round(job.tasks.seconds, 2),
            "requests": asdict(REQUESTS.total() - before + job.tasks.requests),
            "device_faults": [asdict(each) for each in job.tasks.faults],
            "manifests": {each.manifest.step: tallies(each.manifest) for each in results},
            "measures": {
                each.manifest.step: measures
                for each in results
                if (measures := last_measures(each.manifest))
            },
        }
        if job.is_leader:
            store_record(job, summary, writes, is_fresh)
            text = metrics_text(summary, time.time())
            if job.arguments.metrics_file:
                write_metrics(metrics_path(job.arguments.metrics_file), text)
            elif is_fresh:
                job.store.put(join_uri(job.run_uri, metrics_file(self.name)), text.encode())
            if begins:
                end(job)
                log(f"done in {elapsed_text(started)}")
        return Answer(True, describe(summary), summary)


@dataclass(frozen=True)
class Query:
    """Query is a command that writes no manifest: its function and its exit codes."""

    name: str
    description: str
    exit_codes: str
    answer: Callable[[Job], Answer]

    def parser(self) -> argparse.ArgumentParser:
        """Return a parser of the arguments that every query takes."""
        return job_parser(self.name, self.description, self.exit_codes)


def main(command: Step | Query, arguments: argparse.Namespace | None = None) -> NoReturn:
    """Run the step or query with these arguments, or the command line's; exit with its code."""
    with ended_by_closed_pipe():
        arguments = arguments or command.parser().parse_args()
        separate_standard_error()
        begin_log(command.name, arguments.log_format)
        try:
            job = open_job(command.name, arguments)
        except (ConfigurationError, StoreError) as error:
            is_users = isinstance(error, ConfigurationError | PrefixError)
            sys.exit(fail(command.name, error, 2 if is_users else 1))
        before = REQUESTS.total()
        try:
            answer = command.answer(job)
        except KeyboardInterrupt:
            report_error(command.name, "interrupted: the same command resumes")
            sys.exit(130)
        except LossBudgetExceededError as error:
            sys.exit(fail(command.name, error, 3))
        except ConfigurationError as error:
            sys.exit(fail(command.name, error, 2))
        except (ValueError, ArithmeticError, OSError, StoreError, RuntimeError) as error:
            sys.exit(fail(command.name, error, 1))
        if job.is_leader:
            document = answer.document
            if isinstance(command, Query):
                document |= {"requests": asdict(REQUESTS.total() - before + job.tasks.requests)}
            print(json.dumps(document) if arguments.json else printed(answer.text), flush=True)
        sys.exit(0 if answer.is_good else 1)


@contextmanager
def ending(name: str) -> Iterator[None]:
    """Exit with 2 for bad usage, and with 1 for what failed, after one line that says why."""
    try:
        yield
    except (OverflowError, PrefixError, ValueError) as error:
        sys.exit(fail(name, error, 2))
    except (OSError, RuntimeError, StoreError) as error:
        sys.exit(fail(name, error, 1))


def fail(name: str, error: Exception, code: int) -> int:
    """Print what failed on standard error; return the exit code."""
    report_error(name, error)
    return code
