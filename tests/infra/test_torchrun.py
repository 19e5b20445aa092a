"""A rank ends when the process that launched it is killed."""

import signal
import subprocess
import sys

CHILD = """
import os, sys, time
from infra.torchrun import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(60)
"""
IMPORT_AS_RANK = """
os.environ |= {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
import infra.torchrun
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(60)
"""
ORPHAN = """
import os, sys, time
from infra.torchrun import end_with_launcher
parent = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
end_with_launcher()
time.sleep(60)
"""
TIME_LIMIT_S = 30


def test_a_process_ends_with_its_launcher() -> None:
    """When its parent is killed the process says so and ends, long before its work is done."""
    require_end(PARENT)


def test_a_process_ends_whose_launcher_ended_before_it_watches() -> None:
    """A rank that still imports torch when torchrun is killed ends as soon as it watches."""
    require_end(PARENT.replace(repr(CHILD), repr(ORPHAN)))


def test_a_rank_that_still_imports_ends_with_torchrun() -> None:
    """A rank of torchrun watches it from the first import on: those of torch take seconds."""
    importing = CHILD.replace("from infra.torchrun import end_with_launcher", IMPORT_AS_RANK)
    require_end(PARENT.replace(repr(CHILD), repr(importing.replace("end_with_launcher()", ""))))


def require_end(program: str) -> None:
    """Kill the parent, and read what its child says."""
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_id = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    _, said = parent.communicate(timeout=TIME_LIMIT_S)  # until the child has closed its own
    assert f"rank 0 (process {child_id}): process {parent.pid}, which started it, is gone" in said
