"""Whole-state checkpoints in the store: one object a rank, then one that names them all."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infra.object_store import ObjectStore, join_uri
from training.state import decode_state, encode_state


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints below `uri` of the work that `identity` names; the newest is pointed to last."""

    store: ObjectStore
    uri: str
    identity: str
    rank: int
    world_size: int
    barrier: Callable[[], None]

    def save(self, visit: int, state: dict[str, Any]) -> None:
        """Store this rank's state after `visit`; it counts once every rank's is stored."""
        whole = {**state, "random": torch.get_rng_state()}
        self.store.put(self._rank_uri(visit), encode_state(whole))
        self.barrier()
        if self.rank == 0:
            pointer = {"visit": visit, "world_size": self.world_size, "identity": self.identity}
            self.store.put(self._pointer_uri, json.dumps(pointer).encode())

    def restore(self) -> tuple[int, dict[str, Any] | None]:
        """The next visit and this rank's state; (0, None) if there is none to go on from."""
        if not self.store.exists(self._pointer_uri):
            return 0, None
        pointer = json.loads(self.store.get(self._pointer_uri))
        if pointer["world_size"] != self.world_size:
            raise ValueError(
                f"{self.uri} was written by {pointer['world_size']} ranks, now there are "
                f"{self.world_size}: start as many, or remove the checkpoints to begin again"
            )
        if pointer["identity"] != self.identity:
            raise ValueError(
                f"{self.uri} belongs to another recipe or other inputs: use another --run, "
                "or remove the checkpoints to begin again"
            )
        state = decode_state(self.store.get(self._rank_uri(pointer["visit"])))
        torch.set_rng_state(state.pop("random"))
        return pointer["visit"] + 1, state

    @property
    def _pointer_uri(self) -> str:
        return join_uri(self.uri, "latest.json")

    def _rank_uri(self, visit: int) -> str:
        # Two alternate, so that the one pointed to is never being overwritten.
        return join_uri(self.uri, f"slot-{visit % 2}", f"rank-{self.rank}.npz")
