import json
import math
import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.settings import (
    ConfigurationError,
    Items,
    MemorySize,
    Range,
    Text,
    apply_overrides,
    canonical_json,
    check_ranges,
    digest,
    printable,
    read_record,
    read_toml,
)


class Method(StrEnum):
    NESTEROV = "nesterov"
    AS_PRINTED = "as_printed"


@dataclass(frozen=True)
class Trainer:
    method: Method
    block_size: int = 50
    threshold: float = 8.0


@dataclass(frozen=True)
class Uniform:
    name: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class Sorted:
    by: str = "length"
    name: Literal["sorted"] = "sorted"

    def __post_init__(self) -> None:
        if not self.by:
            raise ValueError("by = '': need a column")


@dataclass(frozen=True)
class Recipe:
    name: str
    trainer: Trainer
    precision: Literal["fp32", "bf16"] = "fp32"
    offsets: tuple[int, ...] = (0, 1, 2)
    seed: int | None = None
    shuffle: bool = True
    spark: dict[str, str] = field(default_factory=dict)
    trainers: tuple[Trainer, ...] = ()
    order: Uniform | Sorted = Uniform()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name = '': need a name")


TABLE = {"name": "a", "trainer": {"method": "nesterov"}}


def test_reads_every_kind_of_field() -> None:
    """A TOML table becomes nested frozen records with tuples, enums and exact types."""
    table = {
        **TABLE,
        "precision": "bf16",
        "offsets": [1],
        "seed": 7,
        "shuffle": False,
        "spark": {"spark.task.maxFailures": "2"},
        "trainers": [{"method": "as_printed", "threshold": 2}],
        "order": {"name": "sorted", "by": "speaker"},
    }
    trainers = (Trainer(Method.AS_PRINTED, threshold=2.0),)
    spark = {"spark.task.maxFailures": "2"}
    expected = Recipe("a", Trainer(Method.NESTEROV), "bf16", (1,), 7, False, spark, trainers)
    expected = replace(expected, order=Sorted("speaker"))
    assert read_record(Recipe, table, "r.toml") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nam": "b"}, "r.toml: unknown key nam: did you mean name?"),
        ({"zzz": 1}, "r.toml: unknown key zzz: known: name, trainer,"),
        (
            {"trainer": {"method": "nesterov", "blok_size": 1}},
            "r.toml: trainer: unknown key blok_s",
        ),
        ({"trainer": {}}, "r.toml: trainer: method is missing: need one of 'nesterov', 'as_pri"),
        ({"trainer": {"method": "x"}}, "trainer: method = 'x': need one of 'nesterov'"),
        ({"trainer": 3}, "r.toml: trainer = 3: need a table"),
        ({"precision": "fp8"}, "precision = 'fp8': need one of 'fp32', 'bf16'"),
        ({"offsets": [0, "1"]}, r"offsets\[1\] = '1': need a whole number"),
        ({"offsets": 1}, "offsets = 1: need a list, each a whole number"),
        ({"seed": True}, "seed = True: need a whole number"),
        ({"seed": 1.0}, "seed = 1.0: need a whole number"),
        ({"shuffle": 1}, "shuffle = 1: need true or false"),
        ({"spark": {"a": 1}}, "spark.a = 1: need text in quotes"),
        ({"trainer": {"method": "nesterov", "threshold": math.nan}}, "nan: need a finite number"),
        ({"trainer": {"method": "nesterov", "threshold": "8"}}, "'8': need a finite number"),
        ({"name": ""}, "r.toml: name = '': need a name"),
        ({"order": {"name": "sort"}}, "order: name = 'sort': need one of 'uniform', 'sorted'"),
        ({"order": {"name": ["sorted"]}}, r"order: name = \['sorted'\]: need one of 'uniform'"),
        ({"order": {}}, "r.toml: order: name is missing: need one of 'uniform', 'sorted'"),
        ({"order": "sorted"}, "r.toml: order = 'sorted': need a table"),
        ({"order": {"name": "uniform", "by": "x"}}, "order: unknown key by: known: name"),
        ({"order": {"name": "sorted", "bye": "x"}}, "unknown key bye: did you mean by?"),
        ({"order": {"name": "sorted", "by": ""}}, "r.toml: order: by = '': need a column"),
    ],
)
def test_refuses_with_the_key_the_value_and_the_remedy(
    change: dict[str, object], message: str
) -> None:
    """Unknown keys, wrong types and a record's own checks name file, key, value and remedy."""
    with pytest.raises(ConfigurationError, match=message):
        read_record(Recipe, {**TABLE, **change}, "r.toml")


