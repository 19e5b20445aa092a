"""A selection's books: who was left out and why, hours by month, how equal the files are."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.packing import Balance
from pipeline.records import Tally
from pipeline.runs.commit import Commit

NOT_DRAWN = "not_drawn"


def require_eligible(metadata_uri: str, surveys: Sequence[Commit]) -> None:
    """Refuse metadata without a record, and filters that let none pass."""
    tally_in = sum((survey.tally_in for survey in surveys), Tally())
    if not tally_in.utterances:
        raise ValueError(f"{metadata_uri} holds no record: its objects are empty; ingest again")
    left_out = _unselected(surveys)
    if left_out and not any(survey.tally_out.utterances for survey in surveys):
        counts = {reason: tally.utterances for reason, tally in left_out.items()}
        raise ValueError(
            f"{metadata_uri}: the filters leave none of {tally_in.utterances} records (left out "
            f"by {counts}): loosen selection.filters"
        )


def selection_statistics(
    surveys: Sequence[Commit], kept: Sequence[Commit], files: Sequence[Commit]
) -> dict[str, Any]:
    """For the manifest; what neither filter nor cap left out was not drawn."""
    unselected = _unselected(surveys)
    known, total = _sum(unselected.values()), _sum(commit.unselected for commit in kept)
    unselected[NOT_DRAWN] = Tally(
        total.utterances - known.utterances, total.duration_ms - known.duration_ms
    )
    groups = [Balance(**commit.statistics["balance"]) for commit in files]
    months = _by_name(commit.statistics["months"] for commit in kept)
    return {
        "files": Balance.of_groups(groups).summary(),
        "months": {month: _with_hours(tally) for month, tally in months.items()},
        "unselected": {reason: _with_hours(tally) for reason, tally in unselected.items()},
    }


def _unselected(surveys: Sequence[Commit]) -> dict[str, Tally]:
    return _by_name(survey.statistics["unselected"] for survey in surveys)


def _by_name(parts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, Tally]:
    totals: dict[str, Tally] = defaultdict(Tally)
    for part in parts:
        for name, counts in part.items():
            totals[name] += Tally(**counts)
    return dict(sorted(totals.items()))


def _sum(tallies: Iterable[Tally]) -> Tally:
    return sum(tallies, Tally())


def _with_hours(tally: Tally) -> dict[str, Any]:
    return {
        "utterances": tally.utterances,
        "duration_ms": tally.duration_ms,
        "hours": round(tally.hours, 6),
    }
