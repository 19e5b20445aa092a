"""The recipe: every step's settings in one frozen, typed record, read from TOML."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from infra.settings import (
    ConfigurationError,
    Items,
    Range,
    Readable,
    Text,
    apply_overrides,
    check_ranges,
    read_record,
    read_toml,
)
from pipeline.runs.names import (
    STUDENT,
    TEACHER,
    TargetsRound,
    evaluated_models,
    labelling_models,
    section_of,
)
from pipeline.settings import ExtractionConfig, RepartitionConfig, SelectionConfig, Versions
from training.settings.decoding import (
    BootstrapConfig,
    EvaluationConfig,
    LabellingConfig,
    SpelledText,
    TreeConfig,
    TuningConfig,
    UnknownWordsRule,
    Uri,
)
from training.settings.model_training import (
    Count,
    SequenceTrainingConfig,
    SoftTargetsForm,
    SupervisedConfig,
    TeacherConfig,
    TrainingSettings,
    WarmStart,
)
from training.settings.models import ModelConfig, Normalization, check_divisible
from training.settings.replaced_trainer import replace_trainer
from training.settings.trainers import BmufConfig, HtmConfig, SparseLocoConfig, check_optimizer

MAX_SUB_EPOCHS = 100_000
"""The most sub-epochs of the student, of all passes; the paper's has 18."""


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """CorpusConfig: the corpus's folder (empty: <run>/corpus) and the prefixes of its audio.

    An utterance to align with a word that the lexicon lacks is a ledger row; or the word is SPN, or
    a word of the decoder too, whose letters make a pronunciation. So are `num_text_words` of the
    most frequent other words of `evaluation.language_model_text`, which hypotheses then may have.
    By their letters words that recognizers heard are aligned, too, else such a word is garbage.
    """

    uri: Uri = ""
    audio_prefixes: Annotated[tuple[Annotated[str, Text(1, 4096)], ...], Items(0, 1000)] = ()
    unknown_words: UnknownWordsRule = "row"
    num_text_words: Annotated[int, Range(0, 1_000_000)] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.num_text_words and self.unknown_words != "letters":
            raise ValueError(
                f"num_text_words = {self.num_text_words}: need unknown_words = 'letters', by which "
                f"they are pronounced, not {self.unknown_words!r}"
            )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Save every `steps` (0: never) and at each sub-epoch's end; keep the last `num_kept`."""

    steps: Annotated[int, Range(1, 1_000_000_000, zero="never")] = 1000
    num_kept: Annotated[int, Range(1, 1000)] = 2

    __post_init__ = check_ranges

    def is_due(self, num_steps: int) -> bool:
        """Return whether to save after so many steps, within a sub-epoch."""
        return self.steps > 0 and num_steps % self.steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentConfig(TrainingSettings):
    """StudentConfig: scheduled learning on k-best targets and labelled data (003 V-D)."""

    num_sub_epochs: Count
    num_passes: Count
    num_whole_utterance_sub_epochs: Annotated[int, Range(0, MAX_SUB_EPOCHS)]
    labelled_rate_factor: Annotated[float, Range(1e-6, 1000)]
    num_labelled_shares: Count
    soft_targets: SoftTargetsForm = "renormalized"
    model_parallel_ranks: Annotated[int, Range(1, 64)] = 1

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        if self.model_parallel_ranks > 1:
            self._check_model_parallel()
        num_sub_epochs = self.num_sub_epochs * self.num_passes
        if num_sub_epochs > MAX_SUB_EPOCHS:
            raise ValueError(
                f"num_sub_epochs x num_passes = {num_sub_epochs}: need at most {MAX_SUB_EPOCHS}"
            )
        if self.num_whole_utterance_sub_epochs > num_sub_epochs:
            raise ValueError(
                f"num_whole_utterance_sub_epochs = {self.num_whole_utterance_sub_epochs}: need "
                f"0..{num_sub_epochs}, the sub-epochs in all"
            )

    def _check_model_parallel(self) -> None:
        said, trainer = f"model_parallel_ranks = {self.model_parallel_ranks}", self.trainer
        if self.precision != "float32":
            raise ValueError(f"{said}: precision = {self.precision!r}: need 'float32'")
        # Tiers divide a world, and the ranks of one part are none.
        if isinstance(trainer, HtmConfig) or (
            isinstance(trainer, BmufConfig | SparseLocoConfig) and trainer.ranks_per_leader != 1
        ):
            raise ValueError(
                f"{said}: trainer {trainer.name!r} divides ranks into groups itself: need one "
                "without groups and with ranks_per_leader = 1, such as 'one_bit'"
            )

    @property
    def chunks(self) -> str:
        """Name the setting that makes chunks, and the value without them; empty without them."""
        whole, total = self.num_whole_utterance_sub_epochs, self.num_sub_epochs * self.num_passes
        return f"num_whole_utterance_sub_epochs = {whole}: need {total}" if whole < total else ""


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """ModelsConfig: the deployed model (baseline, aligner and student alike) and the teacher.

    `normalization` says of which speech the global mean and variance are (003 IV-B2) by which
    aligner, baseline and teacher normalize: with "labelled" they need no unlabelled speech. The
    student's are of all speech, or those of the model that it begins from.
    """

    student: ModelConfig
    teacher: ModelConfig
    normalization: Normalization = "all"

    def of(self, name: str) -> ModelConfig:
        """Return the form of the model `name`; an ensemble's teachers have one form."""
        return self.teacher if section_of(name) == TEACHER else self.student


