"""Compare the student's word errors with four forms of targets, seed by seed.

python -m tests.benchmarks.target_forms --out DIR --seeds 17 18 19
python -m tests.benchmarks.target_forms --out DIR --recipe recorded --kaldi-dir AN4
python -m tests.benchmarks.rotation.table DIR/results/*.jsonl --against renormalized --row student

Renormalized k = 20; the same with one class of all other senones (ghost); 16 best and 4 drawn; and
all senones' logits, on the demo's corpus or on recorded speech. A seed's runs share all that comes
before their targets. Results are kept by speaker, as the rotation's are, so that its table reads
them. A command that was cut off continues.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.cli.catalogue import (
    EVALUATE,
    GENERATE_TARGETS,
    REPARTITION,
    TRAIN_STUDENT,
)
from jobs.run import Launch, launches, run_steps
from tests.benchmarks.kept_errors import ResultKey, keep_errors
from tests.benchmarks.rotation.lanes import link_run, steps_from
from training.align.network_alignment import read_tree

SEEDED = ("aligner", "baseline", "teacher", "student", "targets")
RANKS = (2, 4)
"""Those of the demo."""

DEMO = "demo"
REFERENCE = "renormalized"
FROM_TARGETS = (GENERATE_TARGETS, REPARTITION, TRAIN_STUDENT, EVALUATE)


@dataclass(frozen=True, slots=True)
class Speech:
    """Speech is a corpus in Kaldi's form, and the recipe of all its runs."""

    recipe: str
    kaldi_dir: Path


def forms(num_senones: int) -> dict[str, list[str]]:
    """Return each form's values of the recipe; those of the reference are the demo's own."""
    return {
        REFERENCE: [],
        "ghost": ["student.soft_targets=ghost"],
        "drawn-tail": ["targets.tail_samples=4"],
        "k-all": [f"targets.k={num_senones}"],
    }


def run_form(folder: Path, speech: Speech, label: str, seed: int, values: Sequence[str]) -> int:
    """Run the reference from the corpus on, another form from the step that differs."""
    run, reference = folder / f"{label}-{seed}", folder / f"{REFERENCE}-{seed}"
    steps = launches(str(speech.kaldi_dir), *RANKS, "cpu")
    if label == REFERENCE:
        chosen = [each.step for each in steps[: [s.step for s in steps].index(EVALUATE) + 1]]
    else:
        first = TRAIN_STUDENT if label == "ghost" else GENERATE_TARGETS
        link_run(reference, run, first)
        chosen = steps_from(first, FROM_TARGETS)
    corpus = f"corpus.uri={reference / 'corpus'}"
    settings = [corpus, *(f"{section}.seed={seed}" for section in SEEDED), *values]
    shared = ["--recipe", speech.recipe, "--run", str(run)]
    shared += [part for each in settings for part in ("--set", each)]
    return run_steps([each for each in steps if each.step in chosen], shared)


def main() -> None:
    """Make the demo's corpus if no other is given, then each seed's four runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, ", ".join(forms(1))
    add("--out", type=Path, required=True, help="folder of corpus, runs and results")
    add("--seeds", type=int, nargs="+", default=[17, 18, 19], help="of all models")
    add("--only", nargs="+", metavar="FORM", help=f"beside {REFERENCE}; default: all of {names}")
    add("--recipe", default=DEMO, choices=(DEMO, "recorded"), help=f"default {DEMO}")
    add("--kaldi-dir", type=Path, help="recorded speech; default: the demo's corpus, made here")
    arguments = parser.parse_args()
    folder, code = arguments.out.absolute(), 0
    speech = Speech(arguments.recipe, (arguments.kaldi_dir or folder / "kaldi").absolute())
    if arguments.kaldi_dir is None:
        out = ["--out", str(speech.kaldi_dir)]
        code = run_steps([Launch("synthesize", (sys.executable,))], out)
    for seed in arguments.seeds:
        code = code or run_form(folder, speech, REFERENCE, seed, [])
        reference = str(folder / f"{REFERENCE}-{seed}")
        found = {} if code else forms(read_tree(ObjectStore((reference,)), reference).num_senones)
        for label, values in found.items():
            if arguments.only and label not in (REFERENCE, *arguments.only):
                continue
            code = code or run_form(folder, speech, label, seed, values)
            if not code:
                kept = ResultKey(speech.recipe, seed, label)
                keep_errors(folder / f"{label}-{seed}", kept, values, folder / "results")
    sys.exit(code)


if __name__ == "__main__":
    main()
