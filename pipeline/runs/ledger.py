"""The quarantine ledger: its lines, totals and reasons, and the loss budget that bounds it.

A step ends as soon as its tasks have lost more than its loss budget can hold. `take_back` takes
rows back from ledgers: it removes the commits of their tasks, and what was made from them. It
deletes later steps before earlier ones, and a manifest before its commits, so that a kill at any
moment leaves a run which its steps can resume and which can be retried again.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.settings import printable
from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import Measured
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, commit_uris, each_commit
from pipeline.runs.manifest import Output, manifest_uri, read_output
from pipeline.runs.names import (
    ACCESS_DENIED,
    COMMITS_FOLDER,
    MISSING_OBJECT,
    OUTSIDE_PREFIXES,
    SCRATCH_FOLDER,
)

SELECTED = {"utterance_id": str, "speaker_id": str, "duration_s": float}
"""Fields of a selection file's lines, and their types."""

QUARANTINED = {"utterance_id": str, "reason": str, "duration_ms": int}
"""Fields of a ledger's lines, and their types."""

IDENTIFIED = {"utterance_id": str}
"""The field that the lines of both have."""


def read_lines(data: bytes, needs: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines; ValueError names the line without the fields of `needs`."""
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not _has(fields, needs):
            need = ", ".join(f"{name} ({kind.__name__})" for name, kind in needs.items())
            said = printable(str(line[:80]))
            raise ValueError(f"line {number} is {said}: need a JSON object with {need}")
        yield fields


def _has(fields: Mapping[str, Any], needs: Mapping[str, type]) -> bool:
    return all(_is_of(fields.get(name), kind) for name, kind in needs.items())


def _is_of(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # A whole number of seconds is one, too; NaN is in no range.
    return 0 <= value < 2**63 and (kind is float or isinstance(value, int))


class LossBudgetExceededError(Exception):
    """More utterances were quarantined than the recipe's loss budget allows."""


@dataclass(frozen=True, slots=True)
class LossLimit:
    """LossLimit holds a step's loss budget, as a share, and how many utterances the step reads."""

    loss_budget: float
    num_utterances: int

    @property
    def max_lost(self) -> int:
        """The most utterances that may be lost."""
        return int(self.loss_budget * self.num_utterances)

    def allows(self, num_lost: int) -> bool:
        """Return whether so many may be lost."""
        return num_lost <= self.max_lost


def check_loss_budget(
    store: ObjectStore,
    run_uri: str,
    ledgers: Sequence[Output],
    quarantined: Tally,
    tally_in: Tally,
    loss_budget: float,
) -> None:
    """Fail if more than `loss_budget` (a fraction) of a step's utterances were quarantined."""
    limit = LossLimit(loss_budget, tally_in.utterances)
    if not limit.allows(quarantined.utterances):
        reasons = ledger_reasons(store, run_uri, ledgers)
        raise loss_error(quarantined.utterances, limit, reasons, ledgers[0].key)


def loss_error(
    num_lost: int, limit: LossLimit, reasons: Counter[str], example: str
) -> LossBudgetExceededError:
    """Make the error of a step that has lost too much: value, bound, reasons and remedy."""
    may_be_back = {MISSING_OBJECT, ACCESS_DENIED} & reasons.keys()
    remedy = "once audio is back, megahour retry reads it again; " if may_be_back else ""
    if OUTSIDE_PREFIXES in reasons:
        remedy += "name the audio's folders in corpus.audio_prefixes and use another --run; "
    return LossBudgetExceededError(
        f"{num_lost} of {limit.num_utterances} utterances quarantined, the loss budget is "
        f"{limit.loss_budget:.2%}; reasons: {dict(reasons.most_common())}. See the ledgers, such "
        f"as {example}; {remedy}fix the data, or raise loss_budget"
    )


def ledger_reasons(store: ObjectStore, run_uri: str, ledgers: Sequence[Output]) -> Counter[str]:
    """Add up the reasons of `ledgers`; only one whose record does not count them is read."""
    reasons: Counter[str] = Counter()
    for ledger in ledgers:
        reasons.update(ledger.reasons or read_reasons(read_output(store, run_uri, ledger)))
    return reasons


def read_reasons(data: bytes) -> Counter[str]:
    """Count the reasons in a ledger's lines; ValueError names one that is none."""
    return Counter(row["reason"] for row in read_lines(data, QUARANTINED))


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


@dataclass(frozen=True, slots=True)
class LostRows:
    """LostRows counts, by reason, those ledger rows of one task that are to be taken back."""

    step: str
    task: str
    reasons: Mapping[str, int]


def find_lost_rows(
    store: ObjectStore, run_uri: str, step: str, reasons: Collection[str]
) -> list[LostRows]:
    """Find the tasks of `step`, finished or not, with ledger rows of these reasons."""
    found = []
    for commit in each_commit(store, commit_uris(store, run_uri, step)):
        if commit.ledger is None:
            continue
        counts = ledger_reasons(store, run_uri, [commit.ledger])
        wanted = {reason: counts[reason] for reason in sorted(reasons) if counts[reason]}
        if wanted:
            found.append(LostRows(step, commit.task, wanted))
    return found


def take_back(store: ObjectStore, run_uri: str, rows: Sequence[LostRows]) -> None:
    """Remove the manifests of the rows' steps, then the commits of their tasks.

    The steps, run again, do these tasks alone, and merge what all tasks have kept for increments.
    Shards and ledgers stay, as orphans where the tasks make other ones.
    """
    for step in sorted({each.step for each in rows}):
        store.delete(manifest_uri(run_uri, step))
        scratch = store.list(join_uri(run_uri, step, SCRATCH_FOLDER, COMMITS_FOLDER))
        store.delete_many([found.uri for found in scratch])
    tasks = [(each.step, COMMITS_FOLDER, f"{each.task}.json") for each in rows]
    store.delete_many([join_uri(run_uri, *place) for place in tasks])


def has_begun(store: ObjectStore, run_uri: str, step: str) -> bool:
    """Return whether anything of `step` is stored."""
    return bool(store.list(join_uri(run_uri, step)))


def remove_step(store: ObjectStore, run_uri: str, step: str) -> None:
    """Remove all that is stored of `step`: its manifest, its records, then their objects."""
    folder = join_uri(run_uri, step)
    store.delete(manifest_uri(run_uri, step))
    uris = [found.uri for found in store.list(folder)]
    # A record that names what is gone would be damage; an object that no record names is none.
    for are_records in (True, False):
        store.delete_many([uri for uri in uris if uri.endswith(".json") == are_records])
