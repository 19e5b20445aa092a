"""Runs of the targets' forms differ in one thing, and their results make a table."""

import json
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from jobs.cli.parser import recipe_path
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.names import EVALUATION_STEP
from pipeline.runs.step import StepContents, StepSpec, run_step
from tests.benchmarks.rotation.table import Measured
from tests.benchmarks.target_forms import REFERENCE, forms, keep
from training.evaluation.utterance_errors import UtteranceErrors, write_errors
from training.evaluation.word_errors import WordErrors
from training.recipes import read_recipe


@pytest.mark.parametrize("label", forms(150))
def test_forms_are_recipes(label: str) -> None:
    """Of k = 20, or of all senones; the reference is the demo as it is."""
    recipe = read_recipe(recipe_path("demo"), forms(150)[label])
    assert (recipe == read_recipe(recipe_path("demo"))) == (label == REFERENCE)
    assert recipe.targets.k == (150 if label == "k-all" else 20)


def test_errors_are_kept_by_speaker(tmp_path: Path) -> None:
    """The rotation's table reads them, with the words of each speaker's utterances."""
    run = tmp_path / "ghost-3"
    store = ObjectStore((str(run),))
    counts = {"DP1": (4, 1), "DP2": (6, 2)}
    utterances = [
        UtteranceErrors(
            f"{placement}-{number}",
            "a speaker",
            placement,
            1000,
            {"student": WordErrors(0, 0, errors, words)},
        )
        for placement, (words, errors) in counts.items()
        for number in range(3)
    ]

    def contents(context: StepContext) -> StepContents:
        errors = context.put_output("errors", ".jsonl", write_errors(utterances), Tally())
        scores = json.dumps({"files": {"errors.jsonl": errors.key}}).encode()
        kept = context.put_output("scores", ".json", scores, Tally())
        return StepContents.of_all(Tally(), (kept, errors))

    run_step(StepSpec(store, str(run), EVALUATION_STEP, {}), contents)
    keep(tmp_path, "demo", "ghost", 3, ["student.soft_targets=ghost"])
    found = Measured.read(tmp_path / "results" / "ghost-demo-seed3.jsonl")
    assert (found.label, found.key) == ("ghost", ("demo", 0, 3))
    sums = {each.placement: (each.words, each.errors["student"]) for each in found.speakers}
    assert sums == {"DP1": (12, 3), "DP2": (18, 6)}
