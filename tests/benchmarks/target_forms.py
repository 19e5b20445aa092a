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
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.cli.catalogue import (
    EVALUATE,
    GENERATE_TARGETS,
    REPARTITION,
    TRAIN_STUDENT,
)
from jobs.report_contents.other_report import output_of
from jobs.run import Launch, launches, run_steps
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import EVALUATION_SCORES, EVALUATION_STEP
from tests.benchmarks.rotation.lanes import link_run, steps_from
from training.evaluation.utterance_errors import UtteranceErrors, read_errors
from training.targets.alignment import read_tree

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


def keep(folder: Path, recipe: str, label: str, seed: int, values: Sequence[str]) -> None:
    """Write a run's errors by speaker and utterance to DIR/results."""
    run = str(folder / f"{label}-{seed}")
    store = ObjectStore((run,))
    manifest = read_manifest(store, run, EVALUATION_STEP)
    scores = json.loads(read_output(store, run, output_of(manifest, EVALUATION_SCORES)))
    (errors,) = (each for each in manifest.outputs if each.key == scores["files"]["errors.jsonl"])
    about = {
        "condition": recipe,
        "fold": 0,
        "seed": seed,
        "label": label,
        "settings": values,
        "hours": {},
        "models": {},
    }
    lines = [json.dumps(about), *_lines(read_errors(read_output(store, run, errors)))]
    target = folder / "results" / f"{label}-{recipe}-seed{seed}.jsonl"
    target.parent.mkdir(exist_ok=True)
    target.write_text("".join(f"{line}\n" for line in lines))


def _lines(utterances: Sequence[UtteranceErrors]) -> list[str]:
    lines = []
    for (placement, speaker), same in groupby(sorted(utterances, key=_place), key=_place):
        of_speaker = list(same)
        errors = {
            model: [each.errors[model].errors for each in of_speaker]
            for model in of_speaker[0].errors
        }
        words = [next(iter(each.errors.values())).reference_words for each in of_speaker]
        line = {"placement": placement, "speaker": speaker, "words": words, "errors": errors}
        lines.append(json.dumps(line))
    return lines


def _place(utterance: UtteranceErrors) -> tuple[str, str]:
    return utterance.placement, utterance.speaker_id


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
                keep(folder, speech.recipe, label, seed, values)
    sys.exit(code)


if __name__ == "__main__":
    main()
