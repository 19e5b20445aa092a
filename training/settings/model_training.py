"""Settings of training on labelled data: supervised, then sMBR (paper 003 II-B, VII-C).

Utterances may be augmented; the minibatch size may be selected as training goes (004 section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from infra.settings import Items, Range, Seed, Text, check_ranges
from pipeline.filterbank import NUM_BINS
from pipeline.records import WITHOUT_PLACEMENT
from pipeline.runs.names import BASELINE, STUDENT, TEACHER
from training.settings import AcousticScale
from training.settings.decoding import LatticeConfig
from training.settings.trainers import (
    AdamConfig,
    OneBitConfig,
    OptimizerConfig,
    SynchronousConfig,
    TrainerConfig,
    check_optimizer,
)

LearningRate = Annotated[float, Range(1e-12, 100)]
MinibatchFrames = Annotated[int, Range(1, 10_000_000)]
GradientNorm = Annotated[float, Range(1e-9, 1e9)]
Count = Annotated[int, Range(1, 10_000)]
MaskCount = Annotated[int, Range(0, 20)]
Speed = Annotated[float, Range(0.5, 2)]
Placement = Annotated[str, Text(1, 1000)]

WarmStart = Literal["none", "aligner", "baseline"]
"""The models of a run from whose weights another one may begin."""

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""tf32: a GPU's products of float32 numbers keep 10 bits of each; a CPU knows no such thing."""

SoftTargetsForm: TypeAlias = Literal["renormalized", "ghost", "best"]
"""Whether the k best sum to one, one class of all others has the rest, or the best is a label."""


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    """AugmentationConfig: placements, speeds, one of which each utterance takes, and masks.

    A model trains on the utterances at `placements`, such as clean and DP3; with none on all.

    SpecAugment's F (Park et al. 2019) is `frequency_mask_bins`, of 64; T is `time_mask_frames`, in
    frames of 10 ms; p is `time_mask_share`. The default changes no bit. A speed that is listed
    twice is drawn twice as often.
    """

    speed: Annotated[tuple[Speed, ...], Items(1, 16)] = (1.0,)
    frequency_masks: MaskCount = 0
    frequency_mask_bins: Annotated[int, Range(1, NUM_BINS)] = 10
    time_masks: MaskCount = 0
    time_mask_frames: Annotated[int, Range(1, 10_000)] = 20
    time_mask_share: Annotated[float, Range(1e-3, 1)] = 0.2
    placements: Annotated[tuple[Placement, ...], Items(0, 100)] = ()

    __post_init__ = check_ranges

    def are_read(self, placements: Sequence[str | None]) -> list[bool]:
        """Return for utterances at these placements whether a model trains on them."""
        names = [each or WITHOUT_PLACEMENT for each in placements]
        return [not self.placements or name in self.placements for name in names]

    @property
    def changes_speed(self) -> bool:
        """Return whether utterances change their lengths."""
        return any(speed != 1 for speed in self.speed)

    @property
    def mean_stretch(self) -> float:
        """Return by how much the speeds lengthen speech on average."""
        return sum(1 / speed for speed in self.speed) / len(self.speed)

    @property
    def num_masks(self) -> int:
        """Count the masks of an utterance."""
        return self.frequency_masks + self.time_masks


LOW_RATE_FRAME_S = 0.03


@dataclass(frozen=True, slots=True)
class MinibatchSelectionConfig:
    """MinibatchSelectionConfig: every so much data, try some minibatch sizes, and take the largest.

    Sizes are `minibatch_frames` times each of `factors`; training begins with the first, and one
    factor is no selection. After `every_hours` of all ranks' data the next `trial_hours` train each
    size from one state. The largest is taken whose training-set frame accuracy is within `harmless`
    percent points of the best of it and smaller ones.
    """

    factors: Annotated[tuple[Annotated[int, Range(1, 4096)], ...], Items(1, 20)] = (1,)
    every_hours: Annotated[float, Range(1e-6, 1e6)] = 24.0
    trial_hours: Annotated[float, Range(1e-6, 1e6)] = 0.75
    harmless: Annotated[float, Range(0, 100)] = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)
        if list(self.factors) != sorted(set(self.factors)):
            raise ValueError(f"factors = {list(self.factors)}: need ascending numbers")

    def is_due(self, num_frames: int) -> bool:
        """Return whether to select after so many frames of all ranks since the last selection."""
        return len(self.factors) > 1 and num_frames >= self.every_hours * 3600 / LOW_RATE_FRAME_S

    def num_trial_minibatches(self, frames_of_all: int) -> int:
        """Return each rank's minibatches of a trial, where all ranks' have so many frames.

        The largest size has at least one step.
        """
        num_frames = self.trial_hours * 3600 / LOW_RATE_FRAME_S
        return max(round(num_frames / frames_of_all), self.factors[-1])


