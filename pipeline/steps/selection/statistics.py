"""Statistics of a selection: why records were left out, hours by month, how equal files are."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict

from infra.store.object_store import ObjectInfo
from pipeline.packing import Balance
from pipeline.records import Tally
from pipeline.runs.commit import Commit
from pipeline.runs.engine import Statistics
from pipeline.runs.manifest import Manifest

OVER_BUDGET = "over_budget"


class Month(TypedDict):
    """Month holds what was selected of a month, beside its hours."""

    utterances: int
    duration_ms: int


def require_eligible(metadata_uri: str, indexes: Sequence[Commit]) -> None:
    """Raise ValueError for metadata without a record, and for filters that let none pass."""
    tally_in = sum((index.tally_in for index in indexes), Tally())
    if not tally_in.utterances:
        raise ValueError(f"{metadata_uri} holds no record: its objects are empty; ingest again")
    left_out = _unselected(indexes)
    if left_out and not any(index.tally_out.utterances for index in indexes):
        counts = {reason: tally.utterances for reason, tally in left_out.items()}
        raise ValueError(
            f"{metadata_uri}: the filters leave none of {tally_in.utterances} records (left out "
            f"by {counts}): loosen selection.filters"
        )


def fold_balance(groups: Sequence[Statistics]) -> Statistics:
    """Measure the files of several groups as one set of files."""
    balances = (Balance(**each["balance"]) for each in groups)
    return {"balance": Balance.of_groups(balances).to_dict()}


def selection_statistics(
    indexes: Sequence[Commit], selected: Sequence[Commit], files: Statistics
) -> dict[str, Any]:
    """Add up the statistics for the manifest; what no filter or cap left out is over budget."""
    unselected = _unselected(indexes)
    known, total = _sum(unselected.values()), _sum(commit.unselected for commit in selected)
    unselected[OVER_BUDGET] = Tally(
        total.utterances - known.utterances, total.duration_ms - known.duration_ms
    )
    months = _by_name(commit.statistics["months"] for commit in selected)
    return {
        "files": Balance(**files["balance"]).summary(),
        "months": {month: _with_hours(tally) for month, tally in months.items()},
        "unselected": {reason: _with_hours(tally) for reason, tally in unselected.items()},
    }


def union_statistics(before: Manifest, own: Mapping[str, Any]) -> dict[str, Any]:
    """Add an increment's hours by month to those of its base; the other statistics are its own.

    ValueError if the base's are none.
    """
    both: Sequence[Mapping[str, Month]] = (
        before.statistic("months", dict[str, Month], {}),
        own.get("months", {}),
    )
    months = _by_name(
        {
            month: {"utterances": each["utterances"], "duration_ms": each["duration_ms"]}
            for month, each in by_month.items()
        }
        for by_month in both
    )
    return {**own, "months": {month: _with_hours(tally) for month, tally in months.items()}}


def unread_statistics(
    everything: Mapping[str, Sequence[ObjectInfo]], listing: Mapping[str, Sequence[ObjectInfo]]
) -> dict[str, Any]:
    """Count the objects of other days, and their bytes; nothing where all were read."""
    objects, read = (list(chain(*each.values())) for each in (everything, listing))
    if len(objects) == len(read):
        return {}
    num_bytes = sum(each.num_bytes for each in objects) - sum(each.num_bytes for each in read)
    return {"other_days": {"objects": len(objects) - len(read), "num_bytes": num_bytes}}


def _unselected(indexes: Sequence[Commit]) -> dict[str, Tally]:
    return _by_name(index.statistics["unselected"] for index in indexes)


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
