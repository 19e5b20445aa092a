"""Report word error rates, hours, seconds and learning curves.

megahour report --recipe demo --run runs/demo
megahour report --recipe demo --run runs/20h --curve runs/1h runs/5h
megahour report --recipe demo --run runs/new --compare runs/old
megahour report --recipe demo --run runs/mine --oracle runs/oracle
"""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from infra.store.object_store import join_uri
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.report_page.collect import (
    OtherReport,
    build_report,
    comparison,
    hours_point,
    other_ledger_steps,
    record_uris,
    recovered,
    required_reads,
)
from jobs.report_page.page import render_report
from jobs.report_page.wording import (
    Report,
    by_placement,
    certainty,
    development_rates,
    headline,
    in_order,
    interval,
    mean,
    models_and_oracle,
    number,
    printable,
    recovering,
    recovery_statement,
    reductions,
    scopes,
    unknown_words,
    with_all_parts,
)
from jobs.run_table import REPORT
from pipeline.runs.engine import StepResult, StepSpec, run_step
from pipeline.runs.manifest import (
    input_digests,
    is_finished,
    manifest_uri,
    read_manifest,
    sha256,
    store_again,
)
from pipeline.runs.names import (
    CERTIFICATE_STEP,
    EVALUATION_STEP,
    KBEST_COSTS_STEP,
    ORACLE,
    PLAN_DOCUMENT,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    REPORT_STEP,
    sequence_trained,
)
from pipeline.runs.sealed_json import NamedObject, naming, seal

LATER_STEPS = (KBEST_COSTS_STEP, CERTIFICATE_STEP)
"""Steps that a run may have or lack, and that may be made after a report."""


def run(job: Job) -> StepResults:
    """Build the report from manifests and records; print the table.

    A call after a change of any input, such as a later plan or certificate, replaces the report.
    Any other call stores it again, so that a damaged one is whole.
    """
    arguments = job.arguments
    named = (*arguments.curve, *filter(None, (arguments.compare, arguments.oracle)))
    others = {uri: OtherReport.read(job, uri) for uri in dict.fromkeys(named)}
    spec = report_spec(job, {other.uri: other.sha256 for other in others.values()})
    report = build_report(job)
    if arguments.curve:
        curve = (others[uri].document for uri in arguments.curve)
        report["hours_curve"] = [hours_point(each) for each in (report, *curve)]
    if arguments.compare:
        report["comparison"] = comparison(job, others[arguments.compare])
    if arguments.oracle:
        report["oracle"] = recovered(job, others[arguments.oracle], report["hours"])
    result = run_report(spec)
    page = render_report(report).encode()
    document = {**report, "inputs": dict(result.manifest.inputs)}
    sealed = seal(naming(document, [NamedObject.of(REPORT_PAGE, page)]), indent=1)
    for key, data in ((REPORT_PAGE, page), (REPORT_DOCUMENT, sealed)):
        store_again(job.store, join_uri(job.run_uri, key), data)
    print(format_table(report), file=sys.stderr if arguments.json else sys.stdout)
    return [result]


def report_spec(job: Job, other_reports: Mapping[str, str]) -> StepSpec:
    """Return the step of a report: its manifests, and the digests of all other documents.

    Those are the jobs' records, the plan, which names its calibration, and other runs' reports,
    whose digests are given by URI.
    """
    store, run_uri = job.store, job.run_uri
    later = [step for step in LATER_STEPS if is_finished(store, run_uri, step)]
    reads = (*required_reads(job), *other_ledger_steps(store, run_uri, job.recipe), *later)
    uris = record_uris(store, run_uri)
    if store.exists(plan := join_uri(run_uri, PLAN_DOCUMENT)):
        uris.append(plan)
    documents = {uri.removeprefix(f"{run_uri}/"): sha256(store.get(uri)) for uri in uris}
    digests = {**documents, **other_reports}
    return StepSpec(store, run_uri, REPORT_STEP, {}, tuple(dict.fromkeys(reads)), digests)


def run_report(spec: StepSpec) -> StepResult:
    """Store the manifest of a report, in place of one that was made from other inputs."""
    if is_finished(spec.store, spec.run_uri, spec.step):
        stored = read_manifest(spec.store, spec.run_uri, spec.step)
        reads = input_digests(spec.store, spec.run_uri, spec.reads)
        if stored.inputs != {**reads, **spec.digests}:
            # A report has no readers among the steps: the newest one is the only one.
            spec.store.delete(manifest_uri(spec.run_uri, spec.step))
    evaluated = read_manifest(spec.store, spec.run_uri, EVALUATION_STEP).tally_out
    return run_step(spec, lambda step: step.lossless(evaluated))


LINE_WIDTH = 70

Rows = list[list[str]]
"""The cells of a table by row; the first row names the columns, the first column the rows."""


def format_table(report: Report) -> str:
    """Format headline, unknown words, error rates, recovery, confidence, development and plan."""
    report = with_all_parts(report)
    stated = (
        headline(report),
        certainty(report),
        recovery_statement(report),
        unknown_words(report),
    )
    blocks = [textwrap.fill(printable(text), LINE_WIDTH) for text in stated if text]
    blocks += _folded(_word_error_rows(report), least_width=7)
    for rows in (_recovery_rows, _confidence_rows, _development_rows, _plan_rows):
        blocks += _folded(rows(report))
    return "\n\n".join(blocks)


