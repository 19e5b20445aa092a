"""The settings of a decoding, and the values that development speakers choose them from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_type_hints

from infra.settings import LATER, Items, Range, check_ranges
from pipeline.runs.sealed_json import typed_record
from training.configuration.values import MAX_ORDER, AcousticScale, Beam, NgramOrder, Uri

LanguageModelScale = Annotated[float, Range(1e-6, 1000)]
InsertionPenalty = Annotated[float, Range(0, 100)]

MAX_VALUES = 100

Smoothing = Literal["witten_bell", "kneser_ney"]


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
        # JSON has no difference between 1 and 1.0.
        floats = {name for name, hint in get_type_hints(cls).items() if hint is float}
        try:
            found = {
                name: float(value) if name in floats and type(value) is int else value
                for name, value in fields.items()
            }
            return typed_record(cls, found)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"settings of a search: {error}: run the step again") from error

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

    acoustic_scales: Annotated[tuple[AcousticScale, ...], Items(0, MAX_VALUES)] = (
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
        0.4,
        0.5,
    )
    ngram_orders: Annotated[tuple[NgramOrder, ...], Items(0, MAX_ORDER)] = (2, 3, 4)
    language_model_scales: Annotated[tuple[LanguageModelScale, ...], Items(0, MAX_VALUES)] = (
        0.8,
        1.25,
    )
    insertion_penalties: Annotated[tuple[InsertionPenalty, ...], Items(0, MAX_VALUES)] = (
        0.5,
        1.0,
    )

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
class EvaluationConfig:
    """EvaluationConfig: the decoding of the held-out subset (003 VII-D).

    The n-gram model is of the labelled transcripts, and of `language_model_text` where that names
    a file. `arpa` names a model to use in its place. Both are names in the corpus, or URIs.
    """

    ngram_order: NgramOrder
    acoustic_scale: AcousticScale
    beam: Beam
    max_active: Annotated[int, Range(2, 1_000_000_000)]
    smoothing: Smoothing = field(default="witten_bell", metadata=LATER)
    language_model_text: Uri = field(default="", metadata=LATER)
    arpa: Uri = field(default="", metadata=LATER)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.arpa and self.language_model_text:
            raise ValueError(
                f"arpa = {self.arpa!r} and language_model_text = {self.language_model_text!r}: "
                "need one of them: a given model is estimated from no text"
            )
