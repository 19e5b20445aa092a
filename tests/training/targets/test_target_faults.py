"""Target generation on real device servers that die, run out of memory or meet poison."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from infra.devices.device_pool import DevicePool, _private_directory
from infra.settings import canonical_json
from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import FAULTS
from pipeline.filterbank import STACK
from pipeline.kbest import KBest, joined
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.manifest import Manifest, is_finished, read_output
from pipeline.runs.names import TARGETS_STEP
from pipeline.sampling import sampling_priority
from pipeline.settings import TargetsConfig
from pipeline.shards import FeatureRow, read_targets
from pipeline.steps.targets import generate_targets, tail_seed
from tests.in_process_teacher import in_batches
from tests.infra.devices.device_clients import wait_until
from tests.small_corpus import serially
from tests.training.rank_context import rank_context
from tests.training.targets.faulty_teachers import Faults, batches, kill_servers
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    unlabelled_rows,
    write_unlabelled_toy_run,
)
from training.settings.decoding import WindowsConfig
from training.targets.teacher import PooledTeacher, kept_targets, serve_teacher

K = 5
CONFIG = TargetsConfig(K, 60, 3)
FACTORY = "tests.training.targets.faulty_teachers:serve_faulty_teacher"

LONG = "long"
"""Thrice as long as its neighbours, so that its batch has no others; the first of its shard."""

ALIKE = tuple(f"unlabelled-{name}" for name in ("0-1", "1-3", "2-0", "2-1"))
"""The utterances of 13 low-rate frames, which come next and make one batch."""


def shards() -> list[list[FeatureRow]]:
    """Two shards of six utterances."""
    rows = {row.utterance_id: row for shard in range(3) for row in unlabelled_rows(shard)}
    first = next(iter(rows.values()))
    frames = np.concatenate([first.features] * 3)
    long = replace(first, utterance_id=LONG, features=frames, duration_ms=3 * first.duration_ms)
    alike = [rows.pop(name) for name in ALIKE]
    rest = list(rows.values())
    return [[long, *alike, rest[0]], rest[1:]]


IDS = [row.utterance_id for shard in shards() for row in shard]


def seed_of(utterance_id: str) -> int:
    """Return the seed that a request for the utterance carries."""
    offset = sampling_priority(CONFIG.seed, utterance_id) % STACK
    return tail_seed(CONFIG.seed, utterance_id, offset)


SEEDS = {utterance_id: seed_of(utterance_id) for utterance_id in IDS}


@dataclass(frozen=True)
class ToyRun:
    """ToyRun: a run, its pool of one faulty device, and its targets step without any fault."""

    folder: Path
    store: ObjectStore
    run_uri: str
    config: TargetsConfig
    pool: DevicePool
    undisturbed: dict[str, KBest]
    undisturbed_objects: dict[str, bytes]

    @classmethod
    def make(cls, folder: Path, config: TargetsConfig = CONFIG) -> "ToyRun":
        """Write the run, and label it in this process."""
        store, run_uri, _ = write_unlabelled_toy_run(folder, shards())
        form = canonical_json(BIDIRECTIONAL)
        arguments = {"run_uri": run_uri, "k": str(config.k), "form": form}
        teacher = in_batches(serve_teacher("cpu", **arguments), config)
        arguments["folder"] = str(folder)
        pool = DevicePool(FACTORY, arguments, ("cpu",), config.request_frames, 60.0)
        run = cls(folder, store, run_uri, config, pool, {}, {})
        alone = generate_targets(store, run_uri, config, teacher, serially).manifest
        run.undisturbed.update(run.targets(alone))
        run.undisturbed_objects.update(run.objects())
        return run

    def on(self, *devices: str) -> "ToyRun":
        """Let other devices compute."""
        return replace(self, pool=replace(self.pool, devices=devices))

    def end(self) -> None:
        """Kill the pool's servers, and remove what they left."""
        kill_servers(self.folder)
        shutil.rmtree(_private_directory() / self.pool.token, ignore_errors=True)

    def label(
        self, faults: Faults, loss_budget: float = 0.0, distribute: Callable = serially
    ) -> Manifest:
        """Label into a fresh targets step."""
        self.clear(faults)
        return self.resume(loss_budget, distribute)

    def clear(self, faults: Faults) -> None:
        """Remove the targets step, and let the next one meet these faults."""
        shutil.rmtree(Path(self.run_uri) / "targets", ignore_errors=True)
        faults.put(self.folder)
        FAULTS.take()

    def resume(self, loss_budget: float = 0.0, distribute: Callable = serially) -> Manifest:
        """Label what is not labelled yet."""
        decode = partial(kept_targets, self.config)
        teacher = PooledTeacher(self.pool, WindowsConfig(), decode, joined)
        place = self.store, self.run_uri, self.config, teacher, distribute
        return generate_targets(*place, loss_budget=loss_budget).manifest

    def objects(self) -> dict[str, bytes]:
        """Read all that the step has in the store: shards, commits and manifest."""
        uris = [each.uri for each in self.store.list(join_uri(self.run_uri, TARGETS_STEP))]
        return {uri: self.store.get(uri) for uri in uris}

    def targets(self, manifest: Manifest) -> dict[str, KBest]:
        """Read the targets of all shards, in which each utterance is once."""
        rows = [
            row
            for each in manifest.outputs
            for row in read_targets(read_output(self.store, self.run_uri, each))
        ]
        assert len({row.utterance_id for row in rows}) == len(rows)
        return {row.utterance_id: row.kbest for row in rows}

    def lost(self, manifest: Manifest) -> dict[str, str]:
        """Read why utterances are in the ledgers, all of which the teacher failed at."""
        lines = [
            json.loads(line)
            for each in manifest.ledgers
            for line in read_output(self.store, self.run_uri, each).splitlines()
        ]
        assert {each["reason"] for each in lines} <= {"teacher_failed"}
        assert len(lines) == manifest.quarantined.utterances
        return {each["utterance_id"]: each["detail"] for each in lines}

    def assert_undisturbed(self, manifest: Manifest) -> None:
        """Each utterance is once in the step's shards; all its bytes are those without a fault."""
        assert list(self.targets(manifest)) == IDS
        assert self.objects() == self.undisturbed_objects

    def assert_others_whole(self, manifest: Manifest, lost: Sequence[str] = ()) -> None:
        """Each utterance is once in a shard or a ledger, with the undisturbed targets."""
        found = self.targets(manifest)
        assert list(found) == [each for each in IDS if each not in lost]
        assert self.lost(manifest).keys() == set(lost)
        assert manifest.tally_in == manifest.tally_out + manifest.quarantined
        assert manifest.tally_in.utterances == len(IDS)
        for name, one in found.items():
            other = self.undisturbed[name]
            np.testing.assert_allclose(one.logits, other.logits, atol=2e-3)
            np.testing.assert_allclose(one.log_z, other.log_z, atol=4e-3)
            assert (one.senones == other.senones).mean() > 0.97


def kinds_of_faults() -> set[str]:
    """Take the kinds of devices' faults that tasks saw."""
    return {each.kind for each in FAULTS.take()}


def at_once(elements: Sequence, function: Callable, description: str) -> list:
    """Run the tasks of a step side by side, as the cores of a host do."""
    del description
    with ThreadPoolExecutor(len(elements)) as threads:
        return list(threads.map(function, elements))


def with_first_killed(elements: Sequence, function: Callable, description: str) -> list:
    """Kill the first task's process while a server computes its requests; then run all tasks.

    Spark starts an executor's tasks elsewhere so.
    """
    process = rank_context().Process(target=function, args=(elements[0],))
    process.start()
    begun = Path(elements[0].teacher.pool.arguments["folder"]) / "batches"
    wait_until(begun.exists)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return at_once(elements, function, description)


NUM_BATCHES = 5
"""The batches of both shards."""


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRun]:
    run = ToyRun.make(tmp_path_factory.mktemp("toy"))
    yield run
    run.end()


def test_poison_in_a_batch_is_found(toy_run: ToyRun) -> None:
    """Two utterances that raise are rows of the ledger; the batch had others with them."""
    poison = ALIKE[1:3]
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
