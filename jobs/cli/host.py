"""Describe the machine and the code of this process, for the record of a job."""

import os
import platform
import re
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_GIT_LIMIT_S = 10


def describe_machine() -> str:
    """Return processor, cores, memory and GPUs, as in "Xeon 8481C, 16 cores, 126 GiB, 1 x H100"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [_processor(), f"{cores} cores", *_memory(), *_gpus()]
    return ", ".join(parts)


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


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory() -> list[str]:
    try:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return []
    return [f"{num_bytes / 2**30:.0f} GiB"]


def _gpus() -> list[str]:
    """Name the GPUs that NVIDIA's driver lists, without loading torch."""
    infos = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        found[1].strip()
        for each in infos
        if (found := re.search(r"^Model:\s*(.+)$", _text(str(each)), re.MULTILINE))
    ]
    return [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
