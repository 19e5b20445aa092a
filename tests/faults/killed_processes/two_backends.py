"""Train the student as where GPUs are: two backends, gloo both, and all exchanges watched."""

import runpy

import infra.torchrun  # noqa: F401 - before torch, as in a job: it watches torchrun
from jobs.run import JOBS
from training.distributed import process_group

if __name__ == "__main__":
    process_group._backends = lambda: "cpu:gloo,cuda:gloo"
    process_group.is_read_at_once = lambda _: False
    runpy.run_path(str(JOBS / "train_student.py"), run_name="__main__")
