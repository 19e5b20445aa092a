"""Tuning chooses, one setting after the other, what has the fewest errors; ties change nothing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jobs.cli.job import recipe_path
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, realignment_rounds
from training.evaluate.tuning import Tuned, search, search_all
from training.evaluate.word_errors import WordErrors
from training.fit.model_specs import (
    aligner_fit,
    baseline_fit,
    sequence_fit,
    student_fit,
    teacher_fit,
)
from training.settings.decoding import DecodingSettings, TuningConfig
from training.settings.recipe import read_recipe

START = DecodingSettings(acoustic_scale=0.3, ngram_order=3)


def run_search(start: DecodingSettings, grid, count) -> Tuned:
    """Run one search, and count what it asks for."""
    return search_all({"": search(start, grid)}, lambda asked: {"": count(asked[""])})[""]


class Decoded:
    """Decoded counts errors by a rule, and keeps the settings that it was asked for."""

    def __init__(self, best: DecodingSettings) -> None:
        self.best = best
        self.asked: list[DecodingSettings] = []

    def __call__(self, settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        self.asked += settings
        return [
            WordErrors(substitutions=self.errors(each), reference_words=99) for each in settings
        ]

    def errors(self, each: DecodingSettings) -> int:
        return (
            round(100 * abs(each.acoustic_scale - self.best.acoustic_scale))
            + 7 * abs(each.ngram_order - self.best.ngram_order)
            + round(10 * abs(each.language_model_scale - self.best.language_model_scale))
            + round(4 * abs(each.insertion_penalty - self.best.insertion_penalty))
        )


def test_the_best_of_the_grid_is_found() -> None:
    """Each setting's best value is chosen at the best of those before; each is decoded once."""
    best = DecodingSettings(0.2, 4, 1.25, 0.5)
    decoded = Decoded(best)
    tuned = run_search(START, TuningConfig().grid(), decoded)
    assert tuned.settings == best
    assert len(decoded.asked) == len(set(decoded.asked)) == 1 + 6 + 2 + 2 + 2
    assert [point.settings for point in tuned.curve] == decoded.asked
    assert tuned.curve[0].settings == START
    assert min(point.errors.errors for point in tuned.curve) == 0
    scales = [point.settings.acoustic_scale for point in tuned.curve if point.varied != "start"]
    assert scales[:6] == [0.1, 0.15, 0.2, 0.25, 0.4, 0.5]


def test_equal_errors_leave_the_recipes_settings() -> None:
    """A value without an error less replaces nothing; of equal ones the first listed is taken."""

    def none(settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        return [WordErrors(reference_words=9) for _ in settings]

    assert run_search(START, TuningConfig().grid(), none).settings == START

    def fewer_elsewhere(settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        return [WordErrors(int(each.acoustic_scale == 0.3), reference_words=9) for each in settings]

    assert run_search(START, {"acoustic_scale": (0.5, 0.1)}, fewer_elsewhere).settings == replace(
        START, acoustic_scale=0.5
    )


def test_an_empty_list_decodes_nothing() -> None:
    """A setting without other values costs no decoding, and stays."""
    decoded = Decoded(DecodingSettings(0.1, 3))
    tuned = run_search(START, {"acoustic_scale": (), "ngram_order": (3,)}, decoded)
    assert (tuned.settings, decoded.asked) == (START, [START])


def test_searches_of_several_models_are_counted_together() -> None:
    """Each stage asks for all models at once, and gives each what it would find alone."""
    best = {"a": DecodingSettings(0.2, 4), "b": DecodingSettings(0.3, 3), "c": START}
    counts = {name: Decoded(each) for name, each in best.items()}
    stages = []

    def count(asked):
        stages.append({name: len(settings) for name, settings in asked.items()})
        return {name: counts[name](settings) for name, settings in asked.items()}

    grid = TuningConfig().grid()
    found = search_all({name: search(START, grid) for name in best}, count)
    assert {name: each.settings for name, each in found.items()} == best
    assert stages[0] == {"a": 1, "b": 1, "c": 1}
    assert len(stages) == 5
    for name, each in best.items():
        assert found[name] == run_search(START, grid, Decoded(each))


@pytest.mark.parametrize("make", [baseline_fit, teacher_fit])
def test_newbob_reads_the_development_speakers(make) -> None:
    """Development speakers give newbob its loss, and their alignment is an input."""
    section = make.__name__.removesuffix("_fit")
    recipe = read_recipe(recipe_path("demo"), [f"{section}.schedule=newbob"])
    fit = make(recipe)
    assert fit.labelled == ALIGNMENT_STEP
    assert DEV_ALIGNMENT_STEP not in fit.inputs
    developed = fit.on_development_speakers()
    assert DEV_ALIGNMENT_STEP in developed.inputs
    assert developed.config != fit.config


@pytest.mark.parametrize("make", [baseline_fit, teacher_fit])
@pytest.mark.parametrize("schedule", ["newbob", "exponential"])
def test_sequence_training_validates_on_none(make, schedule: str) -> None:
    """Its rates decay, whatever the schedule before it; so its settings name no validation."""
    section = make.__name__.removesuffix("_fit")
    recipe = read_recipe(recipe_path("demo"), [f"{section}.schedule={schedule}"])
    fit = sequence_fit(recipe, make(recipe))
    assert (fit.validation, fit.newbob, fit.validation_one_in) == ("", None, 0)
    assert "validation" not in fit.config


def test_other_fits_do_not_read_the_development_speakers() -> None:
    """Without newbob a fit is as before; the aligner trains before they are aligned."""
    recipe = read_recipe(recipe_path("demo"), ["aligner.schedule=newbob"])
    first, last = realignment_rounds(2)
    aligners = [aligner_fit(recipe, each) for each in (first, last)]
    for fit in (baseline_fit(recipe), student_fit(recipe), *aligners):
        assert fit.on_development_speakers() == fit
        assert ("validation" in fit.config) == (fit in aligners)
