"""Find a task's devices and local folder: those that Spark assigns, or else the host's."""

import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import gettempdir

from infra.settings import AUTO, Devices, shown

_DEVICE_NODES = Path("/dev")
_GPU = "gpu"
"""Spark's name of the resource: spark.task.resource.gpu.amount."""


def task_devices(devices: Devices) -> tuple[str, ...]:
    """Return the GPUs that Spark assigns the running task, or else `devices` of this host.

    "auto" are the GPUs that CUDA shows this process, or its cores if it shows none.
    """
    addresses = _assigned_gpus()
    if addresses is not None:
        return tuple(map(_cuda_device, addresses))
    return _host_devices() if devices == AUTO else tuple(devices)


def local_folder() -> str:
    """Return a folder for a task's temporary files: one of Spark's local directories, if it runs.

    YARN and a site put those on large local disks; /tmp is often a small one. Tasks of a host
    take turns among them by process.
    """
    # Spark sets this for its Python workers, whatever spark.local.dir or LOCAL_DIRS say.
    folders = [each for each in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if each]
    return folders[os.getpid() % len(folders)] if folders else gettempdir()


def _assigned_gpus() -> Sequence[str] | None:
    """Return the addresses of the running task's GPUs; None if Spark assigns none."""
    if "pyspark" not in sys.modules:  # no task of Spark's
        return None
    from pyspark import TaskContext  # noqa: PLC0415 - other tasks need no Spark installed

    context = TaskContext.get()
    assigned = context.resources().get(_GPU) if context is not None else None
    return None if assigned is None else assigned.addresses


def _host_devices() -> tuple[str, ...]:
    nodes = [each.name for each in _DEVICE_NODES.glob("nvidia*")]
    num_gpus = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in nodes)
    if num_gpus and (listed := _visible_gpus()) is not None:
        num_gpus = len(listed)
    if num_gpus:
        return tuple(f"cuda:{number}" for number in range(num_gpus))
    return tuple(f"cpu#{number}" for number in range(len(os.sched_getaffinity(0))))


def _visible_gpus() -> Sequence[str] | None:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in CUDA's order; None if it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    # CUDA ends its list at the first entry that names no GPU.
    names = (each.strip() for each in listed.split(","))
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))


def _cuda_device(address: str) -> str:
    """Return torch's name of a GPU; torch counts those alone that are visible."""
    listed = _visible_gpus()
    if listed is None:
        return f"cuda:{address}"
    if address not in listed:
        remedy = f"need one of CUDA_VISIBLE_DEVICES: {', '.join(listed) or 'none'}"
        raise ValueError(f"Spark assigns GPU {shown(address)}: {remedy}")
    return f"cuda:{listed.index(address)}"
