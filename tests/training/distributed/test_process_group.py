"""Open and close the process group of all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.training.fit.small_fits import fit, small_fit, write_run
from tests.training.forked_programs import Program, run_forked
from training.distributed import process_group


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
