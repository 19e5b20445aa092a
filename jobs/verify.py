"""Verify sizes, digests and counts of all objects of a run.

megahour verify --recipe demo --run runs/demo [--sweep]
"""

from dataclasses import asdict

from tqdm import tqdm

from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job
from pipeline.audit.step_records import Finding
from pipeline.audit.verify import Verification, sweep, verify_run


def verify(job: Job) -> Answer:
    """Read every object that the manifests name; sweep orphans if --sweep is given."""
    with tqdm(desc="verify", unit="B", unit_scale=True, disable=None) as bar:

        def progress(num_bytes: int, total: int) -> None:
            bar.total = total
            bar.update(num_bytes)

        found = verify_run(job.store, job.run_uri, job.corpus_uri, progress)
    if not found.steps:
        raise ValueError(f"{job.run_uri} holds no step of a run: check --run")
    refusal = try_to_sweep(job, found) if job.arguments.sweep else None
    is_good = not found.findings and refusal is None
    document = {
        "step": "verify",
        "status": "verified" if is_good else "failed",
        "run": job.run_uri,
        **asdict(found),
        "swept": job.arguments.sweep and refusal is None,
    }
    outcome = refusal or ("deleted" if job.arguments.sweep else "--sweep deletes them")
    return Answer(is_good, describe(found, outcome), document)


def try_to_sweep(job: Job, found: Verification) -> str | None:
    """Delete the orphans; return None, or the reason why none was deleted."""
    try:
        sweep(job.store, job.run_uri, found)
    except ValueError as error:
        return str(error)
    return None


def describe(found: Verification, outcome: str) -> str:
    """Format findings and orphans as lines; `outcome` says what became of the orphans."""
    read = f"{len(found.steps)} steps, {found.num_objects:,} objects, {found.num_bytes:,} bytes"
    lines = [line for finding in found.findings for line in block(finding)]
    count = len(found.findings)
    result = f"{count} findings" if count else "all is as the manifests say"
    lines.append(f"verify: {read}: {result}")
    if found.unfinished:
        lines.append(f"unfinished, not verified: {', '.join(found.unfinished)}")
    if found.orphans:
        lines += [f"orphan: {key}" for key in found.orphans]
        lines.append(f"{len(found.orphans)} orphans, which no record names: {outcome}")
    return "\n".join(lines)


def block(finding: Finding) -> list[str]:
    """Format one finding below its object."""
    rows = {"expected": finding.expected, "found": finding.found, "remedy": finding.remedy}
    return [finding.object, *(f"  {name:<9} {text}" for name, text in rows.items())]


QUERY = Query(
    name="verify",
    description="Read every object that the manifests of a run name. Compare sizes, SHA-256, "
    "utterances and milliseconds, commits with manifests, inputs with the objects read, and the "
    "utterances of each step with those of the step before. List orphans, which no record names.",
    exit_codes="0 all is as the manifests say, 1 something is not (each with a remedy) or "
    "the query failed, 2 bad usage or recipe.",
    answer=verify,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="delete the orphans; refused while there are findings or unfinished steps",
    )
    main(QUERY, parser.parse_args())
