"""Take ledger rows back, so that lost audio is read again.

megahour retry --recipe demo --run runs/demo --reason missing_object,access_denied
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from infra.settings import ConfigurationError
from infra.store.object_store import join_uri
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job
from jobs.run_table import STEPS, written, written_steps
from pipeline.runs.ledger import LostRows, find_lost_rows, has_begun, remove_step, take_back
from pipeline.runs.names import (
    ALL_SUBSETS,
    TARGETS_STEP,
    TARGETS_TUNING_STEP,
    features_step,
    job_record,
    targets_rounds,
)
from pipeline.steps.features import AUDIO_REASONS
from pipeline.steps.targets import TEACHER_FAILED
from training.settings.recipe import Recipe

REASONS = (*AUDIO_REASONS, TEACHER_FAILED)


def retry(job: Job) -> Answer:
    """Take rows back, and remove the later steps that were made from them if that is asked for."""
    arguments = job.arguments
    rounds = targets_rounds(job.recipe.targets.rounds)
    steps = [*map(features_step, ALL_SUBSETS), *(each.targets for each in rounds)]
    if not any(has_begun(job.store, job.run_uri, each) for each in steps):
        raise ValueError(f"{job.run_uri}: none of {', '.join(steps)} has begun: check --run")
    if arguments.step:
        steps = [arguments.step]
    reasons = [reason.strip() for reason in arguments.reason.split(",")]
    if unknown := [reason for reason in reasons if reason not in REASONS]:
        raise ConfigurationError(f"--reason {unknown[0]!r}: need some of {', '.join(REASONS)}")
    rows = [
        each for step in steps for each in find_lost_rows(job.store, job.run_uri, step, reasons)
    ]
    # Where the recipe states the settings of the teacher's search, none is tuned.
    is_tuned = has_begun(job.store, job.run_uri, TARGETS_TUNING_STEP)
    unread = () if is_tuned else (TARGETS_TUNING_STEP,)
    made_from = later_steps(job.recipe, {each.step for each in rows}, unread)
    later = [step for step in made_from if has_begun(job.store, job.run_uri, step)]
    is_refused = bool(later) and not arguments.with_later_steps
    is_done = bool(rows) and not is_refused and not arguments.dry_run
    if is_done:
        remove(job, rows, later)
    document: dict[str, Any] = {
        "step": "retry",
        "status": "done" if is_done else "refused" if is_refused else "nothing done",
        "run": job.run_uri,
        "rows": [asdict(each) for each in rows],
        "later_steps": later,
    }
    return Answer(not is_refused, describe(rows, later, document["status"]), document)


def later_steps(
    recipe: Recipe, changed: Collection[str], unread: Collection[str] = ()
) -> list[str]:
    """Return the steps that read what changes, directly or through others, in a run's order.

    What changes in the `unread` steps changes no other.
    """
    outdated, found = set(changed), list[str]()
    for name, each in written(recipe).items():
        if outdated & {*each.reads} - {*unread}:
            outdated.add(name)
            found.append(name)
    return found


def remove(job: Job, rows: Sequence[LostRows], later: Sequence[str]) -> None:
    """Remove the later steps, the last one first, then the rows' tasks; jobs' records go first."""
    changed = {*later, *(each.step for each in rows)}
    for name in STEPS:
        if changed & {*written_steps(job.recipe, name)}:
            job.store.delete(join_uri(job.run_uri, job_record(name)))
    for step in reversed(later):
        remove_step(job.store, job.run_uri, step)
    take_back(job.store, job.run_uri, rows)


def describe(rows: Sequence[LostRows], later: Sequence[str], status: str) -> str:
    """Format what is taken back and removed, and what to do next, as lines."""
    if not rows:
        return "retry: no ledger has rows of these reasons"
    lines = []
    for step in sorted({each.step for each in rows}):
        tasks = [each for each in rows if each.step == step]
        reasons: Counter[str] = sum((Counter(each.reasons) for each in tasks), Counter())
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        lines.append(f"{step}: {counts}, in {len(tasks)} tasks")
    lines += [f"made from these: {step}" for step in later]
    return "\n".join([*lines, f"retry: {OUTCOMES[status]}"])


OUTCOMES = {
    "done": "taken back; run the same command as before: it does these tasks and steps again",
    "refused": "nothing done: the later steps would no longer fit; --with-later-steps removes them",
    "nothing done": "nothing done, as --dry-run asks",
}

QUERY = Query(
    name="retry",
    description="Take rows back from the ledgers of feature extraction, for audio that can be read "
    "now: access was denied, objects were missing, files have been replaced; and from those of "
    "target generation, for utterances that the teacher failed at. The commits of the tasks with "
    "such rows are removed, and the manifest of their step. The same `megahour run`, or job, as "
    "before then does these tasks again, and its counts balance. "
    "Use it while no step of the run is running. It may be killed and started again.",
    exit_codes="0 done or nothing to do, 1 refused (later steps were made from these rows) or "
    "failed, 2 bad usage or recipe.",
    answer=retry,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    parser.add_argument(
        "--reason",
        required=True,
        metavar="REASON,...",
        help=f"reasons of the rows to take back: {', '.join(REASONS)}",
    )
    parser.add_argument(
        "--step",
        choices=(*map(features_step, ALL_SUBSETS), TARGETS_STEP),
        help="take rows back from this step alone; default: from all",
    )
    parser.add_argument(
        "--with-later-steps",
        action="store_true",
        help="also remove the steps that were made from these rows, such as targets and models; "
        "they are made again by the same `megahour run`",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    main(QUERY, parser.parse_args())
