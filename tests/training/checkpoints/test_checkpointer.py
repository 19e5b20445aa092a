"""Checkpoints in the store: what counts, what is kept, and what damage costs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from infra.store.object_store import ObjectStore
from training.checkpoints.checkpointer import Checkpointer
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Synchronous


class KilledError(BaseException):
    """Stands for SIGKILL."""


@dataclass(frozen=True)
class MortalStore(ObjectStore):
    """A store whose process is killed instead of making change number `num_changes`."""

    num_changes: int
    made: list[str] = field(default_factory=list)

    def _change(self, what: str) -> None:
        if len(self.made) == self.num_changes:
            raise KilledError
        self.made.append(what)

    def put(self, uri: str, data: bytes) -> None:
        self._change(f"put {Path(uri).name}")
        super().put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> bool:
        self._change(f"put {Path(uri).name}")
        return super().put_if_absent(uri, data)

    def delete(self, uri: str) -> None:
        self._change(f"delete {Path(uri).name}")
        super().delete(uri)


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"weights": torch.full((3,), float(10 * step + rank)), "step": step}


def checkpoints(group: ProcessGroup, folder: Path, **settings: Any) -> Checkpointer:
    store = settings.pop("store", ObjectStore((str(folder),)))
    return Checkpointer(store, str(folder), settings.pop("fingerprint", "a"), group, **settings)


def save(group: ProcessGroup, folder: Path, steps: range, **settings: Any) -> None:
    ours = checkpoints(group, folder, **settings)
    ours.restore(Synchronous)
    for step in steps:
        ours.save(step, state_of(step, group.rank()))


def on_ranks(num_ranks: int, scenario: Any, *arguments: Any, **settings: Any) -> list[Any]:
    return simulate_ranks(num_ranks, lambda group: scenario(group, *arguments, **settings))


def restore(group: ProcessGroup, folder: Path, **settings: Any) -> int | None:
    """The step of this rank's own state that is restored."""
    state = checkpoints(group, folder, **settings).restore(Synchronous)
    if state is None:
        return None
    assert torch.equal(state["weights"], state_of(state["step"], group.rank())["weights"])
    return state["step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_in(folder: Path) -> list[int]:
    """Steps of which there are objects, one for each object."""
    return [int(name[:12]) for name in names(folder)]


def test_the_newest_is_restored_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    """By each rank its own; a record and an object a rank, of three checkpoints of nine."""
    assert on_ranks(2, restore, tmp_path) == [None, None]
    on_ranks(2, save, tmp_path, range(1, 10), num_kept=3)
    assert on_ranks(2, restore, tmp_path, num_kept=3) == [9, 9]
    assert steps_in(tmp_path) == [7, 7, 7, 8, 8, 8, 9, 9, 9]


def test_saving_lists_nothing_and_reads_nothing(tmp_path: Path, monkeypatch) -> None:
    """A LIST is for the start alone."""

    def save_without_reading(group: ProcessGroup) -> None:
        ours = checkpoints(group, tmp_path)
        ours.restore(Synchronous)
        for method in ("list", "leftovers", "fetch", "head"):
            monkeypatch.delattr(ObjectStore, method)
        for step in range(4):
            ours.save(step, state_of(step, 0))

    on_ranks(1, save_without_reading)


@pytest.mark.parametrize("num_kept", [1, 2])
def test_killed_at_any_change_of_the_store(tmp_path: Path, num_kept: int) -> None:
    """The checkpoint before or the new one is there whole, and what else was left is removed."""
    num_changes = 0
    while True:
        folder = tmp_path / str(num_changes)
        folder.mkdir()
        (folder / "notes.txt").write_text("of a stranger")
        (folder / ".partial-1a2b").write_text("of a writer that was killed")
        store = MortalStore((str(folder),), num_changes)
        try:
            on_ranks(2, save, folder, range(1, 4), store=store, num_kept=num_kept)
        except KilledError:
            pass
        else:
            break
        records = [step for step in range(1, 4) if f"put {step:012d}.json" in store.made]
        newest = max(records, default=0)
        assert on_ranks(2, restore, folder, num_kept=num_kept) == 2 * [newest or None]
        kept = list(range(max(newest - num_kept, 0) + 1, newest + 1))
        (folder / "notes.txt").unlink()
        assert steps_in(folder) == sorted(3 * kept)
        num_changes += 1
    assert num_changes == 1 + 3 * 3 + (3 - num_kept) * 3


def damage(folder: Path, pattern: str, how: str) -> None:
    (path,) = folder.glob(pattern)
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-7])
    else:
        path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])


