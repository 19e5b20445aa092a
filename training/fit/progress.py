"""How far a fit has come: what its checkpoints hold beside the whole state of training."""

from dataclasses import asdict, dataclass, field
from typing import Any

from training.data.cursor import Position
from training.data.sub_epochs import NewbobState
from training.fit.steps import VisitResult


@dataclass(slots=True)
class Progress:
    """The position in the visits, this rank's totals of the present one, and what went before.

    `newbob` is the schedule's state; None if it is not newbob's, or if newbob has stopped.
    """

    position: Position = field(default_factory=Position)
    totals: VisitResult = field(default_factory=VisitResult)
    curve: list[dict[str, Any]] = field(default_factory=list)
    newbob: NewbobState | None = None

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "position": asdict(self.position),
            "totals": asdict(self.totals),
            "curve": list(self.curve),
            "newbob": None if self.newbob is None else asdict(self.newbob),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], num_ranks: int) -> "Progress":
        """Go on, on `num_ranks` ranks, from what `to_state` gave."""
        return cls(
            Position(**state["position"]).resumed(num_ranks),
            VisitResult(**state["totals"]),
            state["curve"],
            None if state["newbob"] is None else NewbobState(**state["newbob"]),
        )
