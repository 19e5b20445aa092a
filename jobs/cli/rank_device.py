"""Choose the device of a rank: a GPU of its own where its host has one, or the CPU."""

import argparse
import sys
from dataclasses import dataclass

import torch

from infra.configuration import ConfigurationError
from infra.torchrun import launched_local_rank, launched_ranks_per_host
from jobs.cli.command_line import Step
from jobs.cli.parser import AUTO, DEVICE, ON_CPU, add_device_argument
from training.distributed.process_group import CPU


@dataclass(frozen=True, slots=True)
class Gpus:
    """Gpus: the number of GPUs that a process sees, and whether its torch is built to use them."""

    count: int
    is_built: bool

    @classmethod
    def of_host(cls) -> "Gpus":
        """Count those of this host; CUDA_VISIBLE_DEVICES may hide some."""
        is_built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        return cls(torch.cuda.device_count(), is_built)

    def remedy(self) -> str:
        """Say how a host without GPUs may come to one."""
        if not self.is_built:
            return f"install a CUDA build of torch, as {torch.__version__} is built without"
        return "see that nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"


def arguments_with_device(step: Step) -> argparse.Namespace:
    """Parse the command line of a step that has no other argument of its own."""
    parser = step.parser()
    add_device_argument(parser)
    return parser.parse_args()


def choose_device(choice: str, local_rank: int, num_local_ranks: int, gpus: Gpus) -> torch.device:
    """Return the device of one of a host's ranks: GPU `local_rank`, unless `choice` says otherwise.

    Raises ConfigurationError for a GPU that is absent, and for more ranks than GPUs: NCCL takes one
    rank a GPU.
    """
    parsed = DEVICE.fullmatch(choice)
    assert parsed is not None, choice
    if choice == ON_CPU or (choice == AUTO and gpus.count == 0):
        return CPU
    if gpus.count == 0:
        raise ConfigurationError(
            f"--device {choice}: need a GPU, found none: {gpus.remedy()}, or give --device cpu"
        )
    if (number := parsed["number"]) is None:
        _check_ranks(choice, num_local_ranks, gpus.count, "one for each GPU of this host")
        return torch.device("cuda", local_rank)
    if int(number) >= gpus.count:
        raise ConfigurationError(
            f"--device {choice}: need at most cuda:{gpus.count - 1}, the last of {gpus.count} GPUs "
            "of this host: give another number, or --device cpu"
        )
    _check_ranks(choice, num_local_ranks, 1, "or --device cuda, as ranks cannot share a GPU")
    return torch.device("cuda", int(number))


def own_device(choice: str) -> torch.device:
    """Return the device of this process, as `choose_device` does."""
    return choose_device(choice, launched_local_rank(), launched_ranks_per_host(), Gpus.of_host())


def report_device(name: str, device: torch.device, num_ranks: int = 1) -> None:
    """Print where this process, the first of so many ranks, has its model, on a host with GPUs."""
    if device == CPU and Gpus.of_host().count == 0:
        return
    where = str(device)
    if device.type == "cuda":
        where = f"{where} ({torch.cuda.get_device_name(device)})"
    ranks = "" if num_ranks == 1 else f", rank 0 of {num_ranks}"
    print(f"{name}: on {where}{ranks}", file=sys.stderr, flush=True)


def _check_ranks(choice: str, num_ranks: int, most: int, reason: str) -> None:
    if num_ranks > most:
        raise ConfigurationError(
            f"--device {choice}: {num_ranks} ranks on this host: need at most {most}, {reason}: "
            "start fewer ranks, or give --device cpu"
        )
