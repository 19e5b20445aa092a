"""Exactly-once commits: keys, records, second attempts, and what a restarted step runs."""

import hashlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from infra.store.object_store import ObjectNotFound, ObjectStore
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import (
    Commit,
    RecipeConflictError,
    StepContext,
    committed_tasks,
    fingerprint,
)
from pipeline.runs.manifest import Output
from tests.pipeline.runs.small_commits import INPUTS, record


def test_a_fingerprint_is_the_digest_of_configuration_inputs_and_versions() -> None:
    """SHA-256 of canonical JSON, so the order of keys does not matter."""
    text = b'[{"k": 20, "m": 1}, {"selection/x": "0123"}, {"v": "1"}]'
    assert fingerprint({"m": 1, "k": 20}, INPUTS, {"v": "1"}) == hashlib.sha256(text).hexdigest()


def test_an_outputs_key_holds_its_digest(context: StepContext) -> None:
    """step/first two digits/task-first sixteen digits, whatever it holds."""
    digest = hashlib.sha256(b"rows").hexdigest()
    output = context.put_output("000007", ".parquet", b"rows", Tally(2, 30))
    key = f"features/x/{digest[:2]}/000007-{digest[:16]}.parquet"
    assert output == Output(key, 4, digest, 2, 30)
    assert context.store.get(f"{context.run_uri}/{key}") == b"rows"


def test_a_ledger_has_one_line_an_utterance(context: StepContext) -> None:
    """It counts what it holds; without any there is no ledger."""
    rows = [Quarantined(f"u{number}", "", "truncated", "", 9, 7) for number in range(3)]
    ledger = context.put_ledger("0", rows)
    assert ledger is not None
    assert ledger.key.endswith(".ledger.jsonl")
    assert ledger.tally == Tally(3, 21)
    lines = context.store.get(f"{context.run_uri}/{ledger.key}").decode().splitlines()
    assert [json.loads(line)["utterance_id"] for line in lines] == ["u0", "u1", "u2"]
    assert context.put_ledger("0", []) is None


def test_a_record_lies_below_its_step(context: StepContext) -> None:
    """One object a task, which a restarted step finds."""
    committed = context.commit(record(context, "000007"))
    data = context.store.get(f"{context.run_uri}/features/x/commits/000007.json")
    assert Commit.from_bytes(data) == committed
    assert committed_tasks(context) == {"000007": committed}


def test_a_commit_that_vanishes_while_it_is_read_is_an_error(context: StepContext) -> None:
    """A store that lists what it does not have is not a step without commits."""
    context.commit(record(context))

    class Forgetful(ObjectStore):
        def get_many(self, uris: Sequence[str], *_: int) -> Any:
            for uri in uris:
                self.delete(uri)
            return super().get_many(uris)

    store = Forgetful(context.store.allowed_prefixes)
    with pytest.raises(ObjectNotFound):
        committed_tasks(replace(context, store=store))


def test_a_conflict_survives_pickling_and_names_its_settings() -> None:
    """Spark's workers send it to the driver; said, settings and remedy are in this order."""
    error = RecipeConflictError("x: begun", "use another --run", ["engine: fast -> kaldi"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "x: begun: engine: fast -> kaldi: use another --run"
