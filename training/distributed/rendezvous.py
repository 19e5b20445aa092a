"""How ranks meet in a store that remembers the ranks of earlier starts.

torchrun's store survives its restarts. gloo keeps its addresses there under names that repeat, so
that restarted ranks found those of dead ones and failed, or waited for ever (torch 2.13): each
start must use names of its own, on which its ranks agree here.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

_ROUND_S = 0.05


@runtime_checkable
class Store(Protocol):
    """What is used of torch.distributed's stores; check() does not wait."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value, once it is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if there is none yet, `expected_value` being ""; what is there then."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's process; `start` tells it from an earlier one of the same rank."""

    host: str = field(default_factory=socket.gethostname)
    process_id: int = field(default_factory=os.getpid)
    start: str = field(default_factory=lambda: uuid4().hex)


@dataclass(frozen=True, slots=True)
class Members:
    """The processes that met, in rank order, and the prefix that is theirs alone in the store."""

    prefix: str
    processes: tuple[Member, ...]

    def name(self, rank: int) -> str:
        """Call a rank by all that helps to find it."""
        process = self.processes[rank]
        return f"rank {rank} (host {process.host}, process {process.process_id})"


def join(store: Store, rank: int, world_size: int, time_limit_s: float) -> Members:
    """Wait for all ranks of this start; every rank returns the same.

    Rank 0 invents the prefix and closes the list when each rank has signed it. A rank that reads
    the prefix of an earlier start signs that too, but does not find itself in its closed list.
    Raises TimeoutError, which names the ranks that did not come.
    """
    own = Member()
    if rank == 0:
        store.set("start", own.start)
    deadline = time.monotonic() + time_limit_s
    signed = ""
    while time.monotonic() < deadline:
        if store.check(["start"]) and (prefix := store.get("start").decode()) != signed:
            store.set(f"{prefix}/sign/{rank}", json.dumps(asdict(own)))
            signed = prefix
        if rank == 0 and store.check(_signatures(signed, world_size)):
            signatures = [store.get(key).decode() for key in _signatures(signed, world_size)]
            store.set(f"{signed}/closed", json.dumps(signatures))
        if signed and store.check([f"{signed}/closed"]):
            signatures = json.loads(store.get(f"{signed}/closed"))
            processes = tuple(Member(**json.loads(signature)) for signature in signatures)
            if processes[rank] == own:
                return Members(signed, processes)
        time.sleep(_ROUND_S)
    unsigned = [
        r for r, key in enumerate(_signatures(signed, world_size)) if not store.check([key])
    ]
    # Without rank 0 there is no prefix, or that of an earlier start, which may be full.
    absent = unsigned if signed and unsigned else [0]
    raise TimeoutError(
        f"ranks {absent} of {world_size} did not come within {time_limit_s:g} s: see their logs; "
        "where they only start slowly, raise the time limit"
    )


def _signatures(prefix: str, world_size: int) -> list[str]:
    return [f"{prefix}/sign/{rank}" for rank in range(world_size)]
