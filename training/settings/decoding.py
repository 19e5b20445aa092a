"""Settings of alignment, decoding and soft targets (paper 003 IV-B3, V-C, VII-C2, VII-C3).

Development speakers choose some of the decoding's values: `TuningConfig` lists the candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from infra.settings import (
    IMPLIED,
    ConfigurationError,
    Items,
    Range,
    Text,
    canonical_json,
    check_ranges,
    plain,
    read_record,
)
from pipeline.runs.names import LANGUAGE_MODEL_SETTINGS, UNKNOWN_WORDS_SETTING
from pipeline.settings import MAX_SENONES, TargetsConfig, Versions
from training.entry_point import EntryPoint, FactoryName, Settings, require_not_given
from training.settings import MAX_ORDER, AcousticScale

NgramOrder = Annotated[int, Range(1, MAX_ORDER)]
Beam = Annotated[float, Range(1e-3, 1e6)]
MaxActive = Annotated[int, Range(2, 1_000_000_000)]
Uri = Annotated[str, Text(0, 4096)]

UnknownWordsRule = Literal["row", "spn", "letters"]
"""What becomes of a word of a transcript that the lexicon lacks.

Its utterance is a ledger row, or it is aligned as spoken noise, or its letters make its phones.
"""


@dataclass(frozen=True)
class BootstrapConfig:
    """BootstrapConfig bounds the iterations, the Gaussians of a state, and the speech in memory.

    Of more than `max_hours`, monophones learn from utterances drawn evenly from all speakers. They
    align all hours.
    """

    num_iterations: Annotated[int, Range(1, 1000)] = 12
    max_gaussians: Annotated[int, Range(1, 1024)] = 8
    min_frames_per_gaussian: Annotated[int, Range(1, 1_000_000)] = 40
    # 0.23 GB an hour: the default binds above 4.6 GB, where few earlier runs were.
    max_hours: Annotated[float, Range(1e-3, 100_000, zero="all")] = 20.0

    __post_init__ = check_ranges


@dataclass(frozen=True)
class TreeConfig:
    """TreeConfig bounds the tree; `min_count` is the least number of 10 ms frames of a leaf.

    Its likelihoods are of cepstra with derivatives, or of spliced cepstra after LDA and MLLT (003
    VII-C1).
    """

    max_senones: Annotated[int, Range(1, MAX_SENONES)]
    min_count: Annotated[int, Range(1, 1_000_000_000)] = 200
    features: Literal["cepstra", "lda_mllt"] = "cepstra"

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class SpelledText:
    """SpelledText: so many words of a text that the lexicon lacks are pronounced by their letters.

    They are its most frequent ones. `language_model_text` names the text as `[evaluation]` does.
    """

    language_model_text: str = ""
    num_text_words: int = 0


def bootstrap_settings(
    bootstrap: BootstrapConfig,
    senones: TreeConfig,
    versions: Versions,
    rule: UnknownWordsRule,
    text: SpelledText,
) -> dict[str, Any]:
    """Return what the bootstrap's manifest states; the text's settings if any words are of it."""
    of_records = {"bootstrap": plain(bootstrap), "senones": plain(senones)}
    of_text = asdict(text) if text.num_text_words else {}
    return {**of_records, "versions": versions, UNKNOWN_WORDS_SETTING: rule, **of_text}


def realignment_settings(
    acoustic_scale: float, versions: Versions, regrown: TreeConfig | None
) -> dict[str, Any]:
    """Return what the manifest of a network's alignment states; the tree's if it is regrown."""
    senones = {} if regrown is None else {"senones": plain(regrown)}
    return {"acoustic_scale": acoustic_scale, "versions": versions, **senones}


MAX_VALUES = 100

Scales: TypeAlias = Annotated[tuple[AcousticScale, ...], Items(0, MAX_VALUES)]
"""Scales of the acoustic or of the language model, which have one range."""

Smoothing = Literal["witten_bell", "kneser_ney"]
MinCount = Annotated[int, Range(1, 1_000_000)]


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """DecodingSettings: how much scores weigh; the insertion penalty is a word's cost in nats.

    Costs of states and silence have weight 1, so that the two scales are not each other's inverse.
    """

    acoustic_scale: float
    ngram_order: int
    language_model_scale: float = 1.0
    insertion_penalty: float = 0.0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "DecodingSettings":
        """Read settings that a manifest states; ValueError for fields that are no settings."""
        try:
            return read_record(cls, fields, "settings of a search")
        except ConfigurationError as error:
            raise ValueError(f"{error}: run the step again") from error

    def with_value(self, setting: str, value: int | float) -> "DecodingSettings":
        """Return these settings with another value of one of them."""
        changed: dict[str, Any] = {setting: value}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """TuningConfig: the values that tuning tries for each model, beside `[evaluation]`'s own.

    A scale of the language model below 1 is for too many deletions, a penalty for insertions. One
    setting after the other is chosen, in this order; with an empty list it stays as it is.
    """

    acoustic_scales: Scales = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
    ngram_orders: Annotated[tuple[NgramOrder, ...], Items(0, MAX_ORDER)] = (2, 3, 4)
    language_model_scales: Scales = (0.8, 1.25)
    insertion_penalties: Annotated[
        tuple[Annotated[float, Range(0, 100)], ...], Items(0, MAX_VALUES)
    ] = (0.5, 1.0)

    __post_init__ = check_ranges

    def grid(self) -> dict[str, Sequence[int | float]]:
        """Return the values to try by setting, in the order of the choices."""
        return {
            "acoustic_scale": self.acoustic_scales,
            "ngram_order": self.ngram_orders,
            "language_model_scale": self.language_model_scales,
            "insertion_penalty": self.insertion_penalties,
        }


@dataclass(frozen=True, slots=True)
class FirstPassConfig:
    """FirstPassConfig: the n-gram model by which all searches find lattices, to be rescored.

    `pruning` is the share by which an n-gram that is removed may raise the perplexity (Stolcke
    1998). A model of the user's own is pruned, and has its own order.
    """

    ngram_order: NgramOrder = 3
    pruning: Annotated[float, Range(0, 1, zero="none")] = 1e-7

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """EvaluationConfig: the decoding of the held-out subset (003 VII-D).

    The n-gram model is of the labelled transcripts, and of `language_model_text` where that names
    a file. It lists n-grams of n words that occur min_counts[n - 1] times at least; the last
    element holds for longer ones. `arpa` names a model to use in its place. Both are names in the
    corpus, or URIs.

    The search with the first pass's model keeps paths within `beam`, and of these in a lattice
    those within `lattice_beam` of the best, which the n-gram model of `ngram_order` rescores.
    """

    ngram_order: NgramOrder
    acoustic_scale: AcousticScale
    beam: Beam
    max_active: MaxActive
    lattice_beam: Beam = 10.0
    smoothing: Smoothing = "witten_bell"
    min_counts: Annotated[tuple[MinCount, ...], Items(0, MAX_ORDER)] = ()
    language_model_text: Uri = ""
    arpa: Uri = ""
    first_pass: FirstPassConfig = FirstPassConfig()

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.arpa and self.language_model_text:
            raise ValueError(
                f"arpa = {self.arpa!r} and language_model_text = {self.language_model_text!r}: "
                "need one of them: a given model is estimated from no text"
            )
        least = self.min_counts or (1,)
        if least[0] != 1 or any(one > other for one, other in pairwise(least)):
            raise ValueError(
                f"min_counts = {list(least)}: need 1 for unigrams, which all words have, and no "
                "less for an n-gram than for a shorter one, which is its history"
            )


@dataclass(frozen=True, slots=True)
class LatticeConfig:
    """LatticeConfig: a weak language model of the labelled transcripts, and the search's beams.

    A strong one would leave few errors to learn from. Beams are in units of scaled
    log-likelihood; `beam` is doubled, twice at most, for an utterance that it leaves without end.

    With a `density` lattices are determinized: they have one path for each sequence of words. A
    sample chooses the beam, of at most `lattice_beam`, at which so many arcs read a frame, on
    average (003 VII-C3: around 10). Without one they are raw, and `lattice_beam` is their beam.
    """

    ngram_order: NgramOrder = 2
    beam: Beam = 13.0
    max_active: MaxActive = 7000
    lattice_beam: Beam = 6.0
    density: Annotated[float, Range(1, 1000, zero="raw lattices within lattice_beam")] = 0.0

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class WindowsConfig:
    """WindowsConfig: longer utterances are labelled in windows of so many low-rate frames.

    At a cut a window hears `overlap_frames` beyond the frames that it labels, on either side.
    """

    window_frames: Annotated[int, Range(3, 1_000_000)] = 4000
    overlap_frames: Annotated[int, Range(0, 100_000)] = 200

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.window_frames <= 2 * self.overlap_frames:
            raise ValueError(
                f"overlap_frames = {self.overlap_frames}: need less than half of window_frames = "
                f"{self.window_frames}"
            )


GIVEN_TO_TEACHERS = ("device", "num_senones")
"""The arguments that every factory of a teacher is given."""


@dataclass(frozen=True, slots=True)
class TrainedTeacherConfig:
    """TrainedTeacherConfig: the run trains its teachers on the labelled data (003 VII-C4)."""

    name: Literal["trained"] = field(default="trained", metadata=IMPLIED)

    @property
    def members(self) -> "Sequence[MemberConfig]":
        """Return none of the user's own."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """MemberConfig: `factory(device=, num_senones=, **settings)` makes one teacher of several."""

    factory: FactoryName
    settings: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        require_not_given(self.settings, GIVEN_TO_TEACHERS)

    def __hash__(self) -> int:
        return hash(canonical_json(self))

    @property
    def entry_point(self) -> EntryPoint:
        """Return the factory as it is imported."""
        return EntryPoint(self.factory, self.settings, GIVEN_TO_TEACHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTeacherConfig(MemberConfig):
    """OwnTeacherConfig: `factory(device=, num_senones=, **settings)` makes the teacher.

    With an `ensemble` of others, the mean of all their posteriors labels.
    """

    name: Literal["own"] = field(default="own", metadata=IMPLIED)
    ensemble: Annotated[tuple[MemberConfig, ...], Items(0, 19)] = ()

    @property
    def members(self) -> Sequence[MemberConfig]:
        """Return all teachers, in order."""
        return (MemberConfig(factory=self.factory, settings=self.settings), *self.ensemble)


LabellingTeacher: TypeAlias = TrainedTeacherConfig | OwnTeacherConfig
"""Whose posteriors label in the first round: a table with a factory names the user's own."""


@dataclass(frozen=True, slots=True)
class LatticeTargetsConfig:
    """LatticeTargetsConfig: the teacher's search with the language model of `[evaluation]`.

    `weight` is the share of the lattices' state posteriors in the targets, beside the teacher's
    own. Beams are in units of scaled log-likelihood; `beam` is doubled, twice at most, for an
    utterance that it leaves without end.
    """

    weight: Annotated[float, Range(0, 1)] = 0.5
    acoustic_scale: Annotated[float, Range(1e-6, 1000, zero="tuned, or the evaluation's")] = 0.0
    ngram_order: Annotated[int, Range(1, MAX_ORDER, zero="tuned, or the evaluation's")] = 0
    beam: Beam = 13.0
    max_active: MaxActive = 7000
    lattice_beam: Beam = 8.0

    __post_init__ = check_ranges

    @property
    def are_tuned(self) -> bool:
        """Return whether the recipe leaves settings to the development speakers, if there are."""
        return not (self.acoustic_scale and self.ngram_order)


@dataclass(frozen=True, slots=True)
class TranscriptsConfig:
    """TranscriptsConfig: what recognizers heard, aligned by the teacher, in the targets.

    `weight` is the share of the alignment's state posteriors in the targets of a frame, beside the
    teacher's own. Speech may be garbage in place of words, whose frames then keep the teacher's
    own: at `garbage_cost` a frame, in nats below the best senone's log-likelihood. A word's
    confidence is `agreement` times the share of the recognizers that have it, and the rest times
    the mean of their scores; below `min_confidence` it is garbage. The share `lattice_agreement` of
    a frame's weight is as large as the alignment and the run's own lattice (`[targets.lattices]`)
    agree there; at 0 no lattice is made.

    Where recognizers heard development speakers and `tuned` says so, these choose `garbage_cost`,
    `min_confidence` and `weight`.

    An utterance of which more than the share `max_unknown` of the words are not in the lexicon, or
    more than `max_garbage` of the frames are garbage, keeps the teacher's own, or is a ledger row.
    """

    language: Annotated[str, Text(2, 6, r"[a-z]{2,3}(_[A-Z]{2})?", "en")] = "en"
    weight: Annotated[float, Range(0, 1)] = 0.9
    acoustic_scale: Annotated[float, Range(1e-6, 1000, zero="the evaluation's")] = 0.0
    garbage_cost: Annotated[float, Range(0, 1000)] = 3.0
    scores: Literal["log_probability", "probability"] = "log_probability"
    agreement: Annotated[float, Range(0, 1)] = 0.5
    min_confidence: Annotated[float, Range(0, 1)] = 0.0
    lattice_agreement: Annotated[float, Range(0, 1)] = 0.0
    max_unknown: Annotated[float, Range(0, 1)] = 0.3
    max_garbage: Annotated[float, Range(0, 1)] = 0.5
    unaligned: Literal["teacher", "row"] = "teacher"
    tuned: bool = True

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class LabellingConfig(TargetsConfig):
    """LabellingConfig: targets of the teacher's logits alone, or of lattices or transcripts too.

    In each of the `rounds` after the first, a model of the teacher's form, trained on the targets
    of the round before as the student is, labels again. The first round's `teacher` is the run's
    own, or functions of the user's.
    """

    source: Literal["logits", "lattice", "transcripts"] = "logits"
    lattices: LatticeTargetsConfig = LatticeTargetsConfig()
    transcripts: TranscriptsConfig = TranscriptsConfig()
    rounds: Annotated[int, Range(1, 5)] = 1
    windows: WindowsConfig = WindowsConfig()
    teacher: LabellingTeacher = TrainedTeacherConfig()

    @property
    def needs_graph(self) -> bool:
        """Return whether unlabelled speech is decoded."""
        weighed = self.source == "transcripts" and self.transcripts.lattice_agreement > 0
        return self.source == "lattice" or weighed

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the manifest of the targets states: of transcripts if they are used."""
        unused = () if self.source == "transcripts" else ("transcripts",)
        return {name: value for name, value in plain(self).items() if name not in unused}


def lattice_settings(config: LatticeConfig, acoustic_scale: float) -> dict[str, Any]:
    """Return all that decides the lattices, besides the inputs."""
    return {**asdict(config), "acoustic_scale": acoustic_scale}


def kbest_costs_settings(config: TargetsConfig, teacher: LabellingTeacher) -> dict[str, Any]:
    """Return all that decides the sample, and what is measured beside the common k."""
    return {
        "k": config.k,
        "seed": config.seed,
        "versions": config.versions,
        "teacher": plain(teacher),
    }


def rescoring_orders(
    evaluation: EvaluationConfig, tuning: TuningConfig, lattices: LatticeTargetsConfig
) -> tuple[int, ...]:
    """Return the orders of all n-gram models that a run's lattices may be rescored by."""
    stated = {evaluation.ngram_order, *tuning.ngram_orders, lattices.ngram_order}
    return tuple(sorted(stated - {0}))


def graph_settings(evaluation: EvaluationConfig, orders: Sequence[int]) -> dict[str, Any]:
    """Return all that decides the graph and the grammars, besides the inputs."""
    resolved = plain(evaluation)
    of_model = ("first_pass", "smoothing", "min_counts", *LANGUAGE_MODEL_SETTINGS)
    return {**{name: resolved[name] for name in of_model}, "ngram_orders": list(orders)}


def transcripts_tuning_settings(
    config: LabellingConfig, evaluation: EvaluationConfig
) -> dict[str, Any]:
    """Return all that decides the trials, besides the inputs."""
    found = {
        "transcripts": plain(config.transcripts),
        "acoustic_scale": config.transcripts.acoustic_scale or evaluation.acoustic_scale,
    }
    if config.needs_graph:
        found |= {"lattices": plain(config.lattices), **search_of_targets(config, evaluation)}
    return found


def search_of_targets(config: LabellingConfig, evaluation: EvaluationConfig) -> dict[str, Any]:
    """Return what decides the search for targets beside `[targets]`; nothing for logits alone."""
    if config.source == "logits":
        return {}
    resolved = plain(evaluation)
    read = ("acoustic_scale", "ngram_order") if config.needs_graph else ("acoustic_scale",)
    return {"evaluation": {name: resolved[name] for name in read}}
