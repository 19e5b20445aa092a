"""Show how far a run is: hours done, time left, quarantine.

megahour status --recipe demo --run runs/demo
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from infra.store.object_store import ObjectNotFound
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import (
    Job,
    bases_said,
    hours_read,
    read_start_record,
    reading_commits,
    training_hours,
)
from jobs.cli.record import read_job_record, there_or_needed
from jobs.run_table import STEPS, Written
from pipeline.records import Tally
from pipeline.runs.commit import each_commit
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import INGEST_STEP, METADATA_FOLDER, SELECTION_FOLDER, folder_of
from training.data.sub_epochs import last_measures, measures_text, newest_place


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one step of a job: hours that are done and in quarantine, and those it reads.

    `hours_in` is 0 where the step's input is not there yet, and `left_s` is negative where there is
    no estimate. `measures` are those of a training's last sub-epoch, {} for other steps.
    """

    state: str
    hours_done: float
    hours_in: float
    quarantined: int
    left_s: float = -1.0
    measures: Mapping[str, float] = field(default_factory=dict)


def status(job: Job) -> Answer:
    """Read manifests, commits of steps under way, and what jobs said as they began."""
    steps: dict[str, dict[str, Progress]] = {}
    for name, step in STEPS.items():
        made = step.writes(job.recipe)
        there = there_or_needed(job, [each.name for each in made])
        steps[name] = {
            each.name: progress_of(job, name, each, made) for each in made if each.name in there
        }
    plain = {name: {step: asdict(p) for step, p in each.items()} for name, each in steps.items()}
    document = {
        "step": "status",
        "run": job.run_uri,
        **asdict(job.bases),
        "steps": plain,
        # A job without a record has taken no time that is known.
        "seconds": {
            name: float((read_job_record(job, name) or {}).get("seconds", 0.0)) for name in STEPS
        },
    }
    return Answer(True, describe(job, steps), document)


def progress_of(job: Job, name: str, step: Written, made: Sequence[Written]) -> Progress:
    """Say how far one of the steps that a job makes is.

    Its manifest says so, its newest checkpoint, or its tasks' commits.
    """
    if job.has(step.name):
        found = job.manifest(step.name)
        out, total, lost = found.tally_out, found.tally_in, found.quarantined
        measures = last_measures(found)
        return Progress("done", out.hours, total.hours, lost.utterances, measures=measures)
    measures = {}
    tally_in, tally_out, lost = Tally(), Tally(), Tally()
    if step.fit is None:
        for commit in each_commit(job.store, reading_commits(job, step.name)):
            tally_in, tally_out = tally_in + commit.tally_in, tally_out + commit.tally_out
            lost += commit.quarantined
        read, done, hours_in = tally_in.hours, tally_out.hours, hours_to_read(job, step)
    else:
        read, hours_in = training_hours(job, step.fit)
        done = read
        measures = newest_place(job.store, job.run_uri, step.name).measures
    started = read_start_record(job, name)
    if started is None and read <= 0:
        return Progress("to do", 0.0, 0.0, 0)
    left_s = -1.0
    if started is not None:
        since, kin = since_other_kinds(job, made, step, started["started_at"])
        # The rate is that of the last start, in this step and the others of its kind.
        before = sum(started["hours_before"].get(each.name, 0.0) for each in (step, *kin))
        of_start = read + sum(hours_read(job, each) for each in kin) - before
        if of_start > 0 and hours_in >= read:
            elapsed_s = (datetime.now(UTC) - since).total_seconds()
            left_s = elapsed_s * (hours_in - read) / of_start
    times = step.times_read
    done, hours_in = done / times, hours_in / times
    return Progress("under way", done, hours_in, lost.utterances, left_s, measures)


def since_other_kinds(
    job: Job, made: Sequence[Written], step: Written, started_at: str
) -> tuple[datetime, list[Written]]:
    """Return since when a job's last start is at a step's kind, and the other steps of it since.

    A job does one after the other, such as the features of each subset. Steps of other kinds have
    other rates: evaluation begins when its scales are tuned.
    """
    ends = [(each, written_at(job, each.name)) for each in made if each.name != step.name]
    of_others = [at for each, at in ends if at and kind_of(each) != kind_of(step)]
    since = max([datetime.fromisoformat(started_at), *of_others])
    kin = [(each, at) for each, at in ends if kind_of(each) == kind_of(step)]
    return since, [each for each, at in kin if (at or since) >= since]


def kind_of(step: Written) -> str:
    """Return what has the rate of a step: its folder, or a training alone."""
    return folder_of(step.name) if step.fit is None else step.name


def written_at(job: Job, step: str) -> datetime | None:
    """Return when a step was finished; None for an unfinished one."""
    with suppress(ObjectNotFound):
        return job.store.head(manifest_uri(job.run_uri, step)).written_at
    return None


def hours_to_read(job: Job, step: Written) -> float:
    """Return the hours that a step's tasks read together; 0 where they are not known."""
    if folder_of(step.name) == SELECTION_FOLDER:
        # Of the subset's metadata, what this run has ingested.
        if not job.has(INGEST_STEP):
            return 0.0
        outputs = job.manifest(INGEST_STEP).outputs
        folder = f"{METADATA_FOLDER}/{step.name.rpartition('/')[2]}/"
        of_subset = (each.tally for each in outputs if each.key.startswith(folder))
        return sum(of_subset, Tally()).hours
    if not step.hours_of or not job.has(step.hours_of):
        return 0.0
    found = job.manifest(step.hours_of)
    hours = found.tally_out.hours
    # An increment's tasks read what it has selected itself, and of its base what it inherits.
    if found.extends and not found.is_inherited:
        hours -= found.extends.tally_out.hours
    return step.times_read * hours


def describe(job: Job, steps: Mapping[str, Mapping[str, Progress]]) -> str:
    """Format one line for each step of each job, with totals below."""
    lines = [job.run_uri, *bases_said(job)]
    lines += [f"  {'':<18}{'':<24}{'state':<11}{'hours':>18}{'quarantined':>13}"]
    for name, by_step in steps.items():
        for step, each in by_step.items():
            lines.append(f"  {name:<18}{step:<24}{_columns(each)}")
            if measured := measures_text(each.measures):
                lines.append(f"  {'':<18}  {measured}")
    done = sum(all(p.state == "done" for p in each.values()) for each in steps.values())
    lines.append(f"{done} of {len(steps)} steps are done")
    return "\n".join(lines)


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
    "of audio, the rest of them and the time that they take at the rate so far, but for ingest and "
    "tuning, whose work is not known before; the utterances in quarantine. Below each model are "
    "cross-entropy and frame accuracy of its last sub-epoch, in training and on development "
    "speakers or those left out. Steps are those of the recipe. Nothing is written.",
    exit_codes="0 shown, 1 failed, 2 bad usage or recipe.",
    answer=status,
)

if __name__ == "__main__":
    main(QUERY)
