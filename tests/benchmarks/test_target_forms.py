"""Runs of the targets' forms differ in one thing."""

import pytest

from jobs.cli.arguments import recipe_path
from tests.benchmarks.target_forms import REFERENCE, forms
from training.settings.recipe import read_recipe


@pytest.mark.parametrize("label", forms(150))
def test_forms_are_recipes(label: str) -> None:
    """Of k = 20, or of all senones; the reference is the demo as it is."""
    recipe = read_recipe(recipe_path("demo"), forms(150)[label])
    assert (recipe == read_recipe(recipe_path("demo"))) == (label == REFERENCE)
    assert recipe.targets.k == (150 if label == "k-all" else 20)
