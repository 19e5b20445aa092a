"""Train by the recipes of papers 000, 001 and 004 on AN4, scaled down, beside their baselines.

python -m tests.benchmarks.papers_recipes --kaldi-dir AN4 --out DIR

Of AN4's transcribed and untranscribed speakers every second one is labelled. Each recipe runs from
its file up to alignment; all share the bootstrap. Then its model trains on four simulated ranks,
and its own baseline on one, and both decode the held-out speakers. Each training adds a line of
JSON to DIR/results.jsonl.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.cli.job import recipe_path
from jobs.run_table import STEPS, TRAIN_BASELINE
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    STUDENT,
    TEACHER,
    model_step,
)
from tests.job_programs import exit_code
from tests.small_corpus import plain_loop, serially
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.evaluate.graph_building import build_graphs
from training.evaluate.heldout import evaluate
from training.evaluate.slices import ModelsToDecode
from training.fit.model_specs import Fit, baseline_fit, teacher_fit
from training.fit.train_model import fit_model
from training.settings.decoding import rescoring_orders
from training.settings.recipe import Recipe, read_recipe

NUM_RANKS = 4

SMALL = (
    *("cluster=demo", "selection.file_hours=0.1", "loss_budget=0.02"),
    *("bootstrap.num_iterations=12", "bootstrap.max_gaussians=8"),
    *("bootstrap.min_frames_per_gaussian=40", "senones.max_senones=200", "senones.min_count=200"),
    *("evaluation.ngram_order=3", "evaluation.beam=11", "evaluation.max_active=1500"),
    "checkpoints.steps=0",
)
LSTM = ("models.student.num_layers=2", "models.student.num_units=160")
ALIGNER = (
    *("aligner.num_epochs=6", "aligner.num_chunked_epochs=6", "aligner.minibatch_frames=256"),
    *("aligner.initial_learning_rate=2e-3", "aligner.final_learning_rate=5e-4"),
)


@dataclass(frozen=True)
class Experiment:
    """Experiment: a recipe's model, its scale on AN4, and what makes its own baseline of it."""

    recipe: str
    model: str
    overrides: Sequence[str]
    baseline: Sequence[str]
    baseline_trainer: str

    def settings(self, is_baseline: bool, seed: int) -> Recipe:
        """Read the recipe for one training."""
        more = (*self.overrides, f"{self.model}.seed={seed}")
        if not is_baseline:
            return read_recipe(recipe_path(self.recipe), more)
        trainers = {self.model: self.baseline_trainer} if self.baseline_trainer else {}
        if trainers:  # the settings of one trainer are none of the other
            more = tuple(each for each in more if not each.startswith(f"{self.model}.trainer."))
        return read_recipe(recipe_path(self.recipe), (*more, *self.baseline), trainers, print)


EXPERIMENTS = (
    Experiment(
        "htm_2000h",
        BASELINE,
        (
            *SMALL,
            *LSTM,
            # The pretraining reads an eighth of AN4, 4 minutes.
            *("aligner.num_epochs=30", "aligner.num_chunked_epochs=30"),
            *("aligner.minibatch_frames=256", "aligner.initial_learning_rate=4e-4"),
            *("aligner.final_learning_rate=1e-4", "baseline.num_epochs=10"),
            *("baseline.num_chunked_epochs=10", "baseline.minibatch_frames=256"),
            *("baseline.initial_learning_rate=2e-4", "baseline.final_learning_rate=1e-5"),
            *("baseline.trainer.gradient_threshold=0.25", "baseline.trainer.block_size=10"),
            "baseline.trainer.group_size=2",
        ),
        (),
        "synchronous",
    ),
    Experiment(
        "one_bit_309h",
        BASELINE,
        (
            *SMALL,
            *ALIGNER,
            *("models.student.num_layers=4", "models.student.num_units=384"),
            *("baseline.num_epochs=7", "baseline.minibatch_frames=64"),
            *("baseline.minibatch_selection.factors=[1,2,4]",),
            *("baseline.minibatch_selection.every_hours=0.5",),
            *("baseline.minibatch_selection.trial_hours=0.05",),
        ),
        (),  # one rank quantizes nothing
        "",
    ),
    Experiment(
        "decentralized_2000h",
        TEACHER,
        (
            *SMALL,
            *LSTM,
            *ALIGNER,
            *("models.teacher.num_layers=2", "models.teacher.num_units=128"),
            *("models.teacher.num_projected_units=64", "teacher.minibatch_frames=128"),
            *("teacher.initial_learning_rate=0.016", "teacher.final_learning_rate=0.0016"),
        ),
        # What the refusal of --trainer asks for: a fourth, of the sum over four ranks' frames.
        ("teacher.initial_learning_rate=0.004", "teacher.final_learning_rate=0.0004"),
        "synchronous",
    ),
)


