"""Every field that a recipe, a cluster file or a calibration sets has a range, which holds.

The values are made from the records: a field that is added later is tried too.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from infra.cluster import load_cluster
from infra.settings import (
    Bound,
    ConfigurationError,
    Items,
    MemorySize,
    Range,
    Text,
    bounds_of,
    canonical_json,
    declared,
    read_record,
)
from infra.store.s3 import MAX_CONNECTIONS
from jobs.planning.calibration import read_published
from jobs.scaling import read_scaling
from jobs.synthesis.corpus import SynthesisConfig
from pipeline.settings import ExtractionConfig
from training.certificate import CertificateConfig
from training.settings.decoding import MemberConfig, OwnTeacherConfig
from training.settings.models import FactoryConfig, FeedForwardConfig, ProjectedBlstmConfig
from training.settings.recipe import read_recipe
from training.settings.trainers import TRAINERS

TINY = Path(__file__).parents[1] / "whole_path" / "tiny.toml"
HUGE = 10**5000
PASSWORD = "hunter2"
NO_NUMBERS = ("1", "", True, None, [], {}, [1], math.nan, math.inf, -math.inf, HUGE, -HUGE)
NO_TEXTS = (1, 1.0, True, None, [], {}, math.nan, "a\0b", "\x1b[31m", "a\nb", "\u2028", "\ud800")
NO_FLAGS = (0, 1, 0.0, "true", "", None, [])
LONGEST_MESSAGE = 600

# Values of other fields that let a field be at one of its ends.
COMPANIONS: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("CorpusConfig", "num_text_words"): {"unknown_words": "letters"},
    ("StudentConfig", "model_parallel_ranks"): {"trainer": {"name": "synchronous"}},
    ("SupervisedConfig", "num_epochs"): {"num_chunked_epochs": 0},
    ("SupervisedConfig", "num_chunked_epochs"): {"num_epochs": 10_000},
    ("SupervisedConfig", "initial_learning_rate"): {"final_learning_rate": 1e-12},
    ("SupervisedConfig", "final_learning_rate"): {"initial_learning_rate": 100},
    ("SupervisedConfig", "cold_start_one_in"): {"trainer": {"name": "synchronous"}},
    ("TeacherConfig", "cold_start_one_in"): {"trainer": {"name": "synchronous"}},
    ("TeacherConfig", "num_epochs"): {"num_chunked_epochs": 0},
    ("TeacherConfig", "num_chunked_epochs"): {"num_epochs": 10_000},
    ("TeacherConfig", "initial_learning_rate"): {"final_learning_rate": 1e-12},
    ("TeacherConfig", "final_learning_rate"): {"initial_learning_rate": 100},
    ("WindowsConfig", "window_frames"): {"overlap_frames": 1},
    ("WindowsConfig", "overlap_frames"): {"window_frames": 1_000_000},
    ("StudentConfig", "num_sub_epochs"): {"num_whole_utterance_sub_epochs": 0},
    ("StudentConfig", "num_passes"): {"num_whole_utterance_sub_epochs": 0},
    ("StudentConfig", "num_whole_utterance_sub_epochs"): {
        "num_sub_epochs": 10_000,
        "num_passes": 10,
    },
    ("StudentConfig", "initial_learning_rate"): {"final_learning_rate": 1e-12},
    ("StudentConfig", "final_learning_rate"): {"initial_learning_rate": 100},
    ("SequenceTrainingConfig", "initial_learning_rate"): {"final_learning_rate": 1e-12},
    ("SequenceTrainingConfig", "final_learning_rate"): {"initial_learning_rate": 100},
    ("LabellingConfig", "tail_samples"): {"k": 255},
    ("LstmConfig", "look_ahead"): {"bidirectional": False},
    ("FactoryConfig", "delay"): {"look_ahead": 1000},
    ("ConformerConfig", "num_units"): {"num_heads": 1},
    ("ConformerConfig", "num_heads"): {"num_units": 1024},
    ("SynthesisConfig", "num_heldout_speakers"): {"heldout_utterances_per_placement": 1_000_000},
    ("SynthesisConfig", "heldout_utterances_per_placement"): {"num_heldout_speakers": 1},
}
# A record without defaults, as one that is valid.
OWN = MemberConfig(factory="my_teachers:other", settings={"seed": 1})
EXAMPLES = {
    FactoryConfig: FactoryConfig(factory="my_models:tdnn", look_ahead=3),
    FeedForwardConfig: FeedForwardConfig(num_layers=2, num_units=8),
    ProjectedBlstmConfig: ProjectedBlstmConfig(num_layers=2, num_units=8, num_projected_units=4),
    OwnTeacherConfig: OwnTeacherConfig(factory="my_teachers:one", ensemble=(OWN,)),
}
# Texts that are checked for more than their characters.
TEXTS = {
    "created_from": ("", "2019-03-01", "2019-03-01T10:00:00.123456+01:00"),
    "created_before": ("", "2019-03-01"),
}


@dataclass(frozen=True)
class Field:
    """Field is one field of a record that is valid otherwise, where a file may set it."""

    record: Any
    name: str
    annotation: Any

    @property
    def place(self) -> str:
        return f"{type(self.record).__name__}.{self.name}"

    def read(self, value: object, **companions: object) -> Any:
        table = {**plain(self.record), **companions, self.name: value}
        return read_record(type(self.record), table, "r.toml")


def plain(value: Any) -> Any:
    """Return a record as TOML would hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain({each.name: getattr(value, each.name) for each in fields(value) if each.init})
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if each is not None}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def walk(record: Any) -> Iterator[Field]:
    """Yield all fields of a record and of the records in it, of every member of a union."""
    for name, annotation in declared(type(record)).items():
        value = getattr(record, name)
        hint, _ = bounds_of(annotation)
        members = [each for each in typing.get_args(hint) if is_dataclass(each)]
        if typing.get_origin(hint) in (types.UnionType, typing.Union) and members:
            for member in members:
                yield from walk(value if isinstance(value, member) else example_of(member))
        elif is_dataclass(value):
            yield from walk(value)
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            for each in value:
                yield from walk(each)
        elif isinstance(value, dict) and any(map(is_dataclass, value.values())):
            for each in value.values():
                yield from walk(each)
        else:
            # An option is left out of a file, or has a value of the one other type.
            (option,) = members_of(hint) if type(None) in typing.get_args(hint) else (annotation,)
            yield Field(record, name, option)


