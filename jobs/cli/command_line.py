"""What all jobs share: arguments, exit codes, the JSON summary, and how long the step took.

Exit codes: 0 done (also when there was nothing left to do), 1 failed, 2 bad usage or recipe,
3 loss budget exceeded. With --json one object goes to standard output; logs go to standard error.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

from infra.cluster import Cluster, load_cluster
from infra.configuration import ConfigurationError, canonical_json, digest
from infra.spark.standard_error import separate_standard_error
from infra.store.object_store import ObjectStore, StoreError, join_uri, normalize_uri
from infra.store.request_counts import REQUESTS, RequestCounts, TaskTotals
from pipeline.runs.ledger import LossBudgetExceededError
from pipeline.runs.manifest import Manifest, manifest_uri
from training.recipes import Recipe, read_recipe

RECIPES = files("jobs") / "recipes"  # the code may lie in a zip


@dataclass(frozen=True)
class Job:
    """One invocation: the recipe, the run, and the store that both confine."""

    step: str
    recipe: Recipe
    run_uri: str
    corpus_uri: str
    store: ObjectStore
    cluster: Cluster
    arguments: argparse.Namespace
    tasks: TaskTotals = field(default_factory=TaskTotals)


Result = Sequence[tuple[Manifest, bool]]
"""The manifests that a job wrote or found, each with whether it was there before."""


@dataclass(frozen=True)
class Step:
    """A job's description: the manifests it reads and writes, and the function that does it."""

    name: str
    description: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[[Job], Result]

    def parser(self) -> argparse.ArgumentParser:
        """The arguments that every job takes."""
        parser = argparse.ArgumentParser(
            prog=f"jobs/{self.name}.py",
            description=self.description,
            epilog="Exit codes: 0 done or nothing to do, 1 failed, 2 bad usage or recipe, "
            "3 loss budget exceeded. A finished step is never done again.",
        )
        parser.add_argument(
            "--recipe", required=True, help="TOML file, or the name of one in jobs/recipes (demo)"
        )
        parser.add_argument("--run", required=True, help="s3:// URI or path that holds the run")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="override one value of the recipe; may be repeated",
        )
        parser.add_argument("--cluster", help="cluster TOML or name; default: the recipe's")
        parser.add_argument("--dry-run", action="store_true", help="say what would be done")
        parser.add_argument("--json", action="store_true", help="print one JSON object when done")
        return parser


def main(step: Step, parser: argparse.ArgumentParser | None = None, is_leader: bool = True) -> None:
    """Parse the command line, run the step, and exit with its code."""
    arguments = (parser or step.parser()).parse_args()
    sys.exit(execute(step, arguments, is_leader))


def execute(step: Step, arguments: argparse.Namespace, is_leader: bool) -> int:
    """Run the step; turn what a user can cause into a message and an exit code."""
    separate_standard_error()
    try:
        job = open_job(step, arguments)
    except (ConfigurationError, StoreError) as error:
        return fail(step, error, 2)
    try:
        summary = dry_run(step, job) if arguments.dry_run else run(step, job, is_leader)
    except LossBudgetExceededError as error:
        return fail(step, error, 3)
    except ConfigurationError as error:
        return fail(step, error, 2)
    except (ValueError, OSError, StoreError, RuntimeError) as error:
        return fail(step, error, 1)
    if is_leader:
        print(json.dumps(summary) if arguments.json else describe(summary), flush=True)
    return 0


class Named(Protocol):
    """A job, for its name."""

    @property
    def name(self) -> str:
        """The job's file name."""
        ...


def fail(step: Named, error: Exception, code: int) -> int:
    """Say on standard error what went wrong."""
    print(f"{step.name}: {error}", file=sys.stderr, flush=True)
    return code


def open_job(step: Named, arguments: argparse.Namespace) -> Job:
    """Read the recipe and confine the store to the prefixes that the step's cluster may use."""
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    run_uri = normalize_uri(arguments.run)
    corpus_uri = normalize_uri(recipe.corpus.uri or join_uri(run_uri, "corpus"))
    cluster = load_cluster(arguments.cluster or recipe.cluster or step.name)
    prefixes = cluster.readable(run_uri, corpus_uri)
    store = ObjectStore((*prefixes, *recipe.corpus.audio_prefixes))
    return Job(step.name, recipe, run_uri, corpus_uri, store, cluster, arguments)


def recipe_path(recipe: str) -> str | Traversable:
    """A recipe's file: as given, or one of ours by name."""
    ours = RECIPES / f"{recipe}.toml"
    return ours if ours.is_file() and not Path(recipe).is_file() else recipe


def dry_run(step: Step, job: Job) -> dict[str, Any]:
    """What the step would read and write, and which of it is there."""

    def state(name: str) -> str:
        return "there" if job.store.exists(manifest_uri(job.run_uri, name)) else "missing"

    return {
        "step": step.name,
        "status": "dry run",
        "run": job.run_uri,
        "recipe_digest": digest(job.recipe),
        "reads": {name: state(name) for name in step.reads},
        "writes": {name: state(name) for name in step.writes},
    }


def run(step: Step, job: Job, is_leader: bool) -> dict[str, Any]:
    """Run the step; keep its resolved recipe and its duration unless all was done before."""
    started, before = time.monotonic(), REQUESTS.total()
    results = step.run(job)
    seconds = round(time.monotonic() - started, 2)
    fresh = [manifest for manifest, was_done in results if not was_done]
    summary = {
        "step": step.name,
        "status": "done" if fresh else "nothing to do",
        "seconds": seconds,
        "task_seconds": round(job.tasks.seconds, 2),
        "requests": asdict(REQUESTS.total() - before + job.tasks.requests),
        "manifests": {manifest.step: tallies(manifest) for manifest, _ in results},
    }
    if fresh and is_leader:
        record = {
            **summary,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe_digest": digest(job.recipe),
            "recipe": json.loads(canonical_json(job.recipe)),
        }
        uri = join_uri(job.run_uri, "steps", f"{step.name}.json")
        job.store.put(uri, (json.dumps(record, indent=1) + "\n").encode())
    return summary


def tallies(manifest: Manifest) -> dict[str, Any]:
    """A manifest's counts and hours, for people and for the report."""
    return {
        "utterances_in": manifest.tally_in.utterances,
        "utterances_out": manifest.tally_out.utterances,
        "quarantined": manifest.quarantined.utterances,
        "hours_in": round(manifest.tally_in.hours, 4),
        "hours_out": round(manifest.tally_out.hours, 4),
        "hours_quarantined": round(manifest.quarantined.hours, 4),
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary as lines for people."""
    if summary["status"] == "dry run":
        lines = [f"{summary['step']}: dry run on {summary['run']}"]
        for verb in ("reads", "writes"):
            lines += [f"  {verb} {name}: {state}" for name, state in summary[verb].items()]
        return "\n".join(lines)
    requests = RequestCounts(**summary["requests"])
    lines = [
        f"{summary['step']}: {summary['status']} ({summary['seconds']:.1f} s, "
        f"{requests.num_requests:,} requests, {requests.retries:,} retried)"
    ]
    lines += [
        f"  {name}: {counts['utterances_out']} utterances, {counts['hours_out']:.2f} h"
        + (f", {counts['quarantined']} quarantined" if counts["quarantined"] else "")
        for name, counts in summary["manifests"].items()
    ]
    return "\n".join(lines)