def main() -> None:
    """Run the experiments that are named, for each seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.papers_recipes")
    parser.add_argument("--kaldi-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=[each.recipe for each in EXPERIMENTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for experiment in EXPERIMENTS:
        if not arguments.only or experiment.recipe in arguments.only:
            run(experiment, transcribed(arguments.kaldi_dir, arguments.out), arguments)


def transcribed(an4_dir: Path, out: Path) -> Path:
    """Make a Kaldi directory in which half of the speakers of AN4's training part are labelled."""
    directory = out / "kaldi"
    if directory.exists():
        return directory
    directory.mkdir()
    for path in an4_dir.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    speakers = [
        name
        for subset in ("labelled", "unlabelled")
        for name in (an4_dir / f"{subset}.speakers").read_text().split()
    ]
    for subset, names in (("labelled", speakers[::2]), ("unlabelled", speakers[1:2])):
        (directory / f"{subset}.speakers").unlink()
        (directory / f"{subset}.speakers").write_text("".join(f"{name}\n" for name in names))
    return directory


def run(experiment: Experiment, kaldi_dir: Path, arguments: argparse.Namespace) -> None:
    """Align once, then train and score the recipe's model and its baseline."""
    folder = arguments.out / experiment.recipe
    options = [part for each in experiment.overrides for part in ("--set", each)]
    shared = arguments.out / "bootstrapped"
    if shared.exists() and not (folder / "run").exists():
        shutil.copytree(shared, folder / "run")
    with patch.object(spark_steps, "distribute_on_spark", plain_loop):
        for name in takewhile(lambda name: name != TRAIN_BASELINE, STEPS):
            own = ("--kaldi-dir", str(kaldi_dir)) if name == "ingest" else ()
            place = ("--recipe", experiment.recipe, "--run", str(folder / "run"))
            assert exit_code(name, *place, *options, *own) == 0, name
    if not shared.exists():
        shutil.copytree(folder / "run", shared)
        for step in ("models", ALIGNMENT_STEP):
            shutil.rmtree(shared / step)
    for seed in arguments.seeds:
        copy = folder / f"seed_{seed}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / "run", copy)
        said = {"recipe": experiment.recipe, "seed": seed, **trained(experiment, copy, seed)}
        with (arguments.out / "results.jsonl").open("a") as file:
            file.write(f"{json.dumps(said)}\n")
        print(said)


def fit_on_rank(group: ProcessGroup, fit: Fit, run_uri: str) -> None:
    """Train as one of the simulated ranks."""
    fit_model(fit, ObjectStore((run_uri,)), run_uri, group)


def trained(experiment: Experiment, folder: Path, seed: int) -> dict[str, Any]:
    """Train both models in a run's folder, and decode the held-out speakers by each.

    Scores compare a baseline with a student, so the recipe's own model has that name here.
    """
    store, run_uri = ObjectStore((str(folder),)), str(folder)
    found = dict[str, Any]()
    for name, num_ranks in ((BASELINE, 1), (STUDENT, NUM_RANKS)):
        recipe = experiment.settings(name == BASELINE, seed)
        fit = baseline_fit(recipe) if experiment.model == BASELINE else teacher_fit(recipe)
        simulate_ranks(num_ranks, fit_on_rank, replace(fit, name=name), run_uri)
        statistics = read_manifest(store, run_uri, model_step(name)).statistics
        found[name] = {
            "trainer": fit.training.trainer.name,
            "num_ranks": num_ranks,
            "cross_entropy": [round(each["cross_entropy"], 3) for each in statistics["curve"]],
            "trials": [each.get("minibatch_trials", []) for each in statistics["curve"]],
        }
    forms = dict.fromkeys((BASELINE, STUDENT), fit.model)
    models = ModelsToDecode(forms, serially, "cpu")
    place = store, run_uri, f"{run_uri}/corpus"
    orders = rescoring_orders(recipe.evaluation, recipe.tuning, recipe.targets.lattices)
    build_graphs(*place, recipe.evaluation, orders)
    evaluate(*place, recipe.evaluation, models)
    outputs = read_manifest(store, run_uri, EVALUATION_STEP).outputs
    (scores,) = [each for each in outputs if each.key.split("/")[-1].startswith(EVALUATION_SCORES)]
    document = json.loads(read_output(store, run_uri, scores))
    return {**found, **{key: document.get(key) for key in ("wer", "werr", "frame_accuracy")}}


if __name__ == "__main__":
    main()