ScheduleName = Literal["exponential", "newbob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """TrainingSettings: what all training has, whatever the model and the criterion.

    Gradients are sums over about `minibatch_frames`, clipped at a norm a frame. The learning rate
    goes from the initial to the final one, and rises over the first `warm_up_steps` of all
    training. The model computes in `precision`; its weights are float32. `warm_start` names an
    earlier model of the run, whose weights training begins with (000 3.2).

    A section's table cannot set a field without `init`, which keeps its default there.
    `soft_targets` sum to one over the k best, or with one class of all other senones; or the best
    is the frame's label, at another offset in each pass, as of labelled data. With
    `model_parallel_ranks` so many ranks divide the units of an LSTM, and the trainer joins the
    ranks that hold the same ones (004 4 c).
    """

    initial_learning_rate: LearningRate
    final_learning_rate: LearningRate
    minibatch_frames: MinibatchFrames
    max_gradient_norm: GradientNorm
    seed: Seed
    trainer: TrainerConfig
    optimizer: OptimizerConfig = field(default=AdamConfig())
    warm_up_steps: Annotated[int, Range(1, 1_000_000_000, zero="none")] = 0
    precision: Precision = "float32"
    warm_start: WarmStart = "none"
    augmentation: AugmentationConfig = AugmentationConfig()
    minibatch_selection: MinibatchSelectionConfig = MinibatchSelectionConfig()
    soft_targets: SoftTargetsForm = field(default="renormalized", init=False)
    model_parallel_ranks: Annotated[int, Range(1, 64)] = field(default=1, init=False)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_optimizer(self.trainer, self.optimizer)
        if self.final_learning_rate > self.initial_learning_rate:
            rates = f"{self.initial_learning_rate} -> {self.final_learning_rate}"
            raise ValueError(f"learning rates {rates}: need 0 < final <= initial")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedConfig(TrainingSettings):
    """SupervisedConfig: labelled data in chunked epochs, then in whole utterances (003 II-B).

    With `schedule = "newbob"` (000 3.2) the final rate is the least, `num_epochs` the most epochs,
    and the loss is measured on the development speakers, or, where the corpus has none, on one
    labelled speaker in `validation_one_in`, at least one, whom training leaves out. Training reads
    one utterance in `data_one_in`, the same in each epoch: a model for others to begin with (000
    3.2). Rank 0 alone trains on the first part in `cold_start_one_in` of the first epoch, and
    nothing is quantized there (004 5.2).
    """

    num_epochs: Count
    num_chunked_epochs: Annotated[int, Range(0, 10_000)]
    schedule: ScheduleName = "exponential"
    validation_one_in: Annotated[int, Range(2, 1_000_000, zero="none, for another schedule")] = 20
    data_one_in: Annotated[int, Range(1, 10_000)] = 1
    cold_start_one_in: Annotated[int, Range(2, 10_000, zero="no cold start")] = 0

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        if self.schedule == "newbob":
            if self.final_learning_rate == self.initial_learning_rate:
                rates = f"{self.initial_learning_rate} -> {self.final_learning_rate}"
                raise ValueError(f"learning rates {rates}: need 0 < minimum < initial")
            if self.validation_one_in == 0:
                raise ValueError("validation_one_in = 0: need at least 2 for schedule = 'newbob'")
        if self.num_chunked_epochs > self.num_epochs:
            raise ValueError(
                f"num_chunked_epochs = {self.num_chunked_epochs}: need 0..{self.num_epochs}, "
                "the epochs in all"
            )
        if self.cold_start_one_in:
            self._check_cold_start()

    def _check_cold_start(self) -> None:
        said = f"cold_start_one_in = {self.cold_start_one_in}"
        if not isinstance(self.trainer, OneBitConfig | SynchronousConfig):
            raise ValueError(
                f"{said}: trainer {self.trainer.name!r}: need 'one_bit' or 'synchronous', by which "
                "one rank can train for all; or 0, and a warm_start"
            )
        if self.schedule == "newbob" or self.data_one_in > 1:
            raise ValueError(f"{said}: need schedule = 'exponential' and data_one_in = 1")

    @property
    def chunks(self) -> str:
        """Name the setting that makes chunks, and the value without them; empty without them."""
        if self.num_chunked_epochs:
            return f"num_chunked_epochs = {self.num_chunked_epochs}: need 0"
        # Newbob's loss is of chunks, so that minibatches have the size of training's.
        return "schedule = 'newbob': need 'exponential'" if self.schedule == "newbob" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig(SupervisedConfig):
    """TeacherConfig: `ensemble` teachers, of the seeds `seed`, `seed` + 1, and so on.

    Their mean posteriors label the targets, in each round; one teacher is the paper's (VII-C4).
    """

    ensemble: Annotated[int, Range(1, 20)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTrainingConfig(TrainingSettings):
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
    minibatch_frames: MinibatchFrames = 2048
    max_gradient_norm: GradientNorm = 1.0
    seed: Seed = 17
    trainer: TrainerConfig = field(default_factory=SynchronousConfig)
    acoustic_scale: AcousticScale = 0.3
    boost: Annotated[float, Range(0, 100)] = 0.0
    lattices: LatticeConfig = field(default_factory=LatticeConfig)
    # Each model begins from the one that it continues, and a lattice has an utterance's frames.
    warm_start: WarmStart = field(default="none", init=False)
    augmentation: AugmentationConfig = field(default=AugmentationConfig(), init=False)
    minibatch_selection: MinibatchSelectionConfig = field(
        default=MinibatchSelectionConfig(), init=False
    )

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models to train on."""
        return tuple(name for name in (BASELINE, TEACHER, STUDENT) if getattr(self, name))
