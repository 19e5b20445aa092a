"""Fold the rotation's result files into one table, whichever days and folds they are of.

python -m tests.benchmarks.rotation.table tests/benchmarks/rotation/results/*.jsonl

Errors are pooled over folds and seeds, for each placement and for all together. Intervals are of
95 %, by bootstrap over speakers, on the same draws for both models of a pair. WERR is against the
baseline with sMBR where the row has it, and recovery is WERR's share of the oracle's; what sMBR
itself gains is a row too. Files of unlike recipes under one label are refused.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.runs.names import BASELINE, STUDENT, TEACHER, sequence_trained
from tests.benchmarks.rotation.scores import SECOND_TEACHER
from training.evaluate.scores import Estimate, SpeakerCounts, resample

ORACLE = "oracle"
PLAIN_ROWS = (BASELINE, TEACHER, SECOND_TEACHER, STUDENT, ORACLE)
ROWS = (*PLAIN_ROWS, *map(sequence_trained, PLAIN_ROWS))
EVERY = "all"


@dataclass(frozen=True, slots=True)
class SpeakerErrors:
    """SpeakerErrors: a speaker's words at a placement, and each model's errors in them."""

    speaker: str
    placement: str
    words: int
    errors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured: what one file says of a fold and seed."""

    about: Mapping[str, Any]
    speakers: tuple[SpeakerErrors, ...]

    @classmethod
    def read(cls, path: Path) -> "Measured":
        """Read a file of `python -m tests.benchmarks.rotation`; ValueError if it is another."""
        try:
            about, *lines = map(json.loads, path.read_text().splitlines())
            speakers = [
                SpeakerErrors(
                    each["speaker"],
                    each["placement"],
                    sum(each["words"]),
                    {row: sum(errors) for row, errors in each["errors"].items()},
                )
                for each in lines
            ]
            found = cls(about, tuple(speakers))
            found.key  # noqa: B018 - asked for, so that a file without it is refused here
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error!r}: need a result of the rotation") from error
        return found

    @property
    def key(self) -> tuple[str, int, int]:
        """Return condition, fold and seed."""
        return self.about["condition"], self.about["fold"], self.about["seed"]

    @property
    def label(self) -> str:
        """Return the name of the recipe."""
        return str(self.about["label"])

    def rows(self) -> set[str]:
        """Return the models of every line."""
        return set.intersection(*(set(each.errors) for each in self.speakers))


def counts_of(found: Iterable[SpeakerErrors], rows: Sequence[str]) -> SpeakerCounts:
    """Add up by speaker, over folds, seeds and placements."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1 + len(rows), np.int64))
    for each in found:
        totals[each.speaker] += [each.words, *(each.errors[row] for row in rows)]
    speakers = tuple(sorted(totals))
    table = np.array([totals[name] for name in speakers])
    errors = {row: table[:, column] for column, row in enumerate(rows, start=1)}
    return SpeakerCounts(speakers, table[:, 0], errors)


def placements_of(found: Iterable[SpeakerErrors]) -> list[str]:
    """Return the placements, and EVERY where there are several."""
    names = sorted({each.placement for each in found}, key=lambda name: (name != "clean", name))
    return [*names, EVERY] if len(names) > 1 else names


def at(found: Iterable[SpeakerErrors], placement: str) -> list[SpeakerErrors]:
    """Return the counts of one placement, or of all."""
    return [each for each in found if placement in (each.placement, EVERY)]


def shown(estimate: Estimate) -> str:
    """Write a value with its interval."""
    return f"{estimate.value:.1f} ({estimate.low:.1f}..{estimate.high:.1f})"


def rotation_table(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield the lines of the table: for each model WER, WERR and recovery by placement."""
    common = set.intersection(*(each.rows() for each in measured))
    rows = [row for row in ROWS if row in common]
    found = [each for some in measured for each in some.speakers]
    placements = placements_of(found)
    yield f"| | {' | '.join(placements)} |"
    yield "| --- |" + " --- |" * len(placements)
    drawn = {place: resample(counts_of(at(found, place), rows)) for place in placements}
    for row in rows:
        cells = (shown(drawn[place].word_error_rate(row)) for place in placements)
        yield f"| {row}: WER | {' | '.join(cells)} |"
    for row in rows:
        # Each row against the baseline and the oracle that had the same stages.
        change = sequence_trained if row in map(sequence_trained, PLAIN_ROWS) else str
        base, best = change(BASELINE), change(ORACLE)
        if row == base or base not in rows:
            continue
        cells = (shown(drawn[place].reduction(base, row)) for place in placements)
        yield f"| {row}: WERR | {' | '.join(cells)} |"
        if best in rows and row != best:
            recovered = (_recovery(drawn[place].recovery, base, row, best) for place in placements)
            yield f"| {row}: recovery | {' | '.join(recovered)} |"
    for row in PLAIN_ROWS:
        after = sequence_trained(row)
        if after in rows:
            cells = (shown(drawn[place].reduction(row, after)) for place in placements)
            yield f"| {row}: WERR of sMBR | {' | '.join(cells)} |"


def _recovery(recovery: Any, base: str, row: str, best: str) -> str:
    try:
        return shown(recovery(base, row, best))
    except ValueError:  # the oracle gains nothing there
        return "none"


def spent_table(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield, for each model, what must be equal in a fair comparison, as means over the files."""
    yield "| | frames | updates | parameters | senones | acoustic scales |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        facts = [each.about["models"][row] for each in measured if row in each.about["models"]]
        if facts:
            names = ("frames", "updates", "parameters", "senones")
            means = (f"{np.mean([each[name] for each in facts]):,.0f}" for name in names)
            scales = sorted({each["acoustic_scale"] for each in facts})
            yield f"| {row} | {' | '.join(means)} | {', '.join(map(str, scales))} |"


def require_one_recipe(measured: Sequence[Measured]) -> None:
    """Raise ValueError if files of one label say that they are of different recipes."""
    recipes: dict[str, str] = {}
    for each in measured:
        found = each.about.get("recipe_sha256")
        if found and recipes.setdefault(each.label, found) != found:
            raise ValueError(
                f"label {each.label!r}: recipes {recipes[each.label][:12]} and {found[:12]}: "
                "need files of one recipe: give the other one a label of its own"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rotation.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    measured = [Measured.read(path) for path in arguments.files]
    require_one_recipe(measured)
    print("\n".join(whole_table(measured)))


def whole_table(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield, for each label and condition, its files and both tables."""
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for each in measured:
        groups[each.label, each.about["condition"]].append(each)
    for (label, condition), some in sorted(groups.items()):
        parts = ", ".join(f"{each.about['fold']}/{each.about['seed']}" for each in some)
        speakers = {one.speaker for each in some for one in each.speakers}
        minutes = [round(each.about["seconds"] / 60) for each in some if "seconds" in each.about]
        spent = f" {min(minutes)} to {max(minutes)} min a file." if minutes else ""
        yield f"{label}, {condition}: fold/seed {parts}; {len(speakers)} speakers held out.{spent}"
        yield from ("", *rotation_table(some), "", *spent_table(some), "")


if __name__ == "__main__":
    main()
