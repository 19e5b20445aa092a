"""Measure recipes that differ from the rotation's in one thing, each from the step that differs.

python -m tests.benchmarks.rotation.ablations --fold 0 --seed 17 --kaldi-dir DIR --out DIR
python -m tests.benchmarks.rotation.table DIR/results/*.jsonl --against rotation

Takes the steps before over from the rotation's own run of this fold and seed, which must be there.
A pair that begins with targets takes over the second round's teacher too: its student learns other
targets of the same teacher.
No oracle is trained: each ablation works on one core, so that two commands may run side by side.
What has a result is left; `--only LABEL ...` measures some alone.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.cli.catalogue import (
    ALIGN,
    EVALUATE,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    TRAIN_BASELINE,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
)
from tests.benchmarks.rotation.scores import RECIPE
from tests.benchmarks.rotation.transcribed_teacher import KALDI_DIR, RUN
from training.align.network_alignment import read_tree

REFERENCE = "rotation"
MODELS = ("baseline", "teacher", "student")
MASKS = ("frequency_masks=2", "time_masks=1", "time_mask_frames=18")
"""Up to 10 of 64 bins twice, and up to 180 ms once."""

ONE_ROUND = ("targets.rounds=1",)
CLEAN_ALONE = (
    *(f'{model}.augmentation.placements=["clean"]' for model in MODELS),
    "teacher.num_epochs=54",
    "teacher.num_chunked_epochs=42",
    "student.num_passes=24",
    "student.num_whole_utterance_sub_epochs=24",
    "sequence_training.num_epochs=18",
)
"""One of six versions of each utterance, six times as often."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference: the rotation's own run, and the corpus's folder."""

    run: Path
    kaldi_dir: Path

    @classmethod
    def of(cls, rest: list[str]) -> "Reference":
        """Find the run that the arguments of the rotation name."""
        parser = argparse.ArgumentParser()
        for name in ("--fold", "--seed"):
            parser.add_argument(name, required=True)
        for name in ("--out", "--kaldi-dir"):
            parser.add_argument(name, required=True, type=Path)
        given, _ = parser.parse_known_args(rest)
        run = given.out / REFERENCE / f"multi-fold{given.fold}-seed{given.seed}" / "run"
        return cls(run.resolve(), given.kaldi_dir.resolve())

    @property
    def num_senones(self) -> int:
        """Count the senones of the run."""
        return read_tree(ObjectStore((str(self.run),)), str(self.run)).num_senones

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which servers of targets find `transcribed_teacher`.

        So a result's settings name no folder of the machine.
        """
        places = {RUN: str(self.run), KALDI_DIR: str(self.kaldi_dir)}
        return {**os.environ, **places, "PYTHONPATH": str(RECIPE.parents[3])}


@dataclass(frozen=True, slots=True)
class Ablation:
    """Ablation: the first step that differs from the reference, and the values that do."""

    again: str
    settings: tuple[str, ...]
    student_ranks: int = 1

    def values(self, num_senones: int) -> list[str]:
        """Return the values that differ, with the number of the run's senones."""
        return [each.replace("{senones}", str(num_senones)) for each in self.settings]


def distributed(trainer: str, *values: str) -> Ablation:
    """Return the student's training on four ranks, in blocks as short as the demo's."""
    settings = (f"name={trainer}", "block_size=10", *values)
    return Ablation(TRAIN_STUDENT, tuple(f"student.trainer.{each}" for each in settings), 4)


def transcribed(share: float) -> Ablation:
    """Return one round of targets in which a share of the speakers have true labels."""
    factory = "tests.benchmarks.rotation.transcribed_teacher:make"
    teacher = f'targets.teacher={{factory="{factory}",settings={{share={share}}}}}'
    return Ablation(TRAIN_TEACHER, (*ONE_ROUND, "sequence_training.teacher=false", teacher))


