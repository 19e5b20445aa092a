"""Choose the device of a rank: a GPU of its own where its host has one, or the CPU."""

import argparse

import torch

from infra.log_lines import log
from infra.torchrun import launched_local_rank, launched_ranks_per_host
from jobs.cli.command_line import Step
from jobs.cli.device_choice import Gpus, choose_device
from jobs.cli.parser import add_device_argument
from training.distributed.process_group import CPU


def arguments_with_device(step: Step) -> argparse.Namespace:
    """Parse the command line of a step that has no other argument of its own."""
    parser = step.parser()
    add_device_argument(parser)
    return parser.parse_args()


def own_device(choice: str) -> torch.device:
    """Return the device of this process, as `choose_device` does."""
    ranks = launched_local_rank(), launched_ranks_per_host()
    return torch.device(choose_device(choice, *ranks, Gpus.of_host()))


def report_device(name: str, device: torch.device, num_ranks: int = 1) -> None:
    """Print where this process, the first of so many ranks, has its model, on a host with GPUs."""
    if device == CPU and Gpus.of_host().count == 0:
        return
    where = str(device)
    if device.type == "cuda":
        where = f"{where} ({torch.cuda.get_device_name(device)})"
    ranks = "" if num_ranks == 1 else f", rank 0 of {num_ranks}"
    log(f"on {where}{ranks}", name)
