"""A feature shard's utterances after the teacher: their targets, or rows of the ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.kbest import KBest, KBestWithoutLattice, TeacherFailure, retained_mass
from pipeline.records import Quarantined, Tally
from pipeline.runs.loss_watch import WITHOUT_LATTICE
from pipeline.shards import FeatureRow, KBestAtAllOffsets, StoredKBest, TargetRow
from pipeline.splicing import STACK

TEACHER_FAILED = "teacher_failed"
"""The ledger's reason of an utterance that the teacher cannot label, even alone."""

HEARD_ELSEWHERE = "num_heard_elsewhere"
"""The statistic of the utterances that have the targets of a clearer version."""


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """Labelled: an utterance, its first offset, and its targets there and, if asked, at the next.

    In place of targets that the teacher could not make there is the reason.
    """

    row: FeatureRow
    offset: int
    turns: Sequence[KBest | TeacherFailure]

    @property
    def failures(self) -> list[TeacherFailure]:
        """Return why there are no targets; empty if there are."""
        return [each for each in self.turns if isinstance(each, TeacherFailure)]

    @property
    def targets(self) -> list[KBest]:
        """Return the targets at each offset."""
        return [each for each in self.turns if isinstance(each, KBest)]

    def target_row(self) -> TargetRow:
        """Return what the shard holds."""
        kbest = stored_targets(self.offset, self.targets)
        return TargetRow(self.row.utterance_id, self.offset, kbest)


def quarantined(failed: Labelled) -> Quarantined:
    """Return the ledger row of an utterance that the teacher failed at."""
    row, reason = failed.row, failed.failures[0].reason
    about = row.utterance_id, row.audio_uri, TEACHER_FAILED, reason[:300]
    return Quarantined(*about, num_bytes=0, duration_ms=row.duration_ms)


def tally_of(rows: Sequence[FeatureRow]) -> Tally:
    """Count utterances and their milliseconds."""
    return Tally(len(rows), sum(row.duration_ms for row in rows))


def num_elsewhere(rows: Sequence[FeatureRow], heard: Sequence[FeatureRow]) -> int:
    """Count the utterances of which the teacher hears another version."""
    return sum(one is not other for one, other in zip(rows, heard, strict=True))


def shard_statistics(labelled: Sequence[Labelled], num_elsewhere: int) -> dict[str, Any]:
    """Count the frames that were labelled, with their retained mass, and what is special."""
    kbest = [target for each in labelled for target in each.targets]
    return {
        "num_frames": sum(len(target.log_z) for target in kbest),
        # 003 V-C calls this mass dominant without a figure; the demo's is 94.5 %.
        "retained_mass": sum(float(retained_mass(target).sum()) for target in kbest),
        **without_lattice(labelled),
        **({HEARD_ELSEWHERE: num_elsewhere} if num_elsewhere else {}),
    }


def stored_targets(first: int, turns: Sequence[KBest]) -> StoredKBest:
    """Return what a shard holds of an utterance that was labelled at offset `first` and the next.

    One turn is the targets at one offset; three are those at all.
    """
    if len(turns) == 1:
        return turns[0]
    return KBestAtAllOffsets.of([turns[(offset - first) % STACK] for offset in range(STACK)])


def without_lattice(
    labelled: Sequence[Labelled],
) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Return why utterances have no lattice, by their ids, as a statistic if there are some.

    An utterance that has none at one of its offsets counts as one without.
    """
    found = {
        each.row.utterance_id: {"reason": kbest.reason, "detail": kbest.detail}
        for each in labelled
        for kbest in each.targets
        if isinstance(kbest, KBestWithoutLattice)
    }
    return {WITHOUT_LATTICE: found} if found else {}
