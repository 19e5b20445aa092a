"""Draw small lattices, and enumerate their paths."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from pipeline.shards import Lattice
from training.sequence_training.lattice_paths import LatticeArc, make_lattice
from training.sequence_training.smbr import AlignedLattice

NUM_SENONES = 4


@dataclass(frozen=True)
class Path:
    """Path: its senones, one a frame, and the sum of its arcs' graph costs."""

    senones: tuple[int, ...]
    graph_cost: float


def random_lattice(rng: np.random.Generator, num_frames: int) -> AlignedLattice:
    """Return a lattice with parallel arcs, arcs that read nothing, and a reference of any kind."""
    layers, num_states = [[0]], 1
    arcs: list[LatticeArc] = []

    def arc(source: int, target: int, label: int) -> None:
        arcs.append(LatticeArc(source, target, label, float(np.float32(rng.normal(0, 2)))))

    for frame in range(num_frames + 1):
        here = layers[-1]
        for _ in range(int(rng.integers(0, 3))):  # ways between states of one frame
            new, num_states = num_states, num_states + 1
            arc(int(rng.choice(here)), new, 0)
            here.append(new)
        if frame < num_frames:
            size = int(rng.integers(1, 3))
            layers.append(list(range(num_states, num_states + size)))
            num_states += size
            for target in layers[-1]:
                for source in rng.choice(here, size=int(rng.integers(1, 4))).tolist():
                    arc(source, target, 1 + int(rng.integers(NUM_SENONES)))
    final_costs = {state: float(np.float32(rng.normal())) for state in layers[-1]}
    lattice = make_lattice(arcs, 0, final_costs)
    return AlignedLattice(lattice, rng.integers(NUM_SENONES, size=num_frames))


def paths_of(lattice: Lattice) -> Iterator[Path]:
    """Yield every path, by recursion from the start."""
    leaving: dict[int, list[int]] = {}
    for arc, source in enumerate(lattice.sources.tolist()):
        leaving.setdefault(source, []).append(arc)

    def extend(state: int, senones: tuple[int, ...], cost: float) -> Iterator[Path]:
        if state == lattice.num_states - 1:
            yield Path(senones, cost)
        for arc in leaving.get(state, []):
            label = int(lattice.labels[arc])
            read = (*senones, label - 1) if label else senones
            target = int(lattice.targets[arc])
            yield from extend(target, read, cost + float(lattice.graph_costs[arc]))

    yield from extend(0, (), 0.0)


seeds = st.integers(0, 2**32 - 1)
