"""Measure on a GPU: GTC's messages, and the student's training step.

`python -m tests.benchmarks.gpu [--rounds N] [--json]`, on a machine with a CUDA device. The
kernels' results are first compared with the CPU's, to the bit.
"""

import argparse
import sys

import torch

from tests.benchmarks import gpu_messages, gpu_student
from tests.benchmarks.measure import Figure, show


def figures(device: torch.device, num_rounds: int) -> list[Figure]:
    """Return all figures of the full sizes."""
    return [
        *gpu_messages.figures(gpu_messages.NUM_ELEMENTS, device, num_rounds),
        *gpu_student.figures(gpu_student.STUDENT, device, num_rounds),
    ]


def main(arguments: list[str]) -> None:
    """Measure, or refuse where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU, "
            "with a CUDA build of torch"
        )
    device = torch.device("cuda")
    title = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    show(title, figures(device, options.rounds), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
