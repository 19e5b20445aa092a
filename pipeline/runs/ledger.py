"""The quarantine ledger's totals and reasons, and the loss budget that bounds them."""

import json
from collections import Counter
from collections.abc import Sequence

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.manifest import Output, read_output


class LossBudgetExceededError(Exception):
    """More utterances were quarantined than the recipe's loss budget allows."""


def check_loss_budget(
    store: ObjectStore,
    run_uri: str,
    ledgers: Sequence[Output],
    quarantined: Tally,
    tally_in: Tally,
    loss_budget: float,
) -> None:
    """Fail if more than `loss_budget` (a fraction) of a step's utterances were quarantined."""
    lost, total = quarantined.utterances, tally_in.utterances
    if lost <= loss_budget * total:
        return
    reasons = dict(ledger_reasons(store, run_uri, ledgers).most_common())
    raise LossBudgetExceededError(
        f"{lost} of {total} utterances quarantined, the loss budget is {loss_budget:.2%}; reasons: "
        f"{reasons}. See the ledgers, such as {ledgers[0].key}; fix the data, or raise loss_budget"
    )


def ledger_reasons(store: ObjectStore, run_uri: str, ledgers: Sequence[Output]) -> Counter[str]:
    """Count each reason in `ledgers`."""
    lines = [
        line
        for ledger in ledgers
        for line in read_output(store, run_uri, ledger).decode().splitlines()
    ]
    return Counter(json.loads(line)["reason"] for line in lines)