@dataclass(frozen=True, slots=True)
class AlignmentConfig:
    """AlignmentConfig: how often a network is trained on the alignments and realigns (VII-C2).

    Of an utterance that ingest simulated in several placements, each version is aligned by itself,
    or all have the alignment of the clearest. With `regrow_tree` the tree is grown again on the
    last alignment, for all models but the aligner.
    """

    rounds: Annotated[int, Range(1, 20)] = 1
    versions: Versions = "own"
    regrow_tree: bool = False

    __post_init__ = check_ranges


EARLIER_MODELS: Mapping[str, Sequence[WarmStart]] = {
    "aligner": ("none",),
    "baseline": ("none", "aligner"),
    "teacher": ("none",),
    "student": ("none", "aligner", "baseline"),
}
"""Models that each model may begin from; the teacher alone is bidirectional."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe holds all that decides a run; `loss_budget` is the share of utterances it may lose."""

    name: Annotated[str, Text(1, 200)]
    cluster: Annotated[str, Text(0, 4096)]
    loss_budget: Annotated[float, Range(0, 1, below=True)]
    selection: SelectionConfig
    features: ExtractionConfig
    bootstrap: BootstrapConfig
    senones: TreeConfig
    models: ModelsConfig
    aligner: SupervisedConfig
    baseline: SupervisedConfig
    teacher: TeacherConfig
    targets: LabellingConfig
    partitions: RepartitionConfig
    student: StudentConfig
    evaluation: EvaluationConfig
    corpus: CorpusConfig = CorpusConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    sequence_training: SequenceTrainingConfig = field(default=SequenceTrainingConfig())
    tuning: TuningConfig = field(default=TuningConfig())

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.targets.k > self.senones.max_senones:
            raise ValueError(
                f"targets: k = {self.targets.k}: need at most senones.max_senones = "
                f"{self.senones.max_senones}"
            )
        if self.student.soft_targets != "renormalized" and self.targets.tail_samples:
            raise ValueError(
                f"student: soft_targets = {self.student.soft_targets!r} with targets.tail_samples "
                f"= {self.targets.tail_samples}: need 0, or 'renormalized', which reads the draws"
            )
        for section, earlier in EARLIER_MODELS.items():
            config = getattr(self, section)
            name = config.warm_start
            if name not in earlier:
                raise ValueError(
                    f"{section}: warm_start = {name!r}: need one of {', '.join(earlier)}: a model "
                    "of the same form that is trained before it"
                )
            if name == "aligner" and self.alignment.regrow_tree:
                raise ValueError(
                    f"{section}: warm_start = 'aligner' with alignment.regrow_tree = true: need "
                    "another: the aligner's senones are those of the bootstrap's tree"
                )
            if config.model_parallel_ranks > 1:
                check_divisible(self.models.of(section), config.model_parallel_ranks)
            if self.models.of(section).whole_utterances and (said := config.chunks):
                raise ValueError(f"{section}: {said}: its model declares whole_utterances = true")
        if self.corpus.num_text_words and not self.evaluation.language_model_text:
            raise ValueError(
                f"corpus: num_text_words = {self.corpus.num_text_words}: need 0, or the name of a "
                "text in evaluation.language_model_text"
            )
        own = "as targets.teacher names your own"
        if not self.num_teachers and (number := self.teacher.ensemble) > 1:
            remedy = "name the others in targets.teacher.ensemble"
            raise ValueError(f"teacher: ensemble = {number}: need 1, {own}: {remedy}")
        if self.targets.rounds > 1:
            self._check_later_rounds()
        elif not self.num_teachers and self.sequence_training.teacher:
            raise ValueError(f"sequence_training: teacher = True: need false, {own}, not trained")

    def _check_later_rounds(self) -> None:
        learns = f"with targets.rounds = {self.targets.rounds} a teacher learns as the student does"
        if self.models.teacher.whole_utterances and (said := self.student.chunks):
            raise ValueError(f"student: {said}: {learns}, with whole_utterances = true")
        try:
            check_optimizer(self.teacher.trainer, self.student.optimizer)
        except ValueError as error:
            raise ValueError(f"student: {learns}, but by the teacher's trainer: {error}") from error

    @property
    def spelled_text(self) -> SpelledText:
        """Return of which text words are pronounced by their letters."""
        return SpelledText(self.evaluation.language_model_text, self.corpus.num_text_words)

    @property
    def num_teachers(self) -> int:
        """Return how many teachers are trained: none where the user's own label."""
        return 0 if self.targets.teacher.members else self.teacher.ensemble

    @property
    def num_siblings(self) -> int:
        """Return how many teachers label in each later round: one after the user's own."""
        return max(1, self.num_teachers)

    @property
    def num_labelling(self) -> int:
        """Return how many teachers label in the first round."""
        return len(self.targets.teacher.members) or self.teacher.ensemble

    @property
    def evaluated_models(self) -> tuple[str, ...]:
        """Return the models that are scored, by name."""
        return evaluated_models(
            self.sequence_training.models, self.num_teachers, self.targets.rounds
        )

    @property
    def supervised_models(self) -> tuple[str, ...]:
        """Return those of them that learn from labelled speech alone."""
        scored = evaluated_models(self.sequence_training.models, self.num_teachers)
        return tuple(name for name in scored if section_of(name) != STUDENT)

    def labelling_models(self, targets_round: TargetsRound) -> tuple[str, ...]:
        """Return the models that label the targets of a round; none if the user's own label."""
        return labelling_models(self.sequence_training.models, self.num_teachers, targets_round)


