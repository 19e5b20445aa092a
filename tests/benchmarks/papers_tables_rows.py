"""List the papers' tables of accuracy: trainers, settings, and the published values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from tests.benchmarks.papers_tables_task import MINIBATCH_FRAMES
from training.settings.trainers import Form
from training.simulation import MakeTrainer
from training.trainers import Bmuf, Gtc, Htm, Synchronous

FORMS: tuple[Form, ...] = ("nesterov", "as_printed")
# Steps of a block here for each of the papers' 25, 50, 100 and 200.
BLOCK_SIZES = {25: 2, 50: 4, 100: 8, 200: 16}
GROUP_SIZE = 8
# The papers', for gradients summed over a rank's minibatch; our loss is divided by its frames.
GTC_THRESHOLD, HTM_THRESHOLD = 8 / MINIBATCH_FRAMES, 2 / MINIBATCH_FRAMES


@dataclass(frozen=True, slots=True)
class Configuration:
    """Configuration is a trainer on some ranks; `block_size` is the papers' number of steps."""

    trainer: str
    num_ranks: int
    block_size: int = 0
    group_size: int = 1
    form: Form = "nesterov"

    def names(self) -> list[object]:
        """Return the cells that name it in a table."""
        blocks = [self.block_size, self.group_size] if self.block_size else ["", ""]
        return [self.trainer, self.num_ranks, *blocks]

    @property
    def num_summed(self) -> int:
        """Count the ranks whose gradients make one step."""
        return {"gtc": self.num_ranks, "htm": self.group_size}.get(self.trainer, 1)

    def make_trainer(self) -> MakeTrainer:
        """Make the trainer as a user would."""
        if self.trainer == "sgd":
            return Synchronous
        if self.trainer == "gtc":
            return partial(Gtc, gradient_threshold=GTC_THRESHOLD)
        block_size = BLOCK_SIZES[self.block_size]
        if self.trainer == "bmuf":
            return partial(Bmuf, block_size=block_size, form=self.form)
        return partial(
            Htm,
            block_size=block_size,
            form=self.form,
            group_size=self.group_size,
            gradient_threshold=HTM_THRESHOLD,
        )


BASELINE = Configuration("sgd", 1)


@dataclass(frozen=True, slots=True)
class Row:
    """Row holds one value in percent relative to one rank, and the published one, if any."""

    configuration: Configuration
    published: float | str

    def in_both_forms(self) -> list[Configuration]:
        """Make one row of each form, or one where there is no block filter."""
        forms = FORMS if self.configuration.block_size else FORMS[:1]
        return [replace(self.configuration, form=form) for form in forms]


@dataclass(frozen=True, slots=True)
class Table:
    """Table is one published table."""

    title: str
    rows: tuple[Row, ...]


def _gtc(values: dict[int, float]) -> list[Row]:
    return [Row(Configuration("gtc", n), value) for n, value in values.items()]


def _bmuf(values: Mapping[tuple[int, int], float | str]) -> list[Row]:
    return [Row(Configuration("bmuf", n, size), value) for (n, size), value in values.items()]


def _htm(values: Mapping[tuple[int, int, int], float | str]) -> list[Row]:
    return [Row(Configuration("htm", *key), value) for key, value in values.items()]


TABLES = {
    "1": Table(
        "000 Table 1: word errors",
        (
            *_gtc({16: 0.4, 32: -1.4, 64: -2.8, 128: -15.6}),
            *_bmuf({(16, 50): -0.8, (32, 50): -3.5, (64, 50): -8.9, (128, 50): -9.6}),
            *_htm({(16, 50, 8): -0.5, (32, 50, 8): 0.1, (64, 50, 8): -3.2, (128, 50, 8): -4.7}),
        ),
    ),
    "2": Table(
        "000 Table 2: word errors by block size",
        (
            *_bmuf({(128, 25): -8.1, (128, 50): -9.6, (128, 100): -13.7, (128, 200): -16.6}),
            *_htm(
                {(128, 25, 8): -4.4, (128, 50, 8): -4.7, (128, 100, 8): -6.4, (128, 200, 8): -7.5}
            ),
        ),
    ),
    "3": Table(
        "000 Table 3: word errors by group size; groups of 1 are BMUF",
        (
            *_bmuf({(128, 25): -8.1}),
            *_htm({(128, 25, 2): -7.9, (128, 25, 4): -5.8, (128, 25, 8): -4.4}),
        ),
    ),
    # Blocks of 25 are 2 steps here, less than a gradient waits in a residual (14 at 7 %).
    "3b": Table(
        "group size at blocks of 100; groups of 1 are BMUF",
        (
            *_bmuf({(128, 100): ""}),
            *_htm({(128, 100, 2): "", (128, 100, 4): "", (128, 100, 8): ""}),
        ),
    ),
    "I": Table(
        "003 Table I: frame accuracy",
        (
            *_gtc({8: 0.41, 16: 0.41, 32: 0.54, 64: 0.27}),
            *_bmuf(
                {(8, 100): -0.27, (16, 100): -0.06, (32, 100): -0.10, (64, 100): -0.13}
                | {(128, 100): -2.46}
            ),
        ),
    ),
}


def to_train(tables: list[Table], form: Form) -> list[Configuration]:
    """List all configurations of the tables once, in one form; the baseline is of the first."""
    found = [c for table in tables for row in table.rows for c in row.in_both_forms()]
    return [c for c in dict.fromkeys([BASELINE, *found]) if c.form == form]
