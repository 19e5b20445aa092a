"""Open and close the process group of all ranks, which meet in a store."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.training.fit.small_fits import fit, small_fit, write_run
from tests.training.forked_programs import Program, run_forked
from training.distributed import process_group
from training.distributed.failures import Members, rendezvous
from training.distributed.rank_launcher import root_cause


def test_the_world_must_be_opened() -> None:
    """The world exists only within open_world(), and has one rank without torchrun."""
    with pytest.raises(RuntimeError, match=r"no process group yet: call within"):
        process_group.default_world()
    with process_group.open_world(time_limit_s=60.0) as group:
        assert process_group.default_world() is group
        assert group.size() == 1
    with pytest.raises(RuntimeError, match=r"no process group yet"):
        process_group.default_world()


def test_a_group_has_a_backend_for_each_type_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo for the CPU always; NCCL for GPUs, where there are any and torch has NCCL."""
    assert process_group._backends() == "cpu:gloo" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert process_group._backends() == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert process_group._backends() == "cpu:gloo"


def test_two_backends_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit with gloo under both names stores the model and the curve of gloo alone."""
    results = []
    for backends in ("cpu:gloo", "cpu:gloo,cuda:gloo"):
        monkeypatch.setattr(process_group, "_backends", lambda: backends)  # noqa: B023 - used at once
        folder = tmp_path / str(len(backends))
        write_run(folder)
        with process_group.open_world() as group:
            assert str(dist.get_backend_config(group)) == backends
            manifest, model = fit(group, folder, small_fit("htm", student=True))
        results.append((manifest.to_bytes(), model))
    assert results[0] == results[1]


STAYS_IN_ITS_GROUP = """
import sys, time
import torch.distributed as dist
from training.distributed import process_group

def destroy():
    print("destroying", flush=True)
    time.sleep(100)

dist.destroy_process_group = destroy
process_group.LEAVING_LIMIT_S = 0.5
with process_group.open_world(0.5):
    if sys.argv[1] == "error":
        raise ValueError("this rank's data are corrupt")
"""


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("error", "rank 0 ended: ValueError: this rank's data are corrupt"),
        ("done", "rank 0 has done its work, and its group does not close: another rank ended"),
    ],
    ids=["error", "done"],
)
def test_a_process_that_cannot_leave_its_group_ends(end: str, message: str, tmp_path: Path) -> None:
    """As where NCCL's shutdown waits for a dead rank: status 1, and the cause is named."""
    program = tmp_path / "stays.py"
    program.write_text(STAYS_IN_ITS_GROUP)
    (ended,) = run_forked([Program(program, (end,), tmp_path)])
    assert (ended.code, ended.out) == (1, "destroying\n")
    assert ended.err.splitlines()[-1].startswith(message)


TIME_LIMIT_S = 20.0


def start(store: dist.Store, *ranks: int, time_limit_s: float = TIME_LIMIT_S) -> list[Members]:
    """Run the rendezvous of these ranks of a world of three at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, 3, time_limit_s), ranks))


def test_all_ranks_know_the_same_members() -> None:
    """In any order of arrival, all ranks return every rank's process and one prefix."""
    members = start(dist.HashStore(), 2, 0, 1)
    assert members[0] == members[1] == members[2]
    assert len({process.start for process in members[0].processes}) == 3
    assert members[0].name(1).startswith("rank 1 (host ")


def test_a_later_start_has_its_own_members() -> None:
    """A later start has another prefix and other processes, though the store keeps all of them."""
    store = dist.HashStore()
    first, second, third = (start(store, 0, 1, 2)[0] for _ in range(3))
    assert len({first.prefix, second.prefix, third.prefix}) == 3
    earlier = {process.start for process in (*first.processes, *second.processes)}
    assert earlier.isdisjoint(process.start for process in third.processes)


def test_an_early_rank_does_not_take_an_earlier_start_for_its_own() -> None:
    """Ranks 1 and 2 wait in vain while their rank 0 is missing, and succeed once it comes."""
    store = dist.HashStore()
    first = start(store, 0, 1, 2)[0]
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 3 did not come within"):
        start(store, 1, 2, time_limit_s=0.2)
    assert start(store, 0, 1, 2)[0].prefix != first.prefix


def test_a_rank_that_an_earlier_start_did_not_have_waits() -> None:
    """The store's list is of two ranks; rank 2 of three is in none before rank 0 comes."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: rendezvous(store, rank, 2, TIME_LIMIT_S), range(2)))
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 3 did not come within"):
        start(store, 1, 2, time_limit_s=0.2)


@pytest.mark.parametrize("present", [(0, 1), (0, 2), (1, 2), (0,)])
def test_absent_ranks_are_named(present: tuple[int, ...]) -> None:
    """Within the time limit, the ranks that came name those that did not."""
    absent = [rank for rank in range(3) if rank not in present]
    with pytest.raises(TimeoutError, match=re.escape(f"ranks {absent} of 3 did not come")):
        start(dist.HashStore(), *present, time_limit_s=0.3)


def test_ranks_on_devices_of_two_types_are_found() -> None:
    """A host without a GPU among hosts with one: each rank learns whose device differs."""
    store = dist.HashStore()
    devices = ("cuda", "cuda", "cpu")
    with ThreadPoolExecutor() as pool:
        joined = [
            pool.submit(rendezvous, store, rank, 3, TIME_LIMIT_S, devices[rank])
            for rank in range(3)
        ]
        differences = {each.result().first_difference() for each in joined}
    (difference,) = differences
    assert re.fullmatch(r"rank 0 \(.*\) on cuda, rank 2 \(.*\) on cpu", difference)
    assert start(dist.HashStore(), 0, 1, 2)[0].first_difference() == ""


def test_the_rank_that_explains_the_others_is_chosen() -> None:
    """Its own code comes before that of a rank that was ended; else the earliest failure."""

    def failure(rank: int, code: int, second: int) -> ProcessFailure:
        found = ProcessFailure(rank, 100 + rank, code, "no such file")
        found.timestamp = second
        return found

    ended, refused, failed = failure(0, -15, 1), failure(1, 2, 3), failure(2, 1, 2)
    assert root_cause([ended, refused, failed]) is refused
    assert root_cause([failed, ended]) is ended
