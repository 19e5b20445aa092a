"""The recipe: every step's configuration in one frozen, typed record, read from TOML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Literal

from infra.configuration import apply_overrides, read_record, read_toml
from pipeline.steps.features import ExtractionConfig
from pipeline.steps.repartition import RepartitionConfig
from pipeline.steps.selection.select import SelectionConfig
from pipeline.steps.targets import TargetsConfig
from training.algorithms.learning_rates import check_decay, check_newbob_rates
from training.decoding.bootstrap.hmm import BootstrapConfig
from training.decoding.senones.tree_growing import TreeConfig
from training.models.acoustic_model import ModelConfig
from training.trainers.registry import TrainerConfig, with_trainer

ScheduleName = Literal["exponential", "newbob"]


def _require_at_least(bound: int, config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < bound:
            raise ValueError(f"{name} = {getattr(config, name)}: need at least {bound}")


def _require_above_0(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} = {getattr(config, name)}: need above 0")


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """CorpusConfig: the corpus's folder (empty: <run>/corpus) and the prefixes of its audio."""

    uri: str = ""
    audio_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Save every `steps` (0: never) and at each sub-epoch's end; keep the last `num_kept`."""

    steps: int = 1000
    num_kept: int = 2

    def __post_init__(self) -> None:
        _require_at_least(0, self, "steps")
        _require_at_least(1, self, "num_kept")

    def is_due(self, num_steps: int) -> bool:
        """Return whether to save after so many steps, within a sub-epoch."""
        return self.steps > 0 and num_steps % self.steps == 0


@dataclass(frozen=True, slots=True)
class SupervisedConfig:
    """SupervisedConfig: labelled data in chunked epochs, then in whole utterances (003 II-B).

    With `schedule = "newbob"` (000 3.2) the final rate is the least, `num_epochs` the most epochs,
    and one utterance in `validation_one_in` is left out of training to measure the loss on.
    """

    num_epochs: int
    num_chunked_epochs: int
    initial_learning_rate: float
    final_learning_rate: float
    minibatch_frames: int
    max_gradient_norm: float
    seed: int
    trainer: TrainerConfig
    schedule: ScheduleName = "exponential"
    validation_one_in: int = 20

    def __post_init__(self) -> None:
        _require_at_least(1, self, "num_epochs", "minibatch_frames")
        _require_at_least(0, self, "seed")
        _require_above_0(self, "max_gradient_norm")
        rates = self.initial_learning_rate, self.final_learning_rate
        check_decay(*rates, self.num_epochs)
        if self.schedule == "newbob":
            check_newbob_rates(*rates)
            _require_at_least(2, self, "validation_one_in")
        if not 0 <= self.num_chunked_epochs <= self.num_epochs:
            raise ValueError(
                f"num_chunked_epochs = {self.num_chunked_epochs}: need 0..{self.num_epochs}, "
                "the epochs in all"
            )


@dataclass(frozen=True, slots=True)
class StudentConfig:
    """StudentConfig: scheduled learning on k-best targets and labelled data (003 V-D)."""

    num_sub_epochs: int
    num_passes: int
    num_whole_utterance_sub_epochs: int
    labelled_rate_factor: float
    num_labelled_shares: int
    initial_learning_rate: float
    final_learning_rate: float
    minibatch_frames: int
    max_gradient_norm: float
    seed: int
    trainer: TrainerConfig

    def __post_init__(self) -> None:
        _require_at_least(1, self, "num_sub_epochs", "num_passes", "num_labelled_shares")
        _require_at_least(1, self, "minibatch_frames")
        _require_at_least(0, self, "num_whole_utterance_sub_epochs", "seed")
        _require_above_0(self, "labelled_rate_factor", "max_gradient_norm")
        num_sub_epochs = self.num_sub_epochs * self.num_passes
        check_decay(self.initial_learning_rate, self.final_learning_rate, num_sub_epochs)


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """ModelsConfig: the deployed model (baseline, aligner and student alike) and the teacher."""

    student: ModelConfig
    teacher: ModelConfig


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """EvaluationConfig: the decoding of the held-out subset (003 VII-D)."""

    ngram_order: int
    acoustic_scale: float
    beam: float
    max_active: int

    def __post_init__(self) -> None:
        _require_at_least(1, self, "ngram_order", "max_active")
        _require_above_0(self, "acoustic_scale", "beam")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe holds all that decides a run; `loss_budget` is the share of utterances it may lose."""

    name: str
    cluster: str
    loss_budget: float
    selection: SelectionConfig
    features: ExtractionConfig
    bootstrap: BootstrapConfig
    senones: TreeConfig
    models: ModelsConfig
    aligner: SupervisedConfig
    baseline: SupervisedConfig
    teacher: SupervisedConfig
    targets: TargetsConfig
    partitions: RepartitionConfig
    student: StudentConfig
    evaluation: EvaluationConfig
    corpus: CorpusConfig = CorpusConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.loss_budget < 1:
            raise ValueError(f"loss_budget = {self.loss_budget}: need 0 <= loss_budget < 1")


def read_recipe(
    path: str | Traversable,
    overrides: Sequence[str] = (),
    trainers: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """Read a recipe with dotted overrides; ConfigurationError names what is wrong in it.

    `trainers` names another trainer by section, such as {"student": "gtc"}: it keeps those of the
    section's settings that it has too.
    """
    table = apply_overrides(read_toml(path), overrides)
    for section, name in trainers.items():
        settings = table.get(section)
        # What is no table is refused below, with the key's name.
        if isinstance(settings, dict) and isinstance(settings.get("trainer", {}), dict):
            settings["trainer"] = with_trainer(settings.get("trainer", {}), name)
    return read_record(Recipe, table, str(path))