def test_a_union_may_be_none_or_a_part_of_a_list() -> None:
    """Each table of a list says by its name which record it is."""

    @dataclass(frozen=True)
    class Orders:
        first: Uniform | Sorted | None = None
        others: tuple[Uniform | Sorted, ...] = ()

    table = {"first": {"name": "sorted"}, "others": [{"name": "uniform"}, {"name": "sorted"}]}
    assert read_record(Orders, {}, "o.toml") == Orders()
    assert read_record(Orders, table, "o.toml") == Orders(Sorted(), (Uniform(), Sorted()))
    with pytest.raises(ConfigurationError, match=r"others\[0\]: name = 'x': need one of 'uniform'"):
        read_record(Orders, {"others": [{"name": "x"}]}, "o.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", {"seed": 3}),
        ("seed = 3", {"seed": 3}),
        ("a.b.c=1.5", {"a": {"b": {"c": 1.5}}}),
        ("name=s3://bucket/key", {"name": "s3://bucket/key"}),
        ('name="3"', {"name": "3"}),
        ("on=true", {"on": True}),
        ("offsets=[0, 1]", {"offsets": [0, 1]}),
        ("since=2019-01-01", {"since": "2019-01-01"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=1\nother = 2", {"name": "1\nother = 2"}),
    ],
)
def test_override_values_are_toml_or_text(override: str, expected: dict[str, object]) -> None:
    """A value that is TOML is parsed; anything else, dates too, is plain text."""
    assert apply_overrides({}, [override]) == expected


def test_overrides_leave_the_table_alone_and_the_last_one_wins() -> None:
    """apply_overrides copies deeply; later settings replace earlier ones."""
    table = {"trainer": {"block_size": 1}}
    result = apply_overrides(table, ["trainer.block_size=2", "trainer.block_size=3"])
    assert result == {"trainer": {"block_size": 3}}
    assert table == {"trainer": {"block_size": 1}}


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=3", "seed.deep=3"])
def test_malformed_overrides_are_refused(override: str) -> None:
    """A setting without key or value, or below a key that is no section, is refused."""
    with pytest.raises(ConfigurationError, match="--set"):
        apply_overrides({"seed": 1}, [override])


def test_unreadable_and_malformed_files_are_named(tmp_path: Path) -> None:
    """The message holds the path of a file that is absent or not TOML."""
    path = tmp_path / "recipe.toml"
    with pytest.raises(ConfigurationError, match=r"recipe.toml: cannot be read"):
        read_toml(str(path))
    path.write_text("a = = 1")
    with pytest.raises(ConfigurationError, match=r"recipe.toml: not TOML"):
        read_toml(str(path))
    path.write_text("a = 1")
    assert read_toml(str(path)) == {"a": 1}


PASSWORD = "hunter2/with/slashes"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (".".join(["a"] * 20_000) + "=1", "20000 keys: need at most 16"),
        ("a=" + "[" * 20_000 + "]" * 20_000, "nested too deeply"),
        ("a=" + "{b=" * 20_000 + "1" + "}" * 20_000, "nested too deeply"),
        ("a={" + ".".join(["a"] * 20_000) + " = 1}", "nested too deeply"),
        ("a=" + "9" * 20_000, r"Exceeds the limit|too large"),
        (
            f"a.b=s3://someone:{PASSWORD}@bucket",
            r"--set a.b=s3://\*\*\*@bucket: a = 1 is no section",
        ),
    ],
)
def test_hostile_overrides_are_one_line(override: str, message: str) -> None:
    """Depth, digits and passwords are refused, or not shown, in one line of bounded length."""
    with pytest.raises(ConfigurationError, match=message) as refused:
        read_record(Recipe, apply_overrides({"a": 1}, [override]), "r.toml")
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 500
    assert PASSWORD not in said


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """A device, a pipe that nothing writes to, a folder and a huge file are named, not read."""
    names = ("pipe", "huge", "deep", "digits", "dotted")
    pipe, huge, deep, digits, dotted = (tmp_path / name for name in names)
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(10**12)
    deep.write_text("a = " + "[" * 20_000 + "]" * 20_000)
    digits.write_text("a = " + "9" * 20_000)
    dotted.write_text(".".join(["a"] * 20_000) + " = 1")
    for path, message in (
        ("/dev/zero", "/dev/zero: a folder, pipe or device: need a file"),
        (str(pipe), "pipe: a folder, pipe or device"),
        (str(tmp_path), "a folder, pipe or device"),
        (str(huge), "huge: need at most 1048576 bytes"),
        (str(deep), "deep: not TOML: nested too deeply"),
        (str(dotted), "nested too deeply"),
        (str(digits), "digits: not TOML: Exceeds the limit"),
        (str(tmp_path / ("x" * 5000)), "cannot be read: File name too long"),
        (f"s3://someone:{PASSWORD}@bucket/recipe.toml", r"s3://\*\*\*@bucket"),
    ):
        with pytest.raises(ConfigurationError, match=message) as refused:
            read_toml(path)
        assert len(str(refused.value)) < 500
        assert PASSWORD not in str(refused.value)


