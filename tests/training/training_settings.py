"""Settings of a small training."""

from dataclasses import fields
from typing import Any

from training.settings.recipe import StudentConfig
from training.settings.trainers import TRAINERS, SynchronousConfig, TrainerConfig


def trainer_of(name: str, **settings: Any) -> TrainerConfig:
    """A trainer with those of the settings that it has."""
    known = {each.name for each in fields(TRAINERS[name])}
    return TRAINERS[name](**{key: value for key, value in settings.items() if key in known})


def training_settings(
    minibatch_frames: int, max_gradient_norm: float = 1.0, **given: Any
) -> StudentConfig:
    """Synchronous SGD by Adam, but for what is given."""
    usual = {
        "initial_learning_rate": 1e-3,
        "final_learning_rate": 1e-3,
        "seed": 1,
        "trainer": SynchronousConfig(),
        "num_sub_epochs": 1,
        "num_passes": 1,
        "num_whole_utterance_sub_epochs": 0,
        "labelled_rate_factor": 1.0,
        "num_labelled_shares": 1,
    }
    return StudentConfig(
        minibatch_frames=minibatch_frames, max_gradient_norm=max_gradient_norm, **usual | given
    )