def example_of(member: type) -> Any:
    return EXAMPLES[member] if member in EXAMPLES else member()


def members_of(union: Any) -> list[Any]:
    return [each for each in typing.get_args(union) if each is not types.NoneType]


def all_fields() -> list[Field]:
    assert len(TRAINERS) == 10
    roots = read_recipe(str(TINY)), load_cluster("demo"), read_published()
    others = read_scaling("scaling_v100"), SynthesisConfig(), CertificateConfig(1, 2, 1)
    return [field for root in (*roots, *others) for field in walk(root)]


def undeclared(annotation: Any) -> bool:
    """Return whether a number, a text, a list or a table in an annotation has no range."""
    hint, bounds = bounds_of(annotation)
    parts = [each for each in typing.get_args(hint) if each not in (Ellipsis, types.NoneType)]
    if typing.get_origin(hint) is Literal or hint is bool:
        return False
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return False
    is_plain = hint in (int, float, str) or typing.get_origin(hint) in (tuple, dict)
    return (is_plain and not bounds) or any(undeclared(each) for each in parts)


def inside(bounds: tuple[Bound, ...], is_float: bool) -> list[object]:
    """Return the values at the bounds."""
    found: list[object] = []
    for bound in bounds:
        match bound:
            case Range(least, most, zero, below):
                last = math.nextafter(most, -math.inf) if below else most
                found += [least, last] + [0] * bool(zero)
            case Text(least, most, "", _):
                found += ["a" * least, "a" * most, "\u00fc" * most]
            case Text():
                found += [bound.example]
            case MemorySize(least, most):
                found += [f"{least}m", f"{most >> 20}t", f"{most}m", "4g"]
    return [float(each) if is_float else each for each in found]  # type: ignore[arg-type]


def outside(bounds: tuple[Bound, ...], is_float: bool) -> list[object]:
    """Return values just beyond the bounds, and far beyond."""
    found: list[object] = []
    for bound in bounds:
        match bound:
            case Range(least, most, zero, below):
                near = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf)]
                found += near if is_float else [least - 1, most + 1, least + 0.5]
                found += [most] * below + [-1, 2**70, -(2**70), 1e300]
                if least > 0 and not zero:
                    found += [0, -0.0, 5e-324]
                found = [each for each in found if not (zero and each == 0)]
            case Text(least, most, form, _):
                found += ["a" * (most + 1)] + [""] * (least > 0) + ["\u20ac"] * bool(form)
            case MemorySize(least, most):
                found += ["", "4", "4 GB", "4G", "0g", "-1g", "1.5g", f"{least - 1}m"]
                found += [f"{most + 1}m", "1" * 5000 + "t", "g"]
    return found


def bad_values(annotation: Any) -> Iterator[object]:
    """Yield values that a field of this annotation must refuse."""
    hint, bounds = bounds_of(annotation)
    yield from outside(bounds, hint is float)
    if hint in (int, float):
        yield from NO_NUMBERS
    elif hint is str:
        yield from NO_TEXTS
        yield f"s3://someone:{PASSWORD}@bucket/run"
    elif hint is bool:
        yield from NO_FLAGS
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        yield from (None, [], {}, math.nan, math.inf, HUGE, -HUGE, 1e301, "a\0b", 2**63)
    elif typing.get_origin(hint) is Literal:
        yield from ("no such name", "", 1, None, [])
    elif typing.get_origin(hint) is tuple:
        (part, _), (items,) = typing.get_args(hint), bounds
        yield from ([each] for each in bad_values(part))
        good = inside(*of_part(part))[0]
        yield from (good, {}, [good] * (items.most + 1), *([[]] if items.least else []))
    elif typing.get_origin(hint) is dict:
        (key, value), (items,) = typing.get_args(hint), bounds
        name, good = inside(*of_part(key))[0], inside(*of_part(value))[0]
        yield from ({name: each} for each in bad_values(value))
        yield from ({each: good} for each in bad_values(key) if isinstance(each, str))
        yield from ([], {f"{name}{number}": good for number in range(items.most + 1)})


