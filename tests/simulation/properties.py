"""The properties of the commit protocol, checked in every state that a schedule reaches."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pipeline.records import Tally
from pipeline.runs.manifest import Manifest, OutputPart, sha256
from tests.simulation.exploration import Scenario
from tests.simulation.schedules import GO, Action, Faults, Machine, State
from tests.simulation.simulated_s3 import Objects
from tests.simulation.simulated_step import COMMITS, MANIFEST_KEY, Recipe, small_step

REFUSED = re.compile(r"another recipe|two recipes share one --run")
REMEDY = re.compile(r"another --run|fresh --run")


@dataclass
class Properties:
    """Properties of drivers that run one step, each with its recipe, on one run.

    1. A driver that reported success finds its own manifest in place, then and later.
    2. Each object that the manifest or a part of it names is there with its digest, and the
       counts balance.
    3. A commit record and a manifest never change.
    4. If all are killed now, the same command again writes the manifest of a faultless run, to
       the byte unless devices differ in their last bits. It may fail only where another recipe
       has committed, and says so.
    5. A driver fails only if another recipe is at work, and says so.
    """

    recipes: Sequence[Recipe]
    num_tasks: int
    has_many: bool = False
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.machine = Machine(
            [partial(small_step, recipe, self.num_tasks) for recipe in self.recipes]
        )
        self._checked_ends: set[tuple[int, int]] = set()
        self._checked_stores: set[int] = set()
        self._checked_again: set[int] = set()
        self._reported: dict[int, bytes] = {}
        codes = range(len(self.recipes))
        alone = [self.machine.stores[self.run_alone(code, self.machine.empty)[0]] for code in codes]
        self._faultless = [objects[MANIFEST_KEY] for objects in alone]
        self._own = [{*map(_work_of, *zip(*objects.items(), strict=True))} for objects in alone]

    def scenario(self, *drivers: int) -> Scenario:
        """Let a driver run each of these recipes, by their numbers."""
        name = f"Properties({self.recipes}, {self.num_tasks}, {self.has_many}).scenario{drivers}"
        return Scenario(self.machine, self, drivers, name)

    def run_alone(self, code: int, store: int) -> tuple[int, int]:
        """Run one driver on a store, without faults; return the store and the place at its end."""
        machine = self.machine
        state = machine.initial([code], Faults(), store)
        while running := next(machine.running(state), None):
            state = machine.step(state, Action(GO, running[0]))
        return state.store, state.drivers[0].place

    def check(self, state: State) -> None:
        """Raise AssertionError if property 1, 2 or 5 does not hold in this state."""
        for driver in state.drivers:
            key = (state.store, driver.place)
            if driver.place in self.machine.outcomes and key not in self._checked_ends:
                self._check_outcome(state.store, driver.code, driver.place, "a driver")
                self._checked_ends.add(key)
        if state.store not in self._checked_stores:
            self._check_store(self.machine.stores[state.store])
            self._checked_stores.add(state.store)

    def check_step(self, before: State, after: State) -> None:
        """Raise AssertionError if a record that was there is another one now (property 3)."""
        if before.store == after.store:
            return
        old, new = (self.machine.stores[state.store] for state in (before, after))
        for key, data in old.items():
            if key == MANIFEST_KEY or key.startswith(COMMITS):
                assert new.get(key) == data, f"{key} was replaced"

    def check_end(self, state: State) -> None:
        """Raise AssertionError if property 4 does not hold, should all be killed in this state."""
        if state.store in self._checked_again:
            return
        for code in range(len(self.recipes)):
            store, place = self.run_alone(code, state.store)
            assert place in self.machine.outcomes, "the same command again does not end"
            outcome = self.machine.outcomes[place]
            if not self._others(self.machine.stores[state.store], code):
                assert outcome.error is None, f"the same command again fails: {outcome}"
            self._check_outcome(store, code, place, "the same command again")
            self._check_store(self.machine.stores[store])
        self._checked_again.add(state.store)

    def _check_outcome(self, store: int, code: int, place: int, who: str) -> None:
        """Check properties 1 and 5 of a driver that has ended."""
        objects, outcome = self.machine.stores[store], self.machine.outcomes[place]
        if outcome.error is None:
            if place not in self._reported:
                self._reported[place] = outcome.value.manifest.to_bytes()
            ours, there = self._reported[place], objects.get(MANIFEST_KEY)
            assert there == ours, f"{who} reported success, and the manifest is not its own"
            if not self.recipes[code].device:
                assert ours == self._faultless[code], f"{who} made not what a faultless run makes"
            return
        text = str(outcome.error)
        assert isinstance(outcome.error, ValueError), f"{who} fails: {outcome}"
        assert self._others(objects, code), f"{who} fails, though all is of its recipe: {outcome}"
        assert REFUSED.search(text), f"{who} fails without a reason: {outcome}"
        assert REMEDY.search(text), f"{who} fails without a remedy: {outcome}"

    def _others(self, objects: Objects, code: int) -> bool:
        """Return whether another recipe's record is in the store."""
        return any(_work_of(key, data) not in self._own[code] for key, data in objects.items())

    def _check_store(self, objects: Objects) -> None:
        """Check property 2."""
        if MANIFEST_KEY not in objects:
            return
        manifest = Manifest.from_bytes(objects[MANIFEST_KEY], partial(_read_part, objects))
        assert bool(manifest.parts) is self.has_many
        expected = 4 * max(self.num_tasks, 1)
        assert manifest.tally_in.utterances == expected, "the manifest lacks tasks"
        for output in (*manifest.outputs, *manifest.ledgers):
            data = objects.get(f"run/{output.key}")
            assert data is not None, f"the manifest names {output.key}, which is missing"
            assert sha256(data) == output.sha256, f"{output.key} is not what its manifest says"
        for stated, parts in (
            (manifest.tally_out, manifest.outputs),
            (manifest.quarantined, manifest.ledgers),
        ):
            assert sum((each.tally for each in parts), Tally()) == stated, "counts do not balance"


def _read_part(objects: Objects, part: OutputPart) -> bytes:
    data = objects.get(f"run/{part.key}")
    assert data is not None, f"the manifest has a part {part.key}, which is missing"
    assert sha256(data) == part.sha256, f"{part.key} is not what its manifest says"
    return data


def _work_of(key: str, data: bytes) -> str | None:
    """Return the fingerprint of a commit record, or a manifest's configuration; else None."""
    if key == MANIFEST_KEY:
        return str(json.loads(data)["config"])
    return json.loads(data)["fingerprint"] if key.startswith(COMMITS) else None