@pytest.mark.parametrize("how", ["missing", "truncated", "altered"])
@pytest.mark.parametrize("what", ["000000000004-rank-00001-*", "000000000004.json"])
def test_damage_is_noticed_and_the_one_before_restored(tmp_path: Path, what: str, how: str) -> None:
    """By all ranks, though one rank's object is damaged; what is damaged does not stay."""
    on_ranks(2, save, tmp_path, range(1, 5), num_kept=3)
    damage(tmp_path, what, how)
    if (what, how) == ("000000000004.json", "missing"):  # then it never counted
        assert on_ranks(2, restore, tmp_path, num_kept=3) == [3, 3]
    else:
        with pytest.warns(RuntimeWarning, match="000000000004"):
            assert on_ranks(2, restore, tmp_path, num_kept=3) == [3, 3]
    assert steps_in(tmp_path) == [2, 2, 2, 3, 3, 3]
    on_ranks(2, save, tmp_path, range(4, 6), num_kept=3)
    assert on_ranks(2, restore, tmp_path, num_kept=3) == [5, 5]
    assert steps_in(tmp_path) == [3, 3, 3, 4, 4, 4, 5, 5, 5]


def test_with_nothing_whole_left_training_does_not_begin_again_unasked(tmp_path: Path) -> None:
    """All damaged is an error that says what to remove; nothing is removed by itself."""
    on_ranks(2, save, tmp_path, range(1, 3))
    for step in (1, 2):
        damage(tmp_path, f"{step:012d}-rank-00000-*", "altered")
    before = names(tmp_path)
    with (
        pytest.warns(RuntimeWarning, match="resuming from the checkpoint before it"),
        pytest.raises(ValueError, match="no checkpoint is whole: remove them to train again"),
    ):
        on_ranks(2, restore, tmp_path)
    assert names(tmp_path) == before


def test_checkpoints_of_other_work_are_refused(tmp_path: Path) -> None:
    """Nothing is removed; the message names the remedy."""
    on_ranks(1, save, tmp_path, range(1, 3))
    before = names(tmp_path)
    with pytest.raises(ValueError, match="another recipe or other inputs: use another --run"):
        on_ranks(1, restore, tmp_path, fingerprint="b")
    assert names(tmp_path) == before


def test_checkpoints_in_s3(s3_bucket: str) -> None:
    """The same protocol: the last two stay, and damage is noticed."""
    uri = f"s3://{s3_bucket}/checkpoints"
    store = ObjectStore((uri,))

    def in_s3(group: ProcessGroup) -> int | None:
        ours = Checkpointer(store, uri, "a", group)
        state = ours.restore(Synchronous)
        if state is None:
            for step in range(1, 5):
                ours.save(step, state_of(step, group.rank()))
        return None if state is None else state["step"]

    assert on_ranks(2, in_s3) == [None, None]
    keys = [info.uri for info in store.list(uri)]
    assert len(keys) == 2 * 3
    assert on_ranks(2, in_s3) == [4, 4]
    store.put(keys[-2], b"something else")
    with pytest.warns(RuntimeWarning, match="resuming from the checkpoint before it"):
        assert on_ranks(2, in_s3) == [3, 3]


def test_a_step_saved_again_replaces_what_was_saved(tmp_path: Path) -> None:
    """As after a sub-epoch without steps: one checkpoint of the step stays, the later one."""

    def save_twice(group: ProcessGroup) -> None:
        ours = checkpoints(group, tmp_path)
        for state in (state_of(1, 0), {**state_of(1, 0), "sub_epoch": 2}):
            ours.save(1, state)

    on_ranks(1, save_twice)
    assert steps_in(tmp_path) == [1, 1]
    (state,) = on_ranks(1, lambda group: checkpoints(group, tmp_path).restore(Synchronous))
    assert state["sub_epoch"] == 2


def test_two_trainings_do_not_overwrite_each_others_checkpoints(tmp_path: Path) -> None:
    """The second fails if its recipe or its state is another; the same bytes are no harm."""

    def begin_both(group: ProcessGroup, fingerprint: str, other_state: dict[str, Any]) -> None:
        first, second = (checkpoints(group, tmp_path, fingerprint=f) for f in ("a", fingerprint))
        for ours in (first, second):
            assert ours.restore(Synchronous) is None
        first.save(1, state_of(1, 0))
        second.save(1, other_state)

    on_ranks(1, begin_both, "a", state_of(1, 0))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(
        ValueError, match=r"another training .* has saved step 1, .*end all but one"
    ):
        on_ranks(1, begin_both, "a", state_of(2, 0))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="another recipe or other inputs: use another --run"):
        on_ranks(1, begin_both, "b", state_of(1, 0))
    assert on_ranks(1, restore, tmp_path) == [1]
