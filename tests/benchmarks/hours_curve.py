"""Measure the demo's word error rates against the hours of unlabelled speech in the pipeline.

python -m tests.benchmarks.hours_curve --out DIR [--hours 0.5,1,2,5,10,20] [--seed S]

One synthetic corpus has the most hours; each run selects some of them, and passes over them as
often as makes the frames of all students equal. The baseline reads as many frames of labelled
speech. DIR/<most>h/report/report.html has the plot, DIR/results each run's errors by speaker and
utterance, which the rotation's table reads. A command that was cut off continues.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.cli.arguments import recipe_path
from jobs.cli.catalogue import INGEST, REPORT
from jobs.run import Launch, launches, run_steps
from jobs.synthesis.speakers import SynthesisConfig
from tests.benchmarks.kept_errors import ResultKey, keep_errors
from training.settings.recipe import read_recipe

NUM_SUB_EPOCHS = 40
"""Unlabelled sub-epochs of each student, whatever its passes."""

SPEAKER_HOURS = 1 / 30
SUPERVISED_RANKS, STUDENT_RANKS = 2, 4
"""Those of the demo."""

SEEDED = ("aligner", "baseline", "teacher", "student")


def overrides(hours: float, most: float, seed: int) -> list[str]:
    """Return the recipe's values for a run of some hours; ValueError if no passes fit."""
    num_passes = round(most / hours)
    if abs(num_passes * hours - most) > 0.01 * most or NUM_SUB_EPOCHS % num_passes:
        raise ValueError(
            f"hours = {hours:g}: need {most:g} divided by one of the divisors of {NUM_SUB_EPOCHS}"
        )
    student = read_recipe(recipe_path("demo")).student
    share = student.num_whole_utterance_sub_epochs / (student.num_passes * student.num_sub_epochs)
    labelled_hours = SynthesisConfig.labelled_hours
    # The student reads a share of the labelled speech after each of its sub-epochs.
    heard = most + NUM_SUB_EPOCHS / student.num_labelled_shares * labelled_hours
    num_epochs = round(heard / labelled_hours)
    return [
        f"selection.hours={hours:g}",
        f"student.num_passes={num_passes}",
        f"student.num_sub_epochs={NUM_SUB_EPOCHS // num_passes}",
        f"student.num_whole_utterance_sub_epochs={round(share * NUM_SUB_EPOCHS)}",
        f"baseline.num_epochs={num_epochs}",
        f"baseline.num_chunked_epochs={round((1 - share) * num_epochs)}",
        *(f"{section}.seed={seed}" for section in SEEDED),
    ]


def synthesis(most: float) -> Launch:
    """Return the step that makes the corpus, with speakers as the demo has by the hour."""
    speakers = round(most / SPEAKER_HOURS)
    # A little more than is selected, as selection takes whole utterances.
    options = (f"--unlabelled-hours={1.02 * most}", f"--num-unlabelled-speakers={speakers}")
    return Launch("synthesize", (sys.executable,), options)


def run_hours(folder: Path, hours: float, given: Sequence[str], others: Sequence[Path]) -> int:
    """Run all steps of one run; the first ingests, and later reports show `others` too."""
    run = folder / f"{hours:g}h"
    steps = launches(str(folder / "kaldi"), SUPERVISED_RANKS, STUDENT_RANKS, "cpu")
    if others:
        steps = [each for each in steps if each.step not in (INGEST, REPORT)]
        curve = ("--curve", *map(str, others))
        steps.append(Launch(REPORT, (sys.executable,), curve))
    values = [f"corpus.uri={folder / 'corpus'}", *given]
    shared = ["--recipe", "demo", "--run", str(run)]
    return run_steps(steps, [*shared, *(part for each in values for part in ("--set", each))])


def main() -> None:
    """Make the corpus, and run the hours by rising number, so that the last has all beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and runs")
    parser.add_argument("--hours", default="0.5,1,2,5,10,20", help="separated by commas")
    parser.add_argument("--seed", type=int, default=17, help="of all models")
    arguments = parser.parse_args()
    hours = sorted(map(float, arguments.hours.split(",")))
    given = [overrides(each, hours[-1], arguments.seed) for each in hours]
    folder = arguments.out.absolute()
    code = run_steps([synthesis(hours[-1])], ["--out", str(folder / "kaldi")])
    done: list[Path] = []
    for each, values in zip(hours, given, strict=True):
        code = code or run_hours(folder, each, values, done)
        done.append(folder / f"{each:g}h")
        if not code:
            key = ResultKey("demo", arguments.seed, done[-1].name)
            keep_errors(done[-1], key, values, folder / "results")
    sys.exit(code)


if __name__ == "__main__":
    main()
