"""The settings of soft targets, their teachers and lattices (paper 003 IV-B3, V-C, VII-C3)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from infra.settings import LATER, Items, Range, canonical_json, check_ranges, plain
from pipeline.runs.names import LANGUAGE_MODEL_SETTINGS
from pipeline.steps.targets import TargetsConfig
from training.configuration.decoding import EvaluationConfig
from training.configuration.values import MAX_ORDER, Beam, NgramOrder
from training.entry_point import EntryPoint, FactoryName, Settings, require_not_given


@dataclass(frozen=True, slots=True)
class LatticeConfig:
    """LatticeConfig: a weak language model of the labelled transcripts, and the search's beams.

    A strong one would leave few errors to learn from. Beams are in units of scaled
    log-likelihood; `beam` is doubled, twice at most, for an utterance that it leaves without end.
    """

    ngram_order: NgramOrder = 2
    beam: Beam = 13.0
    lattice_beam: Beam = 6.0

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

    name: Literal["trained"] = field(default="trained", metadata=LATER)

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
class OwnTeacherConfig:
    """OwnTeacherConfig: `factory(device=, num_senones=, **settings)` makes the teacher.

    With an `ensemble` of others, the mean of all their posteriors labels.
    """

    name: Literal["own"] = field(default="own", metadata=LATER)
    factory: FactoryName
    settings: Settings = field(default_factory=dict)
    ensemble: Annotated[tuple[MemberConfig, ...], Items(0, 19)] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        require_not_given(self.settings, GIVEN_TO_TEACHERS)

    def __hash__(self) -> int:
        return hash(canonical_json(self))

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
    lattice_beam: Beam = 8.0

    __post_init__ = check_ranges

    @property
    def are_tuned(self) -> bool:
        """Return whether the recipe leaves settings to the development speakers, if there are."""
        return not (self.acoustic_scale and self.ngram_order)


@dataclass(frozen=True, slots=True)
class LabellingConfig(TargetsConfig):
    """LabellingConfig: targets of the teacher's logits alone, or of its lattices too.

    In each of the `rounds` after the first, a model of the teacher's form, trained on the targets
    of the round before as the student is, labels again. The first round's `teacher` is the run's
    own, or functions of the user's.
    """

    source: Literal["logits", "lattice"] = field(default="logits", metadata=LATER)
    lattices: LatticeTargetsConfig = field(default=LatticeTargetsConfig(), metadata=LATER)
    rounds: Annotated[int, Range(1, 5)] = field(default=1, metadata=LATER)
    windows: WindowsConfig = field(default=WindowsConfig(), metadata=LATER)
    teacher: LabellingTeacher = field(default=TrainedTeacherConfig(), metadata=LATER)


def lattice_settings(config: LatticeConfig, acoustic_scale: float) -> dict[str, Any]:
    """Return all that decides the lattices, besides the inputs."""
    return {**asdict(config), "acoustic_scale": acoustic_scale}


def kbest_costs_settings(config: TargetsConfig, teacher: LabellingTeacher) -> dict[str, Any]:
    """Return all that decides the sample, and what is measured beside the common k."""
    own = {"teacher": plain(teacher)} if teacher.members else {}
    return {"k": config.k, "seed": config.seed, "versions": config.versions, **own}


def target_graph_settings(
    evaluation: EvaluationConfig, lattices: LatticeTargetsConfig
) -> dict[str, Any]:
    """Return all that decides the graph and its scales, besides the inputs."""
    of_model = ("acoustic_scale", "ngram_order", "smoothing", *LANGUAGE_MODEL_SETTINGS)
    resolved = plain(evaluation)
    return {
        "evaluation": {name: resolved[name] for name in of_model if name in resolved},
        "lattices": {
            "acoustic_scale": lattices.acoustic_scale,
            "ngram_order": lattices.ngram_order,
        },
    }