def check_ranks(config: TrainingSettings, name: str, num_ranks: int, ranks_per_host: int) -> None:
    """Raise ConfigurationError if so many ranks, of hosts of so many, cannot train a model."""
    num_parts = config.model_parallel_ranks
    if num_ranks % num_parts:
        raise ConfigurationError(
            f"{name}: model_parallel_ranks = {num_parts}: need a divisor of {num_ranks}, the ranks"
        )
    try:
        config.trainer.check_ranks(num_ranks // num_parts, max(ranks_per_host // num_parts, 1))
    except ValueError as error:
        raise ConfigurationError(f"{name}: trainer: {error}") from error


def check_phones(recipe: Recipe, num_phones: int) -> None:
    """Raise ConfigurationError if a tree of senones cannot have a root for each phone."""
    if recipe.senones.max_senones < num_phones:
        raise ConfigurationError(
            f"senones: max_senones = {recipe.senones.max_senones}: need at least {num_phones}, "
            "one for each phone of the lexicon and silence"
        )


def check_senones(recipe: Recipe, num_senones: int) -> None:
    """Raise ConfigurationError if a frame has fewer logits than the targets are to keep."""
    if recipe.targets.k > num_senones:
        raise ConfigurationError(
            f"targets: k = {recipe.targets.k}: need at most {num_senones}, the senones that the "
            "labelled data gave: lower it, or senones.min_count"
        )


def read_recipe(
    path: str | Readable,
    overrides: Sequence[str] = (),
    trainers: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], object] = lambda _: None,
) -> Recipe:
    """Read a recipe with dotted overrides; ConfigurationError names what is wrong in it.

    `trainers` names another trainer by section, such as {"student": "gtc"}; `say` receives what
    that changed of the recipe.
    """
    table = read_toml(path)
    for section, name in trainers.items():
        # What is no table is refused below, with the key's name.
        if isinstance(settings := table.get(section), dict) and "trainer" in settings:
            changes = replace_trainer(table, section, name, overrides, str(path))
            if changes:
                say(f"--trainer {name}: {', '.join(changes)}; --set gives others")
    return read_record(Recipe, apply_overrides(table, overrides), str(path))
