"""Show how far a run is: hours done, time left, quarantine.

megahour status --recipe demo --run runs/demo
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from infra.store.object_store import ObjectNotFound, join_uri
from jobs.cli.begun import begun
from jobs.cli.catalogue import (
    ALIGN,
    EVALUATE,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    REPARTITION,
    STEPS,
)
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job, written_steps
from pipeline.audit.job_records import parse_job_record
from pipeline.records import Tally
from pipeline.runs.commit import read_commits
from pipeline.runs.manifest import is_finished, read_manifest
from pipeline.runs.names import (
    ALL_SUBSETS,
    HELDOUT,
    LABELLED,
    OPTIONAL_STEPS,
    UNLABELLED,
    features_step,
    job_record,
    selection_step,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one step of a job: hours that are done and in quarantine, and those it reads.

    `hours_in` is 0 where the step's input is not there yet, and `left_s` below 0 where no time can
    be said.
    """

    state: str
    hours_done: float
    hours_in: float
    quarantined: int
    left_s: float = -1.0


def status(job: Job) -> Answer:
    """Read manifests, commits of steps under way, and what jobs said as they began."""
    steps: dict[str, dict[str, Progress]] = {}
    for name in STEPS:
        written = written_steps(job.recipe, name)
        there = [each for each in written if each not in OPTIONAL_STEPS or _has(job, each)]
        steps[name] = {each: progress_of(job, name, each) for each in there}
    plain = {name: {step: asdict(p) for step, p in each.items()} for name, each in steps.items()}
    document = {
        "step": "status",
        "run": job.run_uri,
        "extends": list(job.increment.bases) if job.increment else [],
        "steps": plain,
        "seconds": {name: _seconds(job, name) for name in STEPS},
    }
    return Answer(True, describe(job, steps), document)


def _has(job: Job, step: str) -> bool:
    return is_finished(job.store, job.run_uri, step)


def progress_of(job: Job, name: str, step: str) -> Progress:
    """Say how far one step is, by its manifest or by the commits of its tasks."""
    if _has(job, step):
        found = read_manifest(job.store, job.run_uri, step)
        out, total, lost = found.tally_out, found.tally_in, found.quarantined
        return Progress("done", out.hours, total.hours, lost.utterances)
    commits = read_commits(job.store, job.run_uri, step)
    started = begun(job, name)
    if not commits and started is None:
        return Progress("to do", 0.0, 0.0, 0)
    read = sum((each.tally_in for each in commits), Tally())
    out = sum((each.tally_out for each in commits), Tally())
    lost = sum((each.quarantined for each in commits), Tally())
    hours_in = hours_to_read(job, name, step)
    since = datetime.fromisoformat(started["started_at"]) if started else datetime.now(UTC)
    elapsed_s = (datetime.now(UTC) - since).total_seconds()
    left_s = time_left(read.hours, hours_in, elapsed_s) if started else -1.0
    return Progress("under way", out.hours, hours_in, lost.utterances, left_s)


def time_left(hours_done: float, hours_in: float, elapsed_s: float) -> float:
    """Return the seconds that the other hours take at the rate so far; below 0 if unknown."""
    if hours_done <= 0 or hours_in < hours_done:
        return -1.0
    return elapsed_s * (hours_in - hours_done) / hours_done


def hours_to_read(job: Job, name: str, step: str) -> float:
    """Return the hours that a step's tasks read together; 0 where they are not known."""
    subset = step.rpartition("/")[2]
    reads = INPUTS.get(name, ())
    of_subset = [each for each in reads if each.endswith(f"/{subset}")] or list(reads[:1])
    if not of_subset or not _has(job, of_subset[0]):
        return 0.0
    found = read_manifest(job.store, job.run_uri, of_subset[0])
    # An increment's tasks read what it has selected itself.
    return found.tally_out.hours - (found.extends.tally_out.hours if found.extends else 0.0)


INPUTS: Mapping[str, tuple[str, ...]] = {
    EXTRACT_FEATURES: tuple(map(selection_step, ALL_SUBSETS)),
    ALIGN: (features_step(LABELLED),),
    GENERATE_TARGETS: (features_step(UNLABELLED),),
    REPARTITION: (features_step(UNLABELLED),),
    EVALUATE: (features_step(HELDOUT),),
}
"""The step whose hours a job's tasks read together."""


def _seconds(job: Job, name: str) -> float:
    """Return how long a finished job took; 0 where it has no record."""
    try:
        data = job.store.get(join_uri(job.run_uri, job_record(name)))
        return float(parse_job_record(data, "")["seconds"])
    except (ObjectNotFound, ValueError):
        return 0.0


def describe(job: Job, steps: Mapping[str, Mapping[str, Progress]]) -> str:
    """Format one line for each step of each job, with totals below."""
    lines = [job.run_uri, *(f"  extends {each}" for each in _bases(job))]
    lines += [f"  {'':<18}{'':<24}{'state':<11}{'hours':>18}{'quarantined':>13}"]
    for name, by_step in steps.items():
        for step, each in by_step.items():
            lines.append(f"  {name:<18}{step:<24}{_columns(each)}")
    done = sum(all(p.state == "done" for p in each.values()) for each in steps.values())
    lines.append(f"{done} of {len(steps)} jobs are done")
    return "\n".join(lines)


def _bases(job: Job) -> tuple[str, ...]:
    return job.increment.bases if job.increment else ()


def _columns(progress: Progress) -> str:
    hours = f"{progress.hours_done:,.2f}"
    if progress.state == "under way" and progress.hours_in:
        hours = f"{hours} of {progress.hours_in:,.2f}"
    left = f"  about {_span(progress.left_s)} left" if progress.left_s >= 0 else ""
    return f"{progress.state:<11}{hours:>18}{progress.quarantined:>13,}{left}"


def _span(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


QUERY = Query(
    name="status",
    description="Show each step of a run, also while it runs: done, under way or to do; its hours "
    "of audio, the rest of them and the time that they take at the rate so far; the utterances in "
    "quarantine. Steps are those of the recipe. Nothing is written.",
    exit_codes="0 shown, 1 failed, 2 bad usage or recipe.",
    answer=status,
)

if __name__ == "__main__":
    main(QUERY)