def _word_error_rows(report: Report) -> Rows:
    wer = report["wer"]
    placements = list(by_placement(wer))
    development = development_rates(report)
    has_mean = len(placements) > 1
    rates = {
        **{model: wer[model] for model in in_order(wer)},
        **_oracle_rates(report),
        **reductions(report),
    }
    heads = ["WER, %", *placements, *["mean"] * has_mean, *["dev"] * bool(development)]
    rows = [heads]
    for label, values in rates.items():
        shown = [values.get(name) for name in placements]
        shown += [mean(values)] * has_mean + [development.get(label)] * bool(development)
        rows.append([label, *("-" if each is None else f"{each:.1f}" for each in shown)])
    return rows


def _oracle_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return the oracle's word error rates by placement, before and after sMBR."""
    rates: dict[str, dict[str, float]] = {}
    for placement, found in report["oracle"].get("by_placement", {}).items():
        for model in models_and_oracle(found):
            if model in (ORACLE, sequence_trained(ORACLE)):
                rates.setdefault(model, {})[placement] = found["wer"][model]["value"]
    return rates


def _recovery_rows(report: Report) -> Rows:
    at = scopes(report["oracle"])
    if not at:
        return []
    before, after = recovering(next(iter(at.values())))
    rows = [["recovery, %", *before, *after]]
    for scope, found in at.items():
        shares = (found["recovery"][model] for model in (*before, *after))
        rows.append(
            [scope, *(f"{number(s['value'])} ({interval(s)})" if s else "none" for s in shares)]
        )
    return rows


def _confidence_rows(report: Report) -> Rows:
    found = report["confidence"]
    rows = [
        [
            model,
            number(100 * found[model]["mean_confidence"]),
            number(100 * found[model]["num_correct"] / found[model]["num_words"]),
            number(found[model]["normalized_cross_entropy"]),
        ]
        for model in in_order(found)
    ]
    return [["confidence, %", "mean", "correct", "NCE"], *rows] if rows else []


def _development_rows(report: Report) -> Rows:
    here = development_rates(report)
    there = development_rates(with_all_parts(report["comparison"]))
    rows = [[name, number(there[name]), number(here[name])] for name in here if name in there]
    return [["development WER, %", "other run", "this run"], *rows] if rows else []


PLANNED = ("objects", "bytes written", "requests", "seconds")
"""The planned quantities that the terminal shows."""


def _plan_rows(report: Report) -> Rows:
    steps = report["plan"].get("steps") or {}
    rows = [
        [step, *(_planned_and_actual(quantity, pairs.get(quantity)) for quantity in PLANNED)]
        for step, pairs in steps.items()
    ]
    return [["planned, actual", *PLANNED], *rows] if rows else []


def _planned_and_actual(quantity: str, pair: Mapping[str, float | None] | None) -> str:
    if pair is None:
        return ""
    return " ".join(_amount(quantity, pair[kind]) for kind in ("planned", "actual"))


def _amount(quantity: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "bytes" in quantity:
        return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}"


def _folded(rows: Sequence[Sequence[str]], least_width: int = 0) -> Iterator[str]:
    """Align the columns; yield blocks of as many as fit on a line, each below the rows' names."""
    if not rows:
        return
    names, *columns = zip(*([printable(cell) for cell in row] for row in rows), strict=True)
    stub = [name.ljust(max(map(len, names))) for name in names]
    lines = stub
    for column in columns:
        width = max(least_width, 2 + max(map(len, column)))
        if lines is not stub and len(lines[0]) + width > LINE_WIDTH:
            yield "\n".join(lines)
            lines = stub
        lines = [line + cell.rjust(width) for line, cell in zip(lines, column, strict=True)]
    if lines is not stub:
        yield "\n".join(lines)


STEP = Step(
    name=REPORT,
    description="Gather word error rates by placement, hours, counts, seconds and learning curves "
    "of a run. Write them as report/report.json and as one self-contained page, "
    "report/report.html. Give it again after a later plan, certificate or step: the newest report "
    "replaces the one before.",
    run=run,
)


if __name__ == "__main__":
    parser = STEP.parser()
    parser.add_argument(
        "--curve",
        nargs="+",
        default=[],
        metavar="RUN",
        help="reported runs of other hours of unlabelled speech: draw word error rates by hours",
    )
    parser.add_argument(
        "--compare",
        metavar="RUN",
        help="a reported run: set its rates, hours, seconds and settings beside this run's, and "
        "test the difference of each model's errors over the same speakers. Choose a recipe by the "
        "development speakers' rates, so that no held-out speaker influences the choice",
    )
    parser.add_argument(
        "--oracle",
        metavar="RUN",
        help="a reported run of the same held-out utterances, whose labelled speakers are this "
        "run's and the unlabelled ones, transcribed: show its baseline's word error rates, and the "
        "share of that baseline's gain that teacher and student recover, with intervals over "
        "speakers. docs/tutorial.md says how to make one",
    )
    main(STEP, parser.parse_args())
