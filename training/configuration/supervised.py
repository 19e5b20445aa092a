"""The sections of a recipe that train a model on the labelled data (paper 003 II-B, VII-C)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from infra.settings import LATER, Range, Seed, check_ranges
from training.configuration.augmentation import AugmentationConfig
from training.configuration.minibatch_selection import MinibatchSelectionConfig
from training.configuration.optimizers import (
    AdamConfig,
    OptimizerConfig,
    check_decay,
    check_newbob_rates,
)
from training.configuration.trainers import TrainerConfig, check_optimizer
from training.configuration.values import (
    Count,
    GradientNorm,
    LearningRate,
    MinibatchFrames,
    Precision,
    WarmStart,
    WarmUpSteps,
)

ScheduleName = Literal["exponential", "newbob"]


@dataclass(frozen=True, slots=True)
class SupervisedConfig:
    """SupervisedConfig: labelled data in chunked epochs, then in whole utterances (003 II-B).

    With `schedule = "newbob"` (000 3.2) the final rate is the least, `num_epochs` the most epochs,
    and the loss is measured on the development speakers, or, where the corpus has none, on one
    labelled speaker in `validation_one_in`, at least one, whom training leaves out.
    `warm_start` names an earlier model of the run, whose weights training begins with. The model
    computes in `precision`; its weights are float32.
    """

    num_epochs: Count
    num_chunked_epochs: Annotated[int, Range(0, 10_000)]
    initial_learning_rate: LearningRate
    final_learning_rate: LearningRate
    minibatch_frames: MinibatchFrames
    max_gradient_norm: GradientNorm
    seed: Seed
    trainer: TrainerConfig
    schedule: ScheduleName = "exponential"
    validation_one_in: Annotated[int, Range(2, 1_000_000, zero="none, for another schedule")] = 20
    optimizer: OptimizerConfig = field(default=AdamConfig(), metadata=LATER)
    warm_up_steps: WarmUpSteps = field(default=0, metadata=LATER)
    warm_start: WarmStart = field(default="none", metadata=LATER)
    augmentation: AugmentationConfig = field(default=AugmentationConfig(), metadata=LATER)
    precision: Precision = field(default="float32", metadata=LATER)
    minibatch_selection: MinibatchSelectionConfig = field(
        default=MinibatchSelectionConfig(), metadata=LATER
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        check_optimizer(self.trainer, self.optimizer)
        rates = self.initial_learning_rate, self.final_learning_rate
        check_decay(*rates, self.num_epochs)
        if self.schedule == "newbob":
            check_newbob_rates(*rates)
            if self.validation_one_in == 0:
                raise ValueError("validation_one_in = 0: need at least 2 for schedule = 'newbob'")
        if self.num_chunked_epochs > self.num_epochs:
            raise ValueError(
                f"num_chunked_epochs = {self.num_chunked_epochs}: need 0..{self.num_epochs}, "
                "the epochs in all"
            )

    @property
    def chunks(self) -> str:
        """Name the setting that makes chunks, and the value without them; empty without them."""
        if self.num_chunked_epochs:
            return f"num_chunked_epochs = {self.num_chunked_epochs}: need 0"
        # Newbob's loss is of chunks, so that minibatches have the size of training's.
        return "schedule = 'newbob': need 'exponential'" if self.schedule == "newbob" else ""


@dataclass(frozen=True, slots=True)
class TeacherConfig(SupervisedConfig):
    """TeacherConfig: `ensemble` teachers, of the seeds `seed`, `seed` + 1, and so on.

    Their mean posteriors label the targets, in each round; one teacher is the paper's (VII-C4).
    """

    ensemble: Annotated[int, Range(1, 20)] = field(default=1, metadata=LATER)
