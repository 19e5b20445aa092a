"""The quarantine ledger's totals and reasons, and the loss budget that bounds them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.json_lines import QUARANTINED, read_lines
from pipeline.runs.manifest import Output, read_output
from pipeline.runs.names import ACCESS_DENIED, MISSING_OBJECT, OUTSIDE_PREFIXES


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
