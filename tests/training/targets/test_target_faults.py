"""Target generation on a real device server that dies, runs out of memory or meets poison."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from infra.configuration import canonical_json
from infra.device_faults import FAULTS
from infra.devices.device_pool import DevicePool, _private_directory
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, joined
from pipeline.runs.ledger import LossBudgetExceededError
from pipeline.runs.manifest import Manifest, is_finished, read_output
from pipeline.runs.names import TARGETS_STEP
from pipeline.sampling import sampling_priority
from pipeline.shards import FeatureRow, read_targets
from pipeline.splicing import STACK
from pipeline.steps.targets import TargetsConfig, generate_targets, tail_seed
from tests.in_process_teacher import in_process
from tests.small_corpus import serially
from tests.training.targets.faulty_teachers import Faults, batches
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    unlabelled_rows,
    write_unlabelled_toy_run,
)
from training.configuration.targets import WindowsConfig
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
    """ToyRun: a run, its pool of one faulty device, and the targets without any fault."""

    folder: Path
    store: ObjectStore
    run_uri: str
    pool: DevicePool
    undisturbed: dict[str, KBest]

    def label(
        self, faults: Faults, loss_budget: float, distribute: Callable = serially
    ) -> Manifest:
        """Label into a fresh targets step."""
        shutil.rmtree(Path(self.run_uri) / "targets", ignore_errors=True)
        faults.put(self.folder)
        FAULTS.take()
        return self.resume(loss_budget, distribute)

    def resume(self, loss_budget: float, distribute: Callable = serially) -> Manifest:
        """Label what is not labelled yet."""
        teacher = PooledTeacher(self.pool, WindowsConfig(), partial(kept_targets, CONFIG), joined)
        place = self.store, self.run_uri, CONFIG, teacher, distribute
        return generate_targets(*place, loss_budget=loss_budget).manifest

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


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyRun]:
    folder = tmp_path_factory.mktemp("toy")
    store, run_uri, _ = write_unlabelled_toy_run(folder, shards())
    arguments = {"run_uri": run_uri, "k": str(K), "form": canonical_json(BIDIRECTIONAL)}
    pool = DevicePool(
        FACTORY, {**arguments, "folder": str(folder)}, ("cpu",), CONFIG.request_frames, 3.0
    )
    run = ToyRun(folder, store, run_uri, pool, {})
    teacher = in_process(serve_teacher("cpu", **arguments), K)
    alone = generate_targets(store, run_uri, CONFIG, teacher, serially).manifest
    run.undisturbed.update(run.targets(alone))
    yield run
    shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)


def kinds_of_faults() -> set[str]:
    """Take the kinds of devices' faults that tasks saw."""
    return {each.kind for each in FAULTS.take()}


def at_once(elements: Sequence, function: Callable, description: str) -> list:
    """Run the tasks of a step side by side, as the cores of a host do."""
    del description
    with ThreadPoolExecutor(len(elements)) as threads:
        return list(threads.map(function, elements))


def test_nan_is_one_utterance_s(toy_run: ToyRun) -> None:
    """Its neighbours in the batch have their targets."""
    manifest = toy_run.label(Faults(nan=[SEEDS[ALIKE[1]]], delayed=[SEEDS[LONG]]), 0.1)
    toy_run.assert_others_whole(manifest, [ALIKE[1]])
    assert "logits hold NaN or infinity" in toy_run.lost(manifest)[ALIKE[1]]


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


def test_batches_that_do_not_fit_are_halved(toy_run: ToyRun) -> None:
    """The utterance that does not fit alone is a ledger row with torch's own error."""
    manifest = toy_run.label(Faults(memory_frames=30), 0.1)
    toy_run.assert_others_whole(manifest, [LONG])
    detail = toy_run.lost(manifest)[LONG]
    assert detail.startswith("OutOfMemoryError: CUDA out of memory: 5")
    assert kinds_of_faults() == {"out of memory"}
    assert max(len(each.seeds) for each in batches(toy_run.folder)) >= 3


def test_a_server_killed_in_a_batch_loses_nothing(toy_run: ToyRun) -> None:
    """Of two tasks at once; a second server computes what the first had."""
    faults = Faults(killing_once=[SEEDS[ALIKE[2]]], delayed=[SEEDS[LONG]])
    toy_run.assert_others_whole(toy_run.label(faults, 0.0, at_once))
    assert len({each.process for each in batches(toy_run.folder)}) == 2
    assert kinds_of_faults() == {"server lost"}


def test_an_utterance_that_kills_each_server_is_lost_alone(toy_run: ToyRun) -> None:
    """After three servers it is a ledger row; what was with it in the first is labelled."""
    name = ALIKE[3]
    faults = Faults(killing=[SEEDS[name]], delayed=[SEEDS[LONG]])
    manifest = toy_run.label(faults, 0.1, at_once)
    toy_run.assert_others_whole(manifest, [name])
    assert toy_run.lost(manifest)[name].startswith("its server ended 3 times, at last: its server")
