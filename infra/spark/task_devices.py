"""Find the devices of a task: those that Spark assigns it, the cluster file's, or the host's."""

import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from infra.ranges import AUTO, Devices, shown

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
