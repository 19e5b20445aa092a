"""Measure on recorded speech how many word errors untranscribed speech removes, fold by fold.

python -m tests.benchmarks.rotation --fold 0 --seed 17 --kaldi-dir ../shared/corpora/an4 --out DIR

Six folds hold out each of AN4's 74 speakers once. A fold transcribes some 7 minutes, and leaves
the other speakers' transcripts unread. It trains baseline, teacher and student by the product's
own steps, each with and without sMBR, and the oracle: the student's form on the same number of
frames, with the unlabelled speakers transcribed. Development speakers choose each model's
acoustic scale. Each utterance is in drawn placements of clean and DP1 to DP5, and held-out ones
are in all; `--condition clean` takes the recordings as they are.

Errors by utterance are in DIR/results; `python -m tests.benchmarks.rotation.table FILES` makes
the table of any folds and seeds. A command that was cut off continues where it was.
`--supervised` trains on all speakers but the held-out ones, and decodes with their transcripts'
language model. `--label NAME --set section.key=value` measures another recipe.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from infra.settings import canonical_json, plain
from pipeline.runs.names import BASELINE, STUDENT, TEACHER, sequence_trained
from tests.benchmarks.rotation.folds import NUM_FOLDS, Corpus, Fold, fold_of
from tests.benchmarks.rotation.lanes import (
    BASELINE_STEPS,
    DATA_STEPS,
    STUDENT_STEPS,
    TEACHER_STEPS,
    Lane,
    run_lanes,
)
from tests.benchmarks.rotation.scores import (
    CLEAN,
    RECIPE,
    SECOND_TEACHER,
    Scoring,
    collect,
    is_trained,
    score_all,
)
from training.settings.recipe import Recipe, read_recipe

EVERY_PLACEMENT = "clean,DP1,DP2,DP3,DP4,DP5"
NUM_DRAWN = 6
"""The placements of each training utterance: all, so that one of its versions is clean."""

PLACED = (
    *("--placements", f"{NUM_DRAWN}:{EVERY_PLACEMENT}"),
    *("--heldout-placements", EVERY_PLACEMENT),
)
"""The options of ingest."""

SEEDED = ("aligner", "baseline", "teacher", "student", "targets", "sequence_training")
ORACLE = "oracle"
SETTINGS = "settings.json"
"""The resolved recipe that a fold was begun with, in its folder."""

SUPERVISED = (
    "senones.max_senones=400",
    "senones.min_count=120",
    *(f"{model}.num_epochs=40" for model in ("baseline", "teacher")),
    *(f"{model}.num_chunked_epochs=34" for model in ("baseline", "teacher")),
)
"""With all speakers transcribed there are frames for more senones, and no student to follow."""

ORACLE_ALIGNER = ("aligner.num_epochs=3", "aligner.num_chunked_epochs=3")
"""An epoch of the oracle's aligner is five of the other's."""


@dataclass(frozen=True)
class Experiment:
    """Experiment: one fold and seed of one recipe, with its folders."""

    corpus: Corpus
    fold: Fold
    folder: Path
    overrides: tuple[str, ...]
    placements: tuple[str, ...]
    is_resumed: bool = False

    def lane(self, name: str, steps: Sequence[str], *overrides: str) -> Lane:
        """Return a lane of the run `name`, with overrides of its own before those given."""
        return Lane(
            run=self.folder / name,
            kaldi_dir=self.folder / f"{name}_data",
            steps=steps,
            recipe=RECIPE,
            overrides=(*overrides, *self.overrides),
            placements=self.placements,
            is_resumed=self.is_resumed,
        )

    def recipe(self, *overrides: str) -> Recipe:
        """Return the recipe with the overrides."""
        return read_recipe(str(RECIPE), [*overrides, *self.overrides])

    def write_data(self) -> None:
        """Write both data directories."""
        self.corpus.write(self.fold, self.folder / "run_data")
        transcribed = self.fold.transcribed(self.corpus.words())
        self.corpus.write(transcribed, self.folder / f"{ORACLE}_data")

    def epochs(self, speakers: Sequence[str]) -> list[str]:
        """Return the overrides that give a supervised model as many frames as the student's.

        The student hears the unlabelled speakers in each pass, and a share of the labelled ones
        after each sub-epoch. Its share of whole utterances is the supervised model's too.
        """
        student = self.recipe().student
        num_sub_epochs = student.num_passes * student.num_sub_epochs
        hours = student.num_passes * self.corpus.hours(self.fold.unlabelled)
        hours += (
            num_sub_epochs / student.num_labelled_shares * self.corpus.hours(self.fold.labelled)
        )
        epochs = round(hours / self.corpus.hours(speakers))
        whole = round(epochs * student.num_whole_utterance_sub_epochs / num_sub_epochs)
        return [f"baseline.num_epochs={epochs}", f"baseline.num_chunked_epochs={epochs - whole}"]


def train(experiment: Experiment) -> None:
    """Run all steps of a semi-supervised fold, its two runs side by side."""
    of_baseline = experiment.epochs(experiment.fold.labelled)
    transcribed = experiment.fold.transcribed(experiment.corpus.words()).labelled
    of_oracle = (*experiment.epochs(transcribed), *ORACLE_ALIGNER)
    run_lanes(
        [
            experiment.lane("run", (*DATA_STEPS, *STUDENT_STEPS), *of_baseline),
            experiment.lane(ORACLE, (*DATA_STEPS, *BASELINE_STEPS), *of_oracle),
            # The lane that ends first takes it: the alignments that it reads are there by then.
            experiment.lane("run", BASELINE_STEPS, *of_baseline),
        ]
    )


def train_supervised(experiment: Experiment) -> None:
    """Train the student's and the teacher's form on all speakers but the held-out ones."""
    run_lanes([experiment.lane(ORACLE, DATA_STEPS, *SUPERVISED)])
    lanes = (BASELINE_STEPS, TEACHER_STEPS)
    run_lanes([experiment.lane(ORACLE, steps, *SUPERVISED) for steps in lanes])


def scorings(experiment: Experiment, is_supervised: bool) -> Iterator[Scoring]:
    """Yield the models to score, under the names of their rows."""
    folder, recipe = experiment.folder, experiment.recipe()
    run, oracle = folder / "run", folder / ORACLE
    rows = (BASELINE, TEACHER, SECOND_TEACHER, STUDENT)
    names = {row: (oracle if is_supervised else run, row) for row in rows}
    if not is_supervised:
        names[ORACLE] = oracle, BASELINE
    (folder / "scores").mkdir(exist_ok=True)
    for row, (place, name) in names.items():
        for change in (str, sequence_trained):
            if is_trained(place, change(name)):
                result = folder / "scores" / f"{change(row)}.json"
                language = place if is_supervised else run
                yield Scoring(change(row), change(name), place, language, recipe, result)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rotation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fold", type=int, required=True, choices=range(NUM_FOLDS))
    parser.add_argument("--seed", type=int, required=True, help="of all models; not of the rooms")
    parser.add_argument("--kaldi-dir", type=Path, required=True, help="AN4's Kaldi data directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--condition", choices=("multi", CLEAN), default="multi")
    parser.add_argument("--supervised", action="store_true", help="no unlabelled speech")
    parser.add_argument("--label", default="rotation", help="name of the recipe that is measured")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser.parse_args()


def main() -> None:
    """Train and score one fold."""
    arguments = parsed()
    started, name = time.time(), f"{arguments.condition}-fold{arguments.fold}-seed{arguments.seed}"
    corpus = Corpus(arguments.kaldi_dir)
    seeds = tuple(f"{section}.seed={arguments.seed}" for section in SEEDED)
    experiment = Experiment(
        corpus,
        fold_of(corpus.speakers, arguments.fold),
        arguments.out / arguments.label / name,
        (*seeds, *arguments.set),
        PLACED if arguments.condition == "multi" else (),
    )
    target = arguments.out / "results" / f"{arguments.label}-{name}.jsonl"
    if target.exists():
        sys.exit(f"{target} is there already: nothing to do")
    experiment.write_data()
    experiment = replace(experiment, is_resumed=begun_before(experiment))
    (train_supervised if arguments.supervised else train)(experiment)
    found = list(scorings(experiment, arguments.supervised))
    score_all(found)
    hours = {s: corpus.hours(each) for s, each in experiment.fold.subsets().items()}
    about = {
        "fold": arguments.fold,
        "seed": arguments.seed,
        "condition": arguments.condition,
        "label": arguments.label,
        "settings": [*(SUPERVISED if arguments.supervised else ()), *arguments.set],
        "recipe_sha256": recipe_digest(arguments.set),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hours": hours,
        # Of a fold that was cut off these are the last call's alone.
        "is_resumed": experiment.is_resumed,
        "seconds": time.time() - started,
        "load": os.getloadavg()[0],
    }
    collect(found, about, target)
    print(target)


def recipe_digest(overrides: Sequence[str]) -> str:
    """Return the SHA-256 of the resolved recipe, before the fold's own seeds and epochs."""
    return sha256(canonical_json(plain(read_recipe(str(RECIPE), overrides))).encode()).hexdigest()


def begun_before(experiment: Experiment) -> bool:
    """Return whether the fold was begun with these settings; exit if it was with others."""
    settings = canonical_json(plain(experiment.recipe()))
    begun = experiment.folder / SETTINGS
    if not begun.exists():
        begun.write_text(settings)
        return False
    if begun.read_text() != settings:
        sys.exit(f"{begun}: was begun with another recipe: give another --label")
    return True


if __name__ == "__main__":
    main()
