"""End a step as soon as its tasks have lost more than its loss budget can hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.store.request_counts import Measured
from pipeline.records import Quarantined
from pipeline.runs.commit import Commit, StepContext, commit_uris, each_commit
from pipeline.runs.ledger import LossBudgetExceededError, LossLimit, ledger_reasons, loss_error

WITHOUT_LATTICE = "without_lattice"
"""The statistic of a commit that says of utterances, by their ids, why they have no lattice.

They keep the teacher's own targets, so no ledger has them. They count as losses all the same.
"""


@dataclass(frozen=True, slots=True)
class Overrun:
    """Overrun ends a task that alone loses more than its step may; the task is not committed.

    It is a result and no error, since Spark would repeat a task that fails.
    """

    task: str
    reasons: Mapping[str, int]
    example: str

    @classmethod
    def of(cls, task: str, rows: Sequence[Quarantined]) -> "Overrun":
        """Count the rows that the task has found before it ended."""
        example = f"{rows[-1].utterance_id} ({rows[-1].detail})"
        return cls(task, Counter(row.reason for row in rows), example)

    @property
    def num_lost(self) -> int:
        """The number of its rows."""
        return sum(self.reasons.values())


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss counts the utterances that a committed task has lost; it says why."""

    task: str
    num_lost: int


def loss_of(result: Commit | Overrun | Loss) -> Loss | Overrun:
    """Return what the driver must know of a task's result while others run."""
    if not isinstance(result, Commit):
        return result
    without_lattice = len(result.statistics.get(WITHOUT_LATTICE, ()))
    return Loss(result.task, result.quarantined.utterances + without_lattice)


def measured_loss(measured: Measured[Commit | Overrun | Loss]) -> Loss | Overrun:
    """Return the loss of a measured task, on its worker, which has no module of the jobs."""
    return loss_of(measured.result)


class LossWatch:
    """LossWatch adds up what the tasks of a step have lost, in the driver, as they end."""

    def __init__(self, context: StepContext, limit: LossLimit) -> None:
        self.context = context
        self.limit = limit
        self.overruns: list[Overrun] = []
        self.seen: set[str] = set()
        self.num_lost = 0

    def see(self, loss: Loss | Overrun) -> None:
        """Count a task's loss, once; LossBudgetExceededError when the step has lost too much."""
        if loss.task in self.seen:
            return
        self.seen.add(loss.task)
        self.num_lost += loss.num_lost
        if isinstance(loss, Overrun):
            self.overruns.append(loss)
        if not self.limit.allows(self.num_lost):
            raise self._error()

    def end_wave(self) -> None:
        """Forget the names of tasks that have ended, and that none will report again."""
        self.seen.clear()

    def _error(self) -> LossBudgetExceededError:
        # Of committed tasks alone: others may be at work still.
        store, run_uri = self.context.store, self.context.run_uri
        reasons: Counter[str] = Counter()
        without_lattice: Counter[str] = Counter()
        utterance, examples = "", list[str]()
        for commit in each_commit(store, commit_uris(store, run_uri, self.context.step)):
            self.context.require_ours(commit)
            for utterance_id, each in commit.statistics.get(WITHOUT_LATTICE, {}).items():
                without_lattice[each["reason"]] += 1
                utterance = utterance or utterance_id
            if commit.ledger and not without_lattice:
                reasons.update(ledger_reasons(store, run_uri, [commit.ledger]))
                examples = examples or [commit.ledger.key]
        if without_lattice:
            return _lattice_error(without_lattice, utterance, self.num_lost, self.limit)
        for overrun in self.overruns:
            reasons.update(overrun.reasons)
            examples = examples or [overrun.example]
        return loss_error(self.num_lost, self.limit, reasons, examples[0])


def _lattice_error(
    reasons: Counter[str], example: str, num_lost: int, limit: LossLimit
) -> LossBudgetExceededError:
    return LossBudgetExceededError(
        f"{num_lost} of {limit.num_utterances} utterances have no lattice, the loss budget is "
        f"{limit.loss_budget:.2%}; reasons: {dict(reasons.most_common())}, such as "
        f"{example}: raise loss_budget, or begin a fresh --run with other "
        "beams or search_seconds in targets.lattices"
    )
