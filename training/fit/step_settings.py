"""Resolve the settings that a recipe decides of each step, as the steps' manifests hold them."""

from dataclasses import asdict
from typing import Any

from infra.settings import plain
from pipeline.runs.names import (
    ALL_SUBSETS,
    BOOTSTRAP_STEP,
    CERTIFICATE_STEP,
    DEV_ALIGNMENT_STEP,
    EVALUATION_STEP,
    KBEST_COSTS_STEP,
    TARGETS_GRAPH_STEP,
    TARGETS_TUNING_STEP,
    TUNING_STEP,
    features_step,
    lattices_step,
    model_step,
    realignment_rounds,
    section_of,
    selection_step,
    targets_rounds,
)
from training.configuration.alignment import bootstrap_settings
from training.configuration.targets import (
    kbest_costs_settings,
    lattice_settings,
    target_graph_settings,
)
from training.fit.model_specs import (
    Fit,
    aligner_fit,
    baseline_fit,
    sequence_fit,
    sibling_fits,
    student_fit,
    teacher_fits,
)
from training.recipes import Recipe


def step_configs(
    recipe: Recipe, trained: Recipe, has_dev: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the settings that recipes decide by step; `trained` has the trainers of the models.

    With `has_dev`, newbob's loss is of the development speakers.
    """
    rounds = realignment_rounds(recipe.alignment.rounds)
    aligners = [aligner_fit(trained, each) for each in rounds]
    fits = [*aligners, *fits_of(trained)]
    target_rounds = targets_rounds(recipe.targets.rounds)
    if has_dev:
        fits = [fit.on_development_speakers() for fit in fits]
    tuning = {"evaluation": plain(recipe.evaluation), "tuning": plain(recipe.tuning)}
    return {
        **{selection_step(subset): plain(recipe.selection) for subset in ALL_SUBSETS},
        **{features_step(subset): plain(recipe.features) for subset in ALL_SUBSETS},
        BOOTSTRAP_STEP: bootstrap_settings(
            recipe.bootstrap,
            recipe.senones,
            recipe.alignment.versions,
            recipe.corpus.unknown_words,
        ),
        **{each.writes: {"acoustic_scale": recipe.evaluation.acoustic_scale} for each in rounds},
        DEV_ALIGNMENT_STEP: {"acoustic_scale": recipe.evaluation.acoustic_scale},
        **{model_step(fit.name): fit.config for fit in fits},
        **sequence_training_configs(trained),
        TARGETS_GRAPH_STEP: target_graph_settings(recipe.evaluation, recipe.targets.lattices),
        **{each.targets: plain(recipe.targets) for each in target_rounds},
        **{each.partitions: asdict(recipe.partitions) for each in target_rounds},
        **dict.fromkeys((TARGETS_TUNING_STEP, TUNING_STEP), tuning),
        EVALUATION_STEP: plain(recipe.evaluation),
        KBEST_COSTS_STEP: kbest_costs_settings(recipe.targets, recipe.targets.teacher),
        CERTIFICATE_STEP: student_fit(recipe).config,
    }


def fits_of(recipe: Recipe) -> list[Fit]:
    """Describe the models that are trained after the alignment."""
    siblings = sibling_fits(recipe)
    return [baseline_fit(recipe), *teacher_fits(recipe), *siblings, student_fit(recipe)]


def sequence_training_configs(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of the lattices and of the models that are trained on by sMBR."""
    config = recipe.sequence_training
    trained_on = [fit for fit in fits_of(recipe) if section_of(fit.name) in config.models]
    lattices = lattice_settings(config.lattices, config.acoustic_scale)
    models = [sequence_fit(recipe, fit) for fit in trained_on]
    return {
        **{lattices_step(fit.name): lattices for fit in trained_on},
        **{model_step(fit.name): fit.config for fit in models},
    }
