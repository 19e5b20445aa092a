"""The quarantine ledger and the loss budget."""

from collections import Counter
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined
from pipeline.runs.commit import step_context
from pipeline.runs.engine import Loss, LossBudgetExceededError, LossLimit
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Output


def stored_ledgers(run: Path) -> list[Output]:
    """The ledgers of two tasks: 3 of 100 utterances were truncated, 1 was empty."""
    store = ObjectStore((str(run),))
    context = step_context(store, str(run), "features/x", {}, {})
    reasons = {"0": ["empty_object", "truncated"], "1": ["truncated", "truncated"]}
    ledgers = [
        context.put_ledger(task, [Quarantined("u", "a.flac", each, "", 1, 10) for each in rows])
        for task, rows in reasons.items()
    ]
    return [ledger for ledger in ledgers if ledger]


def test_reasons_are_counted_over_all_ledgers(tmp_path: Path) -> None:
    """As their records count them."""
    ledgers = stored_ledgers(tmp_path)
    assert [each.reasons for each in ledgers] == [
        {"empty_object": 1, "truncated": 1},
        {"truncated": 2},
    ]
    assert ledger_reasons(ledgers) == {"truncated": 3, "empty_object": 1}


def test_the_budget_itself_is_within() -> None:
    """Of nothing, nothing may be lost."""
    assert LossLimit(0.04, 100).allows(4)
    assert not LossLimit(0.0399, 100).allows(4)
    assert LossLimit(0.0, 0).allows(0)


def test_a_larger_loss_names_numbers_reasons_and_a_ledger() -> None:
    """The commonest reason first."""
    loss = Loss("0", Counter({"empty_object": 1, "truncated": 3}), "features/x/a.ledger.jsonl")
    with pytest.raises(LossBudgetExceededError) as caught:
        LossLimit(0.0399, 100).check(4, loss)
    assert str(caught.value) == (
        "4 of 100 utterances quarantined, the loss budget is 3.99%; "
        "reasons: {'truncated': 3, 'empty_object': 1}. See the ledgers, such as "
        "features/x/a.ledger.jsonl; fix the data, or raise loss_budget"
    )


def test_audio_outside_the_prefixes_has_its_remedy() -> None:
    """The message names the key that allows its folder; of other reasons it does not."""
    for reason, is_named in (("outside_prefixes", True), ("truncated", False)):
        with pytest.raises(LossBudgetExceededError) as caught:
            LossLimit(0.0, 1).check(1, Loss("0", Counter({reason: 1}), "x"))
        said = str(caught.value)
        assert ("in corpus.audio_prefixes and use another --run; " in said) == is_named
