"""Settings of a small training."""

from typing import Any

from training.settings.model_training import TrainingSettings
from training.settings.trainers import SynchronousConfig


def training_settings(
    minibatch_frames: int, max_gradient_norm: float = 1.0, **given: Any
) -> TrainingSettings:
    """Synchronous SGD by Adam, but for what is given."""
    usual = {
        "initial_learning_rate": 1e-3,
        "final_learning_rate": 1e-3,
        "seed": 1,
        "trainer": SynchronousConfig(),
    }
    return TrainingSettings(
        minibatch_frames=minibatch_frames, max_gradient_norm=max_gradient_norm, **usual | given
    )