@dataclass(frozen=True)
class Bounded:
    steps: Annotated[int, Range(1, 10, zero="never")] = 0
    share: Annotated[float, Range(0, 1, below=True)] = 0.0
    names: Annotated[tuple[Annotated[str, Text(1, 3)], ...], Items(0, 2)] = ()
    sizes: dict[Annotated[str, Text(1, 9)], Annotated[str, MemorySize(1, 1 << 20)]] = field(
        default_factory=dict
    )

    __post_init__ = check_ranges


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"steps": -1}, r"r.toml: steps = -1: need 0 \(never\) or 1\.\.10$"),
        ({"steps": 11}, r"steps = 11: need 0 \(never\) or 1\.\.10$"),
        ({"share": 1}, r"share = 1.0: need 0 or more, below 1$"),
        ({"share": 10**400}, r"share = .*: need a finite number$"),
        ({"names": ["abc", "abcd"]}, r"names\[1\] = 'abcd': need 1\.\.3 characters"),
        ({"names": ["a", "b", "c"]}, r"names = \('a', 'b', 'c'\): need 0\.\.2 items"),
        ({"sizes": {"a": "2t"}}, r'sizes.a = \'2t\': need a size such as "4g", from 1m to 1t'),
        ({"sizes": {"": "1g"}}, r"sizes: key = '': need 1\.\.9 characters"),
    ],
)
def test_a_range_is_declared_with_its_field(table: dict[str, object], message: str) -> None:
    """The message names the place, the value and the range; what a list holds has its own."""
    with pytest.raises(ConfigurationError, match=message):
        read_record(Bounded, table, "r.toml")


def test_a_range_holds_for_records_that_code_makes() -> None:
    """NaN, a share for a whole number and a number beyond its range are refused there too."""
    assert Bounded(10, 0.999, ("abc", "d"), {"a": "1t"}).steps == 10
    for values in ({"steps": 0.5}, {"steps": True}, {"share": math.nan}, {"names": ("",)}):
        with pytest.raises(ValueError, match=r"(steps|share|names\[0\]) = .*: need"):
            Bounded(**values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Chosen:
    method: Method = Method.NESTEROV
    precision: Literal["fp32", "bf16"] = "fp32"
    is_open: bool = False
    data: Uniform | None = None
    order: Uniform | Sorted = Uniform()
    share: Annotated[float, Range(0, 1)] | Literal["auto"] = "auto"

    __post_init__ = check_ranges


def test_choices_hold_for_records_that_code_makes() -> None:
    """Text for a choice that is compared by identity, or for a record, is not taken for none."""
    assert Chosen(Method.AS_PRINTED, "bf16", True, Uniform(), Sorted(), 1).data == Uniform()
    with pytest.raises(ValueError, match=r"share = 2: need 0\.\.1"):
        Chosen(share=2)
    for values, need in (
        ({"method": "as_printed"}, "one of Method.NESTEROV, Method.AS_PRINTED"),
        ({"precision": "fp16"}, "one of 'fp32', 'bf16'"),
        ({"is_open": "no"}, "True or False"),
        ({"data": "uniform"}, "a Uniform"),
        ({"order": "sorted"}, "a Uniform or a Sorted"),
        ({"share": "none"}, r"0\.\.1 or one of 'auto'"),
    ):
        with pytest.raises(ValueError, match=rf"= '\w+': need {need}"):
            Chosen(**values)  # type: ignore[arg-type]


def test_secrets_are_starred_out_in_time_of_the_text() -> None:
    """A megabyte of what begins a signature's name is shown at once."""
    assert printable("s3://b/k?X-Amz-Signature=abc&x=1") == "s3://b/k?X-Amz-Signature=***&x=1"
    assert len(printable("?" * 2**20, 99)) == 102


def test_digest_ignores_the_order_and_spelling_of_the_file() -> None:
    """Key order and 8 for 8.0 do not change the digest; any value does."""
    one = read_record(Trainer, {"method": "nesterov", "threshold": 8}, "a")
    two = read_record(Trainer, {"threshold": 8.0, "method": "nesterov"}, "b")
    assert digest(one) == digest(two)
    assert digest(one) != digest(replace(one, block_size=51))
    assert canonical_json(one) == '{"block_size": 50, "method": "nesterov", "threshold": 8.0}'


@given(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
def test_canonical_json_reads_back(name: str, seed: int, threshold: float) -> None:
    """read_record(json(record)) is the record again."""
    recipe = Recipe(name or "a", Trainer(Method.NESTEROV, threshold=threshold), seed=seed)
    assert read_record(Recipe, json.loads(canonical_json(recipe)), "json") == recipe
