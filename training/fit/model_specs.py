"""Describe the models of a run as its recipe trains them (paper 003 V-A, VII-C)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from infra.settings import plain
from pipeline.runs.names import (
    ALIGNER,
    ALIGNMENT_STEP,
    BASELINE,
    DEV_ALIGNMENT_STEP,
    LABELLED,
    PARTITIONS_STEP,
    STUDENT,
    TEACHER,
    UNLABELLED,
    RealignmentRound,
    TargetsRound,
    features_step,
    lattices_step,
    model_step,
    realignment_rounds,
    sequence_trained,
    targets_rounds,
    teachers,
)
from training.algorithms.learning_rates import MinRateNewbob, exponential_decay
from training.data.sub_epochs import (
    SubEpoch,
    scheduled_learning_sub_epochs,
    sequence_sub_epochs,
    supervised_sub_epochs,
)
from training.settings.model_training import AugmentationConfig, SupervisedConfig, TrainingSettings
from training.settings.models import ModelConfig, Normalization
from training.settings.recipe import CheckpointConfig, Recipe

LEFT_OUT = "left_out"
"""The validation on labelled speakers whom training leaves out."""


@dataclass(frozen=True, slots=True)
class SequenceCriterion:
    """SequenceCriterion: sMBR over the lattices that the step `lattices` made (II-C)."""

    lattices: str
    acoustic_scale: float
    boost: float


Criterion: TypeAlias = Literal["cross_entropy"] | SequenceCriterion


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit describes one model's training: its name, form, data, sub-epochs and settings.

    `training` is its section of the recipe; sequence training has the `warm_start` and the
    placements of the model that it continues. With `newbob` the sub-epochs are the most that are
    made, at its rates; `validation` says on whom the loss is measured: on LEFT_OUT, one labelled
    speaker in `validation_one_in`, or on a step's partitions. `warm_start` is the model of the run
    from which training begins, or "none". Sequence training reads whole utterances. Inputs are
    normalized by the moments of the features that the steps `moments` extracted, together; a model
    with a `warm_start` keeps the normalization of the one that it begins from.
    """

    name: str
    model: ModelConfig
    labelled: str
    unlabelled: str | None
    sub_epochs: Sequence[SubEpoch]
    training: TrainingSettings
    moments: tuple[str, ...]
    newbob: MinRateNewbob | None = None
    validation_one_in: int = 0
    warm_start: str = "none"
    criterion: Criterion = "cross_entropy"
    augmentation: AugmentationConfig = field(default=AugmentationConfig())
    validation: str = ""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.newbob and self.validation_one_in < 2:
            raise ValueError(
                f"validation_one_in = {self.validation_one_in}: need at least 2: newbob measures "
                "the loss on one speaker in so many, and trains on the others"
            )

    @property
    def inputs(self) -> list[str]:
        """Return the steps whose manifests this model depends on."""
        # The frozen global mean and variance make each model depend on the features.
        steps = [self.labelled, *([self.unlabelled] if self.unlabelled else []), *self.moments]
        if isinstance(self.criterion, SequenceCriterion):
            steps.append(self.criterion.lattices)
        steps += [self.validation] if self.validation not in ("", LEFT_OUT) else []
        return steps if self.warm_start == "none" else [*steps, model_step(self.warm_start)]

    def on_development_speakers(self) -> "Fit":
        """Return the fit as it is where the corpus has them: newbob's loss is theirs.

        The aligner trains before they are aligned, and leaves labelled speakers out.
        """
        aligned = self.newbob is not None and self.labelled == ALIGNMENT_STEP
        return replace(self, validation=DEV_ALIGNMENT_STEP) if aligned else self

    @property
    def config(self) -> dict[str, Any]:
        """Return all that decides the model; how often training is saved does not.

        `moments` are among the inputs, with their digests.
        What one section of the recipe has and the others lack is in sub-epochs, newbob and
        criterion, or says which models are trained.
        """
        config: dict[str, Any] = plain(self)
        del config["checkpoints"], config["moments"]
        common = {each.name for each in fields(TrainingSettings)}
        training = config["training"].items()
        config["training"] = {name: value for name, value in training if name in common}
        return config


MOMENTS: Mapping[Normalization, tuple[str, ...]] = {
    "labelled": (features_step(LABELLED),),
    "all": (features_step(LABELLED), features_step(UNLABELLED)),
}
"""The steps whose features' moments normalize a model's inputs."""


def _supervised(name: str, config: SupervisedConfig, recipe: Recipe, labelled: str) -> Fit:
    rates = config.initial_learning_rate, config.final_learning_rate
    decay = exponential_decay(*rates, config.num_epochs)
    is_newbob = config.schedule == "newbob"
    return Fit(
        name=name,
        model=recipe.models.of(name),
        labelled=labelled,
        unlabelled=None,
        sub_epochs=supervised_sub_epochs(
            decay, config.num_chunked_epochs, config.data_one_in, config.cold_start_one_in
        ),
        training=config,
        moments=MOMENTS[recipe.models.normalization],
        newbob=MinRateNewbob(*rates) if is_newbob else None,
        validation_one_in=config.validation_one_in if is_newbob else 0,
        validation=LEFT_OUT if is_newbob else "",
        warm_start=config.warm_start,
        augmentation=config.augmentation,
        checkpoints=recipe.checkpoints,
    )


