"""The section `sequence_training` of a recipe (paper 003 II-B, VII-C3)."""

from dataclasses import dataclass, field
from typing import Annotated

from infra.settings import Range, Seed, check_ranges
from pipeline.runs.names import BASELINE, STUDENT, TEACHER
from training.configuration.optimizers import AdamConfig, OptimizerConfig, check_decay
from training.configuration.targets import LatticeConfig
from training.configuration.trainers import SynchronousConfig, TrainerConfig, check_optimizer
from training.configuration.values import (
    AcousticScale,
    Count,
    GradientNorm,
    LearningRate,
    MinibatchFrames,
    Precision,
    WarmUpSteps,
)


@dataclass(frozen=True, slots=True)
class SequenceTrainingConfig:
    """SequenceTrainingConfig: sMBR on the labelled data after all other training (VII-C3).

    The models that are true are trained on as <model>_smbr, each on lattices that it decoded
    itself, in whole utterances at its placements, without other augmentation. `acoustic_scale` is
    kappa of II-A2, in decoding as in training. `boost` (0: none) gives weight to paths with more
    errors; above 0, the curve shows the expectation under these weights.
    """

    baseline: bool = False
    teacher: bool = False
    student: bool = False
    num_epochs: Count = 3
    initial_learning_rate: LearningRate = 1e-4
    final_learning_rate: LearningRate = 5e-5
    acoustic_scale: AcousticScale = 0.3
    boost: Annotated[float, Range(0, 100)] = 0.0
    minibatch_frames: MinibatchFrames = 2048
    max_gradient_norm: GradientNorm = 1.0
    seed: Seed = 17
    trainer: TrainerConfig = field(default_factory=SynchronousConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    warm_up_steps: WarmUpSteps = 0
    precision: Precision = "float32"
    lattices: LatticeConfig = field(default_factory=LatticeConfig)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_optimizer(self.trainer, self.optimizer)
        check_decay(self.initial_learning_rate, self.final_learning_rate, self.num_epochs)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models to train on."""
        return tuple(name for name in (BASELINE, TEACHER, STUDENT) if getattr(self, name))
