"""Verify sizes, digests and counts of all objects of a run.

megahour verify --recipe demo --run runs/demo [--sweep] [--audio]
spark-submit dist/verify.py --cluster CLUSTER.toml ... lets a cluster's tasks read the objects.
"""

from dataclasses import asdict

from infra.log_lines import progress_bar
from infra.settings import printable
from jobs.cli.arguments import recipe_path
from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job, bases_said
from jobs.cli.record import read_job_record
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import STEPS, optional_steps, step_configs, written_steps
from pipeline.audit.verify import Expectation, Verification, sweep, verify_run
from pipeline.runs.names import DEV, SCRATCH_FOLDER, features_step
from training.settings.recipe import Recipe, read_recipe


def verify(job: Job) -> Answer:
    """Read every object that the run's records name; sweep if --sweep is given."""
    with (
        progress_bar(description="verify", unit="B", unit_scale=True) as bar,
        distribute_on_spark(job) as distribute,
    ):

        def progress(num_bytes: int, total: int) -> None:
            bar.total = total
            bar.update(num_bytes)

        jobs = {name: written_steps(job.recipe, name) for name in STEPS}
        has_dev = job.has(features_step(DEV))
        configs = step_configs(job.recipe, trained_recipe(job), has_dev)
        expectation = Expectation(configs, jobs, optional_steps(job.recipe))
        found = verify_run(
            *job.place,
            progress,
            expectation,
            reads_audio=job.arguments.audio,
            # On one host threads read as fast as tasks, and Spark takes seconds to start.
            distribute=None if job.cluster.is_local else distribute,
        )
    if not found.steps:
        raise ValueError(f"{job.run_uri} holds no step of a run: check --run")
    refusal = None
    if job.arguments.sweep:
        try:
            sweep(job.store, job.run_uri, found)
        except ValueError as error:
            refusal = str(error)
    is_good = not found.findings and refusal is None
    document = {
        "step": "verify",
        "status": "verified" if is_good else "failed",
        "run": job.run_uri,
        **asdict(job.bases),
        **asdict(found),
        "swept": job.arguments.sweep and refusal is None,
    }
    outcome = refusal or ("deleted" if job.arguments.sweep else "--sweep deletes them")
    text = describe(found, outcome)
    if job.bases.runs:
        text += f"\n{bases_said(job)[0].strip()}, whose objects are verified there"
    return Answer(is_good, text, document)


def trained_recipe(job: Job) -> Recipe:
    """Return the recipe with the trainers that --trainer chose, as the jobs' records say."""
    trainers: dict[str, str] = {}
    for name in (name for name, step in STEPS.items() if step.trains):
        # None: not trained yet, or damaged, which is a finding.
        trainers |= (read_job_record(job, name) or {}).get("trainers", {})
    if not trainers:
        return job.recipe
    return read_recipe(recipe_path(job.arguments.recipe), job.arguments.set, trainers)


def describe(found: Verification, outcome: str) -> str:
    """Format findings, orphans and scratch as lines; `outcome` says what became of these two."""
    read = f"{len(found.steps)} steps, {found.num_objects:,} objects, {found.num_bytes:,} bytes"
    lines = []
    for each in found.findings:
        rows = {"expected": each.expected, "found": each.found, "remedy": each.remedy}
        lines += [printable(each.object), *(f"  {name:<9} {text}" for name, text in rows.items())]
    count = len(found.findings)
    result = f"{count} findings" if count else "all is as the manifests say"
    lines.append(f"verify: {read}: {result}")
    if found.unfinished:
        lines.append(f"unfinished, not verified: {', '.join(found.unfinished)}")
    if found.orphans:
        lines += [f"orphan: {printable(key)}" for key in found.orphans]
        lines.append(f"{len(found.orphans)} orphans, which no record names: {outcome}")
    if found.scratch:
        folders = sorted({key.partition(f"/{SCRATCH_FOLDER}/")[0] for key in found.scratch})
        where = f"of the finished steps {', '.join(folders)}"
        lines.append(f"{len(found.scratch)} objects of scratch {where}: {outcome}")
    return "\n".join(lines)


QUERY = Query(
    name="verify",
    description="Read every object that the manifests and records of a run name, and its corpus. "
    "Compare sizes, SHA-256, utterances and milliseconds, commits with manifests, inputs with the "
    "objects read, settings with the recipe, the utterances of each step with those of the step "
    "before, and the subsets with each other. List orphans, which no record names, and the scratch "
    "of finished steps, which no step reads again.",
    exit_codes="0 all is as the manifests say (orphans and scratch do no harm), 1 something is "
    "not, or an object is there that no step stored (each with a remedy), or the query failed, "
    "2 bad usage or recipe.",
    answer=verify,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="delete orphans and scratch; refused while there are findings or unfinished steps",
    )
    parser.add_argument(
        "--audio",
        action="store_true",
        help="read all audio in S3, also what a listing confirms to be as extraction read it; "
        "local audio is always read",
    )
    main(QUERY, parser.parse_args())