def aligner_fit(recipe: Recipe, realignment: RealignmentRound) -> Fit:
    """Describe the network that realigns, trained on the alignments before its own (VII-C2)."""
    return _supervised(realignment.aligner, recipe.aligner, recipe, realignment.reads)


def baseline_fit(recipe: Recipe) -> Fit:
    """Describe the fully supervised model that the student must beat (VII-C7)."""
    return _supervised(BASELINE, recipe.baseline, recipe, ALIGNMENT_STEP)


def teacher_fit(recipe: Recipe, number: int = 1) -> Fit:
    """Describe the bidirectional teacher, trained on the labelled data (VII-C4).

    Teacher `number` of an ensemble, from 1 on, is that of another seed.
    """
    name, config = teachers(number)[-1], recipe.teacher
    config = replace(config, seed=(config.seed + number - 1) % 2**64)
    return _supervised(name, config, recipe, ALIGNMENT_STEP)


def teacher_fits(recipe: Recipe) -> list[Fit]:
    """Describe all teachers of the ensemble, in order; none where the user's own labels."""
    return [teacher_fit(recipe, number) for number in range(1, recipe.num_teachers + 1)]


def sequence_fit(recipe: Recipe, fit: Fit) -> Fit:
    """Describe the sMBR training of the model that `fit` makes, on labelled data (VII-C3)."""
    config = recipe.sequence_training
    rates = config.initial_learning_rate, config.final_learning_rate
    return Fit(
        name=sequence_trained(fit.name),
        model=fit.model,
        labelled=fit.labelled,
        unlabelled=None,
        sub_epochs=sequence_sub_epochs(exponential_decay(*rates, config.num_epochs)),
        training=config,
        moments=fit.moments,
        warm_start=fit.name,
        criterion=SequenceCriterion(lattices_step(fit.name), config.acoustic_scale, config.boost),
        # At another speed an utterance would have other frames than its lattice.
        augmentation=AugmentationConfig(placements=fit.augmentation.placements),
        checkpoints=fit.checkpoints,
    )


def student_fit(recipe: Recipe) -> Fit:
    """Describe the student: scheduled learning on the teacher's targets and labelled data (V-D)."""
    config = recipe.student
    rates = config.initial_learning_rate, config.final_learning_rate
    sub_epochs = scheduled_learning_sub_epochs(
        # The rate decays over the sub-epochs of all passes; the paper makes one pass (V-D).
        exponential_decay(*rates, config.num_sub_epochs * config.num_passes),
        config.num_sub_epochs,
        config.num_whole_utterance_sub_epochs,
        config.labelled_rate_factor,
        config.num_labelled_shares,
        recipe.targets.offsets == "all" or config.soft_targets == "best",
    )
    return Fit(
        name=STUDENT,
        model=recipe.models.student,
        labelled=ALIGNMENT_STEP,
        unlabelled=PARTITIONS_STEP,
        sub_epochs=sub_epochs,
        training=config,
        # It begins from a supervised model, or reads unlabelled speech anyway.
        moments=MOMENTS["all" if config.warm_start == "none" else recipe.models.normalization],
        warm_start=config.warm_start,
        augmentation=config.augmentation,
        checkpoints=recipe.checkpoints,
    )


def sibling_fit(recipe: Recipe, earlier: TargetsRound, number: int = 1) -> Fit:
    """Describe the student's bidirectional sibling, which labels in the round after `earlier`.

    It has the teacher's form and trainer, and learns as the student does, from earlier targets.
    Sibling `number` of an ensemble, from 1 on, is that of another seed.
    """
    config = replace(
        recipe.student,
        seed=(recipe.student.seed + number - 1) % 2**64,
        trainer=recipe.teacher.trainer,
        model_parallel_ranks=1,
        # No earlier model of the run is of its form and has learnt from these targets.
        warm_start="none",
    )
    return replace(
        student_fit(replace(recipe, student=config)),
        name=TargetsRound(earlier.number + 1, earlier.total).siblings(number)[-1],
        model=recipe.models.teacher,
        unlabelled=earlier.partitions,
    )


def sibling_fits(recipe: Recipe) -> list[Fit]:
    """Describe the teachers of all rounds of targets after the first, in order."""
    return [
        sibling_fit(recipe, each, number)
        for each in targets_rounds(recipe.targets.rounds)[:-1]
        for number in range(1, recipe.num_siblings + 1)
    ]


def fits_of(recipe: Recipe, section: str) -> list[Fit]:
    """Describe all models that the step of a recipe's section trains, in order."""
    if section == ALIGNER:
        rounds = realignment_rounds(recipe.alignment.rounds)
        return [aligner_fit(recipe, each) for each in rounds]
    if section == TEACHER:
        return [*teacher_fits(recipe), *sibling_fits(recipe)]
    return [baseline_fit(recipe) if section == BASELINE else student_fit(recipe)]
