"""Target generation on real device servers that die, run out of memory or meet poison."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.manifest import is_finished
from pipeline.runs.names import TARGETS_STEP
from tests.training.targets.faulty_teachers import Faults, batches
from tests.training.targets.faulty_toy_run import (
    ALIKE,
    IDS,
    LONG,
    SEEDS,
    ToyRun,
    at_once,
    kinds_of_faults,
    with_first_killed,
)

NUM_BATCHES = 5
"""The batches of both shards."""


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRun]:
    run = ToyRun.make(tmp_path_factory.mktemp("toy"))
    yield run
    run.end()


@pytest.mark.parametrize("poison", [ALIKE[1:2], ALIKE[1:3]])
def test_poison_in_a_batch_is_found(toy_run: ToyRun, poison: Sequence[str]) -> None:
    """One or two utterances that raise are rows of the ledger; the batch had others with them."""
    seeds = [SEEDS[name] for name in poison]
    manifest = toy_run.label(Faults(raising=seeds, delayed=[SEEDS[LONG]]), 0.2)
    toy_run.assert_others_whole(manifest, poison)
    assert {*toy_run.lost(manifest).values()} == {"ValueError: utterance = poison: need another"}
    assert any({*seeds} < {*each.seeds} for each in batches(toy_run.folder))


def test_the_loss_budget_bounds_what_the_teacher_fails_at(toy_run: ToyRun) -> None:
    """The error names the share, and a raised budget uses what is labelled."""
    faults = Faults(raising=[SEEDS[ALIKE[0]], SEEDS[IDS[-1]]])
    exceeded = r"2 of 12 utterances .* budget is 10.00%; reasons: {'teacher_failed': 2}"
    with pytest.raises(LossBudgetExceededError, match=exceeded):
        toy_run.label(faults, 0.1)
    assert not is_finished(toy_run.store, toy_run.run_uri, TARGETS_STEP)
    (toy_run.folder / "batches").unlink()
    toy_run.assert_others_whole(toy_run.resume(0.2), [ALIKE[0], IDS[-1]])
    assert not (toy_run.folder / "batches").exists()


def test_an_utterance_that_kills_each_server_is_lost_alone(toy_run: ToyRun) -> None:
    """After three servers it is a ledger row; what was with it in the first is labelled."""
    name = ALIKE[3]
    faults = Faults(killing=[SEEDS[name]], delayed=[SEEDS[LONG]])
    manifest = toy_run.label(faults, 0.1, at_once)
    toy_run.assert_others_whole(manifest, [name])
    assert toy_run.lost(manifest)[name].startswith("its server ended 3 times, at last: its server")


def test_an_executor_killed_with_requests_in_flight_loses_nothing(toy_run: ToyRun) -> None:
    """Its server computes the requests of the next attempt, and of the other task meanwhile."""
    faults = Faults(delayed=[SEEDS[name] for name in ALIKE[:2]])
    alone = toy_run.on("cpu#1")
    toy_run.assert_undisturbed(alone.label(faults, distribute=with_first_killed))
    computed = batches(toy_run.folder)
    assert len({each.process for each in computed}) == 1
    assert len(computed) > NUM_BATCHES
    assert kinds_of_faults() == set()


def test_two_drivers_of_one_run_write_each_target_once(toy_run: ToyRun) -> None:
    """Both make the same step at once, by the same server."""
    alone = toy_run.on("cpu#1")
    alone.clear(Faults(delayed=[SEEDS[LONG]]))
    with ThreadPoolExecutor(2) as threads:
        for manifest in threads.map(lambda _: alone.resume(distribute=at_once), range(2)):
            toy_run.assert_undisturbed(manifest)
    assert len(batches(toy_run.folder)) > NUM_BATCHES
