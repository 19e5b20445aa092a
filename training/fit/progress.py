"""Keep a fit's progress, which its checkpoints hold beside the whole state of training."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from training.algorithms.learning_rates import NewbobState
from training.data.cursor import DataCursor
from training.fit.steps import FrameTotals, RunningTotals
from training.trainers.trainer import Statistics


@dataclass(frozen=True, slots=True)
class SubEpochPace:
    """SubEpochPace: the frames of all ranks in a sub-epoch, and the seconds that it took.

    No manifest holds it, as seconds differ from run to run.
    """

    sub_epoch: int
    num_frames: int
    seconds: float


@dataclass(slots=True)
class ExchangeTotals:
    """ExchangeTotals: one rank's sums over a sub-epoch of what its trainer gave to exchanges."""

    bytes_sent: int = 0
    num_elements: int = 0
    num_elements_sent: int = 0

    def add(self, counted: Statistics) -> None:
        """Add the counts of some steps."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(counted, each.name, 0))


@dataclass(slots=True)
class SelectedMinibatch:
    """SelectedMinibatch: the factor of the minibatch size, and all ranks' frames since its trial.

    Frames are nominal, the same on all ranks; `trials` are those of the sub-epoch, for its curve.
    """

    factor: int
    num_frames: int = 0
    trials: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """Progress holds the data cursor, this rank's totals of the sub-epoch, and the curve so far.

    `newbob` is the schedule's state; None if it is not newbob's, or if newbob has stopped.
    """

    cursor: DataCursor = field(default_factory=DataCursor)
    totals: RunningTotals = field(default_factory=RunningTotals)
    exchanged: ExchangeTotals = field(default_factory=ExchangeTotals)
    curve: list[dict[str, Any]] = field(default_factory=list)
    newbob: NewbobState | None = None
    minibatch: SelectedMinibatch = field(default_factory=lambda: SelectedMinibatch(1))

    def to_state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the host waits for the totals' device."""
        return {
            "cursor": asdict(self.cursor),
            "totals": asdict(self.totals.read()) | {"exchanged": asdict(self.exchanged)},
            "curve": list(self.curve),
            "newbob": None if self.newbob is None else asdict(self.newbob),
            "minibatch": asdict(self.minibatch),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], num_ranks: int) -> "Progress":
        """Resume on `num_ranks` ranks from the values of `to_state`."""
        totals = {name: value for name, value in state["totals"].items() if name != "exchanged"}
        return cls(
            DataCursor(**state["cursor"]).resumed(num_ranks),
            RunningTotals.of(FrameTotals(**totals)),
            ExchangeTotals(**state["totals"].get("exchanged", {})),
            state["curve"],
            None if state["newbob"] is None else NewbobState(**state["newbob"]),
            SelectedMinibatch(**state.get("minibatch", {"factor": 1})),
        )
