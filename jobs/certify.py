"""Certify how uniform the order is that the student reads (003 IV-A2).

megahour certify --recipe demo --run runs/demo
"""

import sys
from typing import Any

from infra.settings import ConfigurationError
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job, require_unlabelled
from jobs.run_table import CERTIFY
from pipeline.runs.names import STUDENT, model_step
from pipeline.shuffle_quality import FIGURE_TITLES
from training.certificate import FORMS, CertificateConfig, certify_run
from training.fit.model_specs import student_fit

USUAL_RANKS = 4
"""The ranks on which `megahour run` trains a student."""

HEADER = f"{'':32}{'step':>10}{'uniform':>10}{'rank':>10}{'uniform':>10}"


def run(job: Job) -> StepResults:
    """Examine the first steps of the student's sub-epochs; print the table."""
    require_unlabelled(job)
    arguments = job.arguments
    num_ranks = USUAL_RANKS if arguments.ranks is None else arguments.ranks
    if arguments.ranks is None and job.has(model_step(STUDENT)):
        num_ranks = job.manifest(model_step(STUDENT)).statistic("num_ranks", int)
    try:
        config = CertificateConfig(num_ranks, arguments.steps, arguments.sub_epochs)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    result = certify_run(student_fit(job.recipe), job.store, job.run_uri, config)
    table = format_certificate(result.manifest.statistics)
    print(table, file=sys.stderr if arguments.json else sys.stdout)
    return [result]


def format_certificate(certificate: Any) -> str:  # noqa: ANN401 - as JSON has it
    """Format the figures of a step's and of a rank's minibatches beside those of uniform orders."""
    whole = certificate["uniform_run"]
    lines = [
        f"{certificate['num_ranks']} ranks; a uniform order of the whole run: "
        f"{whole['effective_files']:.1f} effective files, "
        f"{whole['effective_speakers']:.1f} effective speakers"
    ]
    for form in FORMS:
        if (part := certificate.get(form)) is None:
            continue
        counts = ("num_samples", "num_steps", "num_source_files", "num_speakers")
        samples, steps, files, speakers = (part[name] for name in counts)
        lines += [
            f"{form.replace('_', ' ')}: {samples:,} in {steps} steps of sub-epochs "
            f"{part['sub_epochs']}, from {files} files, {speakers} speakers",
            HEADER,
        ]
        for name, title in FIGURE_TITLES.items():
            pair = (part["step"][name], part["rank"].get(name, {}))
            cells = [_cell(each.get(key)) for each in pair for key in ("measured", "uniform")]
            lines.append(f"{title:32}{''.join(cells)}")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.3g}':>10}"


STEP = Step(
    name=CERTIFY,
    description="Certify the shuffle. Compare the order that the student's trainer reads with "
    "uniform orders: effective source files and speakers of a minibatch, design effect, "
    "autocorrelation, displacement (paper 003 IV-A2). The step reads ids, not features.",
    run=run,
)

if __name__ == "__main__":
    parser = STEP.parser()
    parser.add_argument(
        "--ranks",
        type=int,
        help=f"ranks of the trainer; default: the trained student's, or {USUAL_RANKS}",
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="steps to examine of each sub-epoch, default 64"
    )
    parser.add_argument(
        "--sub-epochs",
        type=int,
        default=6,
        help="sub-epochs to examine of chunks and of whole utterances, default 6 each",
    )
    main(STEP, parser.parse_args())
