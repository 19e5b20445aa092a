"""Describe this host, and choose each rank's device: a GPU of its own, or the CPU.

The descriptions of the machine and of the code's commit go into the record of a job. torch is
imported only where the host may have a GPU.
"""

import os
import platform
import re
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from infra.settings import AUTO, ConfigurationError
from jobs.cli.arguments import DEVICE, ON_CPU

_ROOT = Path(__file__).parents[2]
_GIT_LIMIT_S = 10


def describe_machine() -> str:
    """Return processor, cores, memory and GPUs, as in "Xeon 8481C, 16 cores, 126 GiB, 1 x H100"."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    processor = found[1].strip() if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [processor, f"{cores} cores"]
    with suppress(AttributeError, OSError, ValueError):
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        parts.append(f"{num_bytes / 2**30:.0f} GiB")
    # What NVIDIA's driver lists: loading torch takes seconds.
    listed = map(str, sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")))
    named = [re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE) for path in listed]
    gpus = Counter(each[1].strip() for each in named if each)
    return ", ".join([*parts, *(f"{count} x {model}" for model, count in gpus.items())])


def describe_commit() -> str:
    """Return the commit of a checkout, "-dirty" if files differ; "" for installed code."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_GPU_FILES = ("nvidia*", "nvhost-gpu", "kfd", "dxg")
"""Files in /dev, one of which every driver of a GPU makes that torch can use."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Gpus: the number of GPUs that a process sees, and whether its torch is built to use them."""

    count: int
    is_built: bool

    @classmethod
    def of_host(cls) -> "Gpus":
        """Count those of this host; CUDA_VISIBLE_DEVICES may hide some."""
        import torch  # noqa: PLC0415 - 2 s, which a host without GPUs need not wait for

        is_built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        return cls(torch.cuda.device_count(), is_built)

    def remedy(self) -> str:
        """Say how to make a GPU usable here."""
        if not self.is_built:
            return f"install a CUDA build of torch, as {version('torch')} is built without"
        return "see that nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"


def gpus_for(choice: str) -> Gpus:
    """Count the host's GPUs where a choice of devices depends on them.

    torch is not imported for a choice of the CPU, nor where the host has no file of a GPU.
    """
    is_without = not any(any(Path("/dev").glob(each)) for each in _GPU_FILES)
    if choice == ON_CPU or (choice == AUTO and is_without):
        return Gpus(0, False)
    return Gpus.of_host()


def choose_device(choice: str, local_rank: int, num_local_ranks: int, gpus: Gpus) -> str:
    """Name the device of one of a host's ranks: GPU `local_rank`, unless `choice` says otherwise.

    Raises ConfigurationError for a GPU that is absent, and for more ranks than GPUs: NCCL takes one
    rank a GPU.
    """
    parsed = DEVICE.fullmatch(choice)
    assert parsed is not None, choice
    if choice == ON_CPU or (choice == AUTO and gpus.count == 0):
        return ON_CPU
    if gpus.count == 0:
        raise ConfigurationError(
            f"--device {choice}: need a GPU, found none: {gpus.remedy()}, or give --device cpu"
        )
    if (number := parsed["number"]) is None:
        _check_ranks(choice, num_local_ranks, gpus.count, "one for each GPU of this host")
        return f"cuda:{local_rank}"
    if int(number) >= gpus.count:
        raise ConfigurationError(
            f"--device {choice}: need at most cuda:{gpus.count - 1}, the last of {gpus.count} GPUs "
            "of this host: give another number, or --device cpu"
        )
    _check_ranks(choice, num_local_ranks, 1, "or --device cuda, as ranks cannot share a GPU")
    return f"cuda:{int(number)}"


def _check_ranks(choice: str, num_ranks: int, most: int, reason: str) -> None:
    if num_ranks > most:
        raise ConfigurationError(
            f"--device {choice}: {num_ranks} ranks on this host: need at most {most}, {reason}: "
            "start fewer ranks, or give --device cpu"
        )
