"""Measure on a GPU: GTC's messages, and the job's whole training step against a bare loop.

`python -m tests.benchmarks.gpu [--rounds N] [--only PART ...] [--json]`, on a machine with a CUDA
device. The kernels' results are first compared with the CPU's, to the bit. `--device cpu` runs the
same code on small sizes, to see that it runs: its figures say nothing of a GPU.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

import torch

from tests.benchmarks import gpu_job_step, gpu_messages
from tests.benchmarks.gpu_job_step import Job
from tests.benchmarks.measure import Figure, show
from training.settings.models import LstmConfig

SMALL = Job(LstmConfig(2, 8, False, 3, 0.0), 30, 64, 0.005, 2, num_first_steps=2)


MESSAGES = "messages"
PARTS = (MESSAGES, *gpu_job_step.PRECISIONS)


def figures(device: torch.device, num_rounds: int, parts: Sequence[str]) -> list[Figure]:
    """Return the figures of some parts: of full sizes on a GPU, of small ones on a CPU."""
    is_full = device.type == "cuda"
    num_elements = gpu_messages.NUM_ELEMENTS if is_full else 9000
    job = gpu_job_step.PAPERS if is_full else SMALL
    precisions = [each for each in gpu_job_step.PRECISIONS if each in parts]
    found = []
    if MESSAGES in parts:
        found += gpu_messages.figures(num_elements, device, num_rounds)
    if precisions:
        with tempfile.TemporaryDirectory() as folder:
            found += gpu_job_step.figures(job, device, folder, num_rounds, precisions)
    return found


def main(arguments: list[str]) -> None:
    """Measure, or refuse where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(1)  # as ranks do
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU, "
            "with a CUDA build of torch"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "small sizes on a CPU"
    title = f"{name}, torch {torch.__version__}"
    show(title, figures(device, options.rounds, options.only), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
