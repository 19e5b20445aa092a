"""Keep a fit's progress, which its checkpoints hold beside the whole state of training."""

from dataclasses import asdict, dataclass, field
from typing import Any

from training.algorithms.learning_rates import NewbobState
from training.data.cursor import DataCursor
from training.fit.steps import FrameTotals


@dataclass(slots=True)
class Progress:
    """Progress holds the data cursor, this rank's totals of the sub-epoch, and the curve so far.

    `newbob` is the schedule's state; None if it is not newbob's, or if newbob has stopped.
    """

    cursor: DataCursor = field(default_factory=DataCursor)
    totals: FrameTotals = field(default_factory=FrameTotals)
    curve: list[dict[str, Any]] = field(default_factory=list)
    newbob: NewbobState | None = None

    def to_state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "cursor": asdict(self.cursor),
            "totals": asdict(self.totals),
            "curve": list(self.curve),
            "newbob": None if self.newbob is None else asdict(self.newbob),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], num_ranks: int) -> "Progress":
        """Resume on `num_ranks` ranks from the values of `to_state`."""
        return cls(
            DataCursor(**state["cursor"]).resumed(num_ranks),
            FrameTotals(**state["totals"]),
            state["curve"],
            None if state["newbob"] is None else NewbobState(**state["newbob"]),
        )
