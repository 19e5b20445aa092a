"""The simulated S3 answers as an S3 server does."""

import random

from infra.store.object_store import ObjectStore
from tests.simulation.replayed_code import Call, Outcome, outcome_of, run_code
from tests.simulation.simulated_s3 import (
    BUCKET,
    Objects,
    SimulatedStore,
    perform,
    real_operation,
    simulated_network,
)


def operations(store: ObjectStore, uri: str) -> list[str]:
    """Perform sixty operations; return their outcomes, without the bucket's name."""
    chance = random.Random(0)
    outcomes = []
    for number in range(60):
        key = f"{uri}/{chance.choice('ab')}/{chance.choice('xyz')}"
        operation = chance.choice(["get", "put", "put_if_absent", "delete", "fetch", "list"])
        data = [f"data {number}".encode()] if operation.startswith("put") else []
        prefix = f"{uri}/{chance.choice('ab')}"
        arguments = [prefix] if operation == "list" else [key, *data]
        outcome = outcome_of(lambda: getattr(store, operation)(*arguments))  # noqa: B023 - at once
        found = str(type(outcome.error)) if outcome.error else str(outcome.value)
        outcomes.append(f"{operation} {found}".replace(uri, ""))
    return outcomes


def test_operations_have_the_outcomes_of_a_server(s3_bucket: str) -> None:
    """Reads, writes, conditional writes, listings and removals, one after the other."""
    expected = operations(ObjectStore((f"s3://{s3_bucket}",)), f"s3://{s3_bucket}")
    uri, objects = f"s3://{BUCKET}", Objects()

    def answer(call: Call) -> Outcome:
        """Let the real store perform an operation on the simulated objects."""
        nonlocal objects
        point = run_code(lambda: real_operation(call))
        while point.outcome is None:
            assert point.call is not None
            objects, found = perform(objects, point.call.arguments[0])
            point = point.resume(found)
        return point.outcome

    with simulated_network():
        point = run_code(lambda: operations(SimulatedStore((uri,)), uri))
        while point.outcome is None:
            assert point.call is not None
            point = point.resume(answer(point.call))
    assert point.outcome.value == expected
    assert len(set(expected)) > 20
