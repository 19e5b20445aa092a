"""The versions of an utterance that ingest simulated in several placements, and their clearest."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pipeline.records import CLEAN, source_id
from pipeline.settings import Versions
from pipeline.shards import FeatureRow

T = TypeVar("T")


def heard_versions(rows: Sequence[FeatureRow], versions: Versions) -> Sequence[FeatureRow]:
    """Return the version that a model hears for each row, in the order of the rows.

    That is the row itself; of the "clearest" `versions`, that of its utterance among the rows.
    Clean is clearer than any placement, and these are harder the higher their names. A version of
    other length is not taken. A speaker is whole in one file, so only one of over five hours may
    have versions in several shards.
    """
    if versions != "clearest":
        return rows

    def source(row: FeatureRow) -> tuple[str, str, int]:
        # Other corpora may have placements too; only ingest's versions have ids that end so.
        placements = [] if row.placement is None else [row.placement]
        return row.speaker_id, source_id(row.utterance_id, placements), len(row.features)

    best: dict[tuple[str, str, int], FeatureRow] = {}
    for row in sorted(rows, key=lambda each: (each.placement != CLEAN, each.placement or "")):
        best.setdefault(source(row), row)
    return [best[source(row)] for row in rows]


def distinct(rows: Sequence[FeatureRow]) -> list[FeatureRow]:
    """Return each of the rows once, in order, where several versions hear the same."""
    return list({row.utterance_id: row for row in rows}.values())


def shared_by_versions(
    rows: Sequence[FeatureRow], heard: Sequence[FeatureRow], found: Mapping[str, T]
) -> dict[str, T]:
    """Return, by each row's id, what was found for the version that was heard for it."""
    pairs = zip(rows, heard, strict=True)
    return {row.utterance_id: found[each.utterance_id] for row, each in pairs}