ABLATIONS: Mapping[str, Ablation] = {
    "targets-of-own-version": Ablation(GENERATE_TARGETS, ("targets.versions=own",)),
    "targets-at-one-offset": Ablation(GENERATE_TARGETS, ("targets.offsets=one",)),
    "one-round": Ablation(GENERATE_TARGETS, ONE_ROUND),
    "lattice-targets": Ablation(GENERATE_TARGETS, ("targets.source=lattice",)),
    "true-labels": transcribed(1.0),
    "half-true-labels": transcribed(0.5),
    "one-round-lattice": Ablation(GENERATE_TARGETS, (*ONE_ROUND, "targets.source=lattice")),
    "one-round-lattice-alone": Ablation(
        GENERATE_TARGETS, (*ONE_ROUND, "targets.source=lattice", "targets.lattices.weight=1.0")
    ),
    **{f"k-{k}": Ablation(GENERATE_TARGETS, (f"targets.k={k}",)) for k in (1, 5, 10)},
    "k-all": Ablation(GENERATE_TARGETS, ("targets.k={senones}",)),
    "drawn-tail": Ablation(GENERATE_TARGETS, ("targets.tail_samples=4",)),
    "ghost": Ablation(TRAIN_STUDENT, ("student.soft_targets=ghost",)),
    "three-rounds": Ablation(TRAIN_TEACHER, ("targets.rounds=3",)),
    "teacher-without-smbr": Ablation(TRAIN_TEACHER, ("sequence_training.teacher=false",)),
    **{f"ensemble-{m}": Ablation(TRAIN_TEACHER, (f"teacher.ensemble={m}",)) for m in (2, 3)},
    **{f"passes-{p}": Ablation(TRAIN_STUDENT, (f"student.num_passes={p}",)) for p in (2, 6, 12)},
    "no-whole-utterances": Ablation(TRAIN_STUDENT, ("student.num_whole_utterance_sub_epochs=0",)),
    "labelled-shares-100": Ablation(TRAIN_STUDENT, ("student.num_labelled_shares=100",)),
    "no-scheduled-rate": Ablation(TRAIN_STUDENT, ("student.labelled_rate_factor=1.0",)),
    "htm": distributed("htm", "gradient_threshold=0.25", "group_size=2"),
    "bmuf-nesterov": distributed("bmuf", "form=nesterov"),
    "bmuf-as-printed": distributed("bmuf", "form=as_printed"),
    "no-speeds": Ablation(
        TRAIN_BASELINE, tuple(f"{model}.augmentation.speed=[1.0]" for model in MODELS)
    ),
    "conformer": Ablation(
        TRAIN_BASELINE,
        (
            'models.student={name="conformer"}',
            "baseline.warm_up_steps=200",
            "student.warm_up_steps=200",
        ),
    ),
    "clean-alone": Ablation(TRAIN_BASELINE, CLEAN_ALONE),
    "masks": Ablation(
        TRAIN_BASELINE,
        tuple(f"{model}.augmentation.{each}" for model in MODELS for each in MASKS),
    ),
    "no-causal-mean": Ablation(EXTRACT_FEATURES, ("features.mean=none",)),
    "own-alignments": Ablation(ALIGN, ("alignment.versions=own",)),
    "witten-bell": Ablation(EVALUATE, ("evaluation.smoothing=witten_bell",)),
    "bigram": Ablation(EVALUATE, ("evaluation.ngram_order=2",)),
    "one-scale": Ablation(EVALUATE, ("tuning.acoustic_scales=[]",)),
}
"""The pairs by label."""


def command(label: str, ablation: Ablation, rest: list[str], num_senones: int) -> list[str]:
    """Return the rotation's command line of one ablation; `rest` names fold, seed and folders."""
    settings = [part for each in ablation.values(num_senones) for part in ("--set", each)]
    taken = ["--reuse", REFERENCE, "--again", ablation.again, "--without-oracle"]
    ranks = ["--student-ranks", str(ablation.student_ranks)]
    module = [sys.executable, "-m", "tests.benchmarks.rotation"]
    return [*module, "--label", label, *taken, *ranks, *settings, *rest]


def main() -> None:
    """Measure the ablations one after the other; exit with the first code that is not 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rotation.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=ABLATIONS, default=list(ABLATIONS))
    arguments, rest = parser.parse_known_args()
    reference = Reference.of(rest)
    num_senones, environment = reference.num_senones, reference.environment
    lines = (command(label, ABLATIONS[label], rest, num_senones) for label in arguments.only)
    codes = [subprocess.run(each, check=False, env=environment).returncode for each in lines]
    sys.exit(next(filter(None, codes), 0))


if __name__ == "__main__":
    main()
