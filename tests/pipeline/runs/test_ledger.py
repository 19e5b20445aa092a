"""The quarantine ledger and the loss budget."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import step_context
from pipeline.runs.ledger import (
    LossBudgetExceededError,
    LossLimit,
    check_loss_budget,
    ledger_reasons,
    loss_error,
)
from pipeline.runs.manifest import Output


def stored_ledgers(run: Path) -> tuple[ObjectStore, list[Output]]:
    """The ledgers of two tasks: 3 of 100 utterances were truncated, 1 was empty."""
    store = ObjectStore((str(run),))
    context = step_context(store, str(run), "features/x", {}, {})
    reasons = {"0": ["empty_object", "truncated"], "1": ["truncated", "truncated"]}
    ledgers = [
        context.put_ledger(task, [Quarantined("u", "a.flac", each, "", 1, 10) for each in rows])
        for task, rows in reasons.items()
    ]
    return store, [ledger for ledger in ledgers if ledger]


def test_reasons_are_counted_over_all_ledgers(tmp_path: Path) -> None:
    """One count a reason."""
    store, ledgers = stored_ledgers(tmp_path)
    assert ledger_reasons(store, str(tmp_path), ledgers) == {"truncated": 3, "empty_object": 1}


def test_records_count_reasons_so_that_no_ledger_is_read(tmp_path: Path) -> None:
    """A record of an older version counts none: then its ledger is read."""
    store, ledgers = stored_ledgers(tmp_path)
    assert [each.reasons for each in ledgers] == [
        {"empty_object": 1, "truncated": 1},
        {"truncated": 2},
    ]
    uncounted = [replace(each, reasons={}) for each in ledgers]
    counted = ledger_reasons(store, str(tmp_path), ledgers)
    assert counted == ledger_reasons(store, str(tmp_path), uncounted)
    store.delete(join_uri(str(tmp_path), ledgers[1].key))
    assert ledger_reasons(store, str(tmp_path), [uncounted[0], ledgers[1]]) == counted


@pytest.mark.parametrize("loss_budget", [0.04, 0.05, 1.0])
def test_a_loss_within_the_budget_passes(tmp_path: Path, loss_budget: float) -> None:
    """The budget itself is within."""
    store, ledgers = stored_ledgers(tmp_path)
    check_loss_budget(store, str(tmp_path), ledgers, Tally(4, 40), Tally(100, 1000), loss_budget)


def test_a_larger_loss_names_numbers_reasons_and_a_ledger(tmp_path: Path) -> None:
    """The commonest reason first."""
    store, ledgers = stored_ledgers(tmp_path)
    with pytest.raises(LossBudgetExceededError) as caught:
        check_loss_budget(store, str(tmp_path), ledgers, Tally(4, 40), Tally(100, 1000), 0.0399)
    assert str(caught.value).startswith(
        "4 of 100 utterances quarantined, the loss budget is 3.99%; "
        "reasons: {'truncated': 3, 'empty_object': 1}. "
        f"See the ledgers, such as {ledgers[0].key}; "
    )
    assert str(caught.value).endswith("or raise loss_budget")


def test_audio_outside_the_prefixes_has_its_remedy() -> None:
    """The message names the key that allows its folder; of other reasons it does not."""
    for reason, is_named in (("outside_prefixes", True), ("truncated", False)):
        said = str(loss_error(1, LossLimit(0.0, 1), Counter({reason: 1}), "x"))
        assert ("in corpus.audio_prefixes and use another --run; " in said) == is_named


def test_nothing_lost_of_nothing_passes(tmp_path: Path) -> None:
    """A step without utterances has lost none."""
    check_loss_budget(ObjectStore((str(tmp_path),)), str(tmp_path), [], Tally(), Tally(), 0.0)
