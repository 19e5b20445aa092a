"""The four models of a run, as the recipe describes them (paper 003 V-A, VII-C)."""

from training.fit import Fit
from training.loop import LoopConfig
from training.recipes import Recipe, SupervisedConfig
from training.schedule import (
    ExponentialDecay,
    scheduled_learning_visits,
    supervised_visits,
)

BOOTSTRAPPED = "alignments/bootstrap"
ALIGNED = "alignments/labelled"
UNLABELLED = "partitions/unlabelled"


def _supervised(name: str, config: SupervisedConfig, recipe: Recipe, labelled: str) -> Fit:
    models = recipe.models
    rates = config.initial_learning_rate, config.final_learning_rate
    decay = ExponentialDecay(*rates, config.num_epochs)
    return Fit(
        name=name,
        model=models.teacher if name == "teacher" else models.student,
        labelled=labelled,
        unlabelled=None,
        visits=supervised_visits(decay, config.num_chunked_epochs, config.num_epochs),
        loop=LoopConfig(config.minibatch_frames, config.max_gradient_norm),
        trainer=config.trainer,
        seed=config.seed,
    )


def aligner_fit(recipe: Recipe) -> Fit:
    """The network that realigns: the baseline's form, on bootstrapped alignments (VII-C2)."""
    return _supervised("aligner", recipe.aligner, recipe, BOOTSTRAPPED)


def baseline_fit(recipe: Recipe) -> Fit:
    """The fully supervised model that the student must beat (VII-C7)."""
    return _supervised("baseline", recipe.baseline, recipe, ALIGNED)


def teacher_fit(recipe: Recipe) -> Fit:
    """The bidirectional teacher on the labelled data (VII-C4)."""
    return _supervised("teacher", recipe.teacher, recipe, ALIGNED)


def student_fit(recipe: Recipe) -> Fit:
    """The student by scheduled learning on the teacher's targets and labelled data (V-D)."""
    config = recipe.student
    num_steps = config.num_sub_epochs * config.num_passes
    rates = config.initial_learning_rate, config.final_learning_rate
    visits = scheduled_learning_visits(
        ExponentialDecay(*rates, num_steps),
        config.num_sub_epochs,
        config.num_passes,
        config.num_whole_utterance_sub_epochs,
        config.labelled_rate_factor,
        config.num_labelled_shares,
    )
    return Fit(
        name="student",
        model=recipe.models.student,
        labelled=ALIGNED,
        unlabelled=UNLABELLED,
        visits=visits,
        loop=LoopConfig(config.minibatch_frames, config.max_gradient_norm),
        trainer=config.trainer,
        seed=config.seed,
    )