def of_part(annotation: Any) -> tuple[tuple[Bound, ...], bool]:
    hint, bounds = bounds_of(annotation)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return of_part(members_of(hint)[0])
    return bounds, hint is float


def problems(field: Field) -> Iterator[str]:
    """Yield each value outside the range that passes, and each refusal that is not one line."""
    for value in bad_values(field.annotation):
        try:
            field.read(value)
        except ConfigurationError as error:
            said = str(error)
            if "\n" in said or len(said) > LONGEST_MESSAGE or PASSWORD in said:
                yield f"{field.place}: {said[:200]!r}"
            elif field.name not in said:
                yield f"{field.place} is not named: {said[:200]}"
        except Exception as error:  # any other would be a traceback
            yield f"{field.place}: {type(error).__name__}: {str(error)[:200]}"
        else:
            yield f"{field.place} = {str(value)[:80] if value != HUGE else 'huge'} passes"


def test_every_number_and_text_has_a_range() -> None:
    """A field of a recipe or cluster file without a declared range is found."""
    assert [field.place for field in all_fields() if undeclared(field.annotation)] == []


def test_no_value_outside_its_range_passes() -> None:
    """Each is refused in one short line that names the field and holds no password."""
    assert [each for field in all_fields() for each in problems(field)] == []


def test_values_at_the_bounds_pass() -> None:
    """The least and the most of each range are accepted, as they are."""
    for field in all_fields():
        hint, _ = bounds_of(field.annotation)
        values = TEXTS.get(field.name, inside(*of_part(field.annotation)))
        companions = COMPANIONS.get((type(field.record).__name__, field.name), {})
        for value in values:
            read = getattr(field.read(value, **companions), field.name)
            assert read == value, field.place
            assert type(read) is hint, field.place


def test_lists_and_tables_pass_at_their_bounds() -> None:
    """As many items as a list or table may have, each at an end of its own range."""
    for field in all_fields():
        hint, bounds = bounds_of(field.annotation)
        parts = typing.get_args(hint)
        items = next((bound for bound in bounds if isinstance(bound, Items)), None)
        if items is None or field.name in {"python_dependencies", "devices"}:
            continue
        if field.name == "factors":  # they ascend
            assert field.read(list(range(1, items.most + 1))).factors[-1] == items.most
            continue
        value = inside(*of_part(parts[-1 if typing.get_origin(hint) is dict else 0]))[0]
        if field.name == "delete_prefixes":  # some of those that the step reads or writes
            value = "{run}"
        many: Any = [value] * items.most
        if typing.get_origin(hint) is dict:
            name = inside(*of_part(parts[0]))[0]
            many = {f"{name}{number}": value for number in range(items.most)}
        assert len(getattr(field.read(many), field.name)) == items.most, field.place


def test_code_cannot_make_a_record_that_a_file_cannot() -> None:
    """A number beyond its bounds is refused where no file is read, too."""
    for field in all_fields():
        bounds, is_float = of_part(field.annotation)
        for value in (*outside(bounds, is_float), math.nan):
            if not isinstance(value, float if is_float else int):
                continue
            with pytest.raises(ValueError, match=f"{field.name} = "):
                replace(field.record, **{field.name: value})


def test_negative_zero_is_zero() -> None:
    """-0.0 is the same work as 0.0, so it is the same recipe."""
    for field in all_fields():
        bounds, is_float = of_part(field.annotation)
        if is_float and all(bound.admits(0.0) for bound in bounds):
            assert "-0.0" not in canonical_json(field.read(-0.0)), field.place


def test_a_record_without_ranges_is_found() -> None:
    """The tests above look at numbers, texts, and what lists, tables and options hold."""

    @dataclass(frozen=True)
    class Lax:
        number: int
        share: float | None
        names: Annotated[tuple[str, ...], Items(0, 1)]
        table: dict[Annotated[str, Text(0, 1)], Annotated[str, Text(0, 1)]]
        flag: bool
        bounded: Annotated[int, Range(0, 1)] | None

    found = {name for name, annotation in declared(Lax).items() if undeclared(annotation)}
    assert found == {"number", "share", "names", "table"}
    assert len(fields(Lax)) == 6


def test_as_many_gets_as_connections() -> None:
    """A task may have as many GETs in flight as the store has connections, and no more."""
    _, bounds = bounds_of(declared(ExtractionConfig)["gets_in_flight"])
    assert bounds == (Range(1, MAX_CONNECTIONS),)
