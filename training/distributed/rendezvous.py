"""Find the ranks of one start in a store that still holds the entries of earlier starts.

torchrun's store survives its restarts. gloo keeps its addresses there under names that repeat, so
restarted ranks found those of dead ones and failed, or waited for ever (torch 2.13). Therefore each
start needs a key prefix of its own, on which its ranks agree here.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Protocol, runtime_checkable
from uuid import uuid4

_POLL_INTERVAL_S = 0.05


@runtime_checkable
class Store(Protocol):
    """Store is the used part of torch.distributed's stores; check() does not wait."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        ...

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values and read them in one request."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all of these keys exist."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Write a value if there is none yet (`expected_value` = ""); return the stored value."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """Member is one rank's process, with the type of the device that it trains on.

    `start` distinguishes it from earlier processes of that rank.
    """

    host: str = field(default_factory=socket.gethostname)
    process_id: int = field(default_factory=os.getpid)
    start: str = field(default_factory=lambda: uuid4().hex)
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Members:
    """Members lists one start's processes in rank order, and the prefix of their own keys."""

    prefix: str
    processes: tuple[Member, ...]

    def name(self, rank: int) -> str:
        """Name a rank by its host and process."""
        process = self.processes[rank]
        return f"rank {rank} (host {process.host}, process {process.process_id})"

    def first_difference(self) -> str:
        """Name two ranks that train on devices of two types; return nothing if there are none."""
        types = [process.device for process in self.processes]
        other = next((rank for rank, each in enumerate(types) if each != types[0]), None)
        if other is None:
            return ""
        return f"{self.name(0)} on {types[0]}, {self.name(other)} on {types[other]}"


def rendezvous(
    store: Store, rank: int, world_size: int, time_limit_s: float, device: str = "cpu"
) -> Members:
    """Wait for all ranks of this start; every rank returns the same members.

    Rank 0 chooses the prefix and lists the members once every rank has registered under it. A rank
    that reads the prefix of an earlier start registers there too, but is not in that start's list.
    Raises TimeoutError, which names the ranks that did not come.
    """
    own = Member(device=device)
    if rank == 0:
        store.set("start", own.start)
    deadline = time.monotonic() + time_limit_s
    prefix = ""
    while time.monotonic() < deadline:
        # Register under the latest start's prefix, again whenever a later start appears.
        if store.check(["start"]) and (latest := store.get("start").decode()) != prefix:
            store.set(f"{latest}/member/{rank}", json.dumps(asdict(own)))
            prefix = latest
        # Rank 0 closes the list once all ranks have registered.
        if rank == 0 and store.check(_member_keys(prefix, world_size)):
            registered = [store.get(key).decode() for key in _member_keys(prefix, world_size)]
            store.set(f"{prefix}/members", json.dumps(registered))
        # A closed list without this process is that of an earlier start.
        if prefix and store.check([f"{prefix}/members"]):
            listed = json.loads(store.get(f"{prefix}/members"))
            processes = tuple(Member(**json.loads(member)) for member in listed)
            if processes[rank] == own:
                return Members(prefix, processes)
        time.sleep(_POLL_INTERVAL_S)
    raise TimeoutError(
        f"ranks {_absent_ranks(store, prefix, world_size)} of {world_size} did not come within "
        f"{time_limit_s:g} s: see their logs; if they are only slow to start, raise the time limit"
    )


def _absent_ranks(store: Store, prefix: str, world_size: int) -> list[int]:
    keys = _member_keys(prefix, world_size)
    absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
    # Without rank 0 there is no prefix, or that of an earlier start, whose ranks all registered.
    return absent if prefix and absent else [0]


def _member_keys(prefix: str, world_size: int) -> list[str]:
    return [f"{prefix}/member/{rank}" for rank in range(world_size)]
