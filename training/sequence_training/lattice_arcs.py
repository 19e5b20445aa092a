"""Make lattices of arcs: trim them, order them by level, add a path."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from pipeline.shards import Lattice


class LatticeArc(NamedTuple):
    """LatticeArc: label s + 1 reads a frame as senone s, label 0 reads none."""

    source: int
    target: int
    label: int
    graph_cost: float


class _Level(NamedTuple):
    """_Level counts the frames before a state, and the arcs without frame since the last one."""

    frame: int
    depth: int


def make_lattice(
    arcs: Sequence[LatticeArc], start: int, final_costs: Mapping[int, float]
) -> Lattice:
    """Make the lattice of the paths from `start` to final states; other arcs are left out.

    Raises ValueError if no path ends, if paths have different numbers of frames, and for cycles.
    """
    end = 1 + max(max(arc.source, arc.target) for arc in arcs) if arcs else start
    # A path ends in one state, by an arc that reads no frame and has the final state's cost.
    endings = [LatticeArc(state, end, 0, cost) for state, cost in final_costs.items()]
    complete = [*arcs, *endings]
    on_paths = _reached(complete, start) & _reached([_reversed(arc) for arc in complete], end)
    kept = [arc for arc in complete if {arc.source, arc.target} <= on_paths]
    if not kept:
        raise ValueError("no path leads to a final state: need a wider beam")
    return _arranged(kept, _state_levels(kept, start))


def add_path(
    lattice: Lattice, senones: Integer[np.ndarray, " frames"], graph_cost: float
) -> Lattice:
    """Add the path of one senone sequence, with its graph cost, unless the lattice has it."""
    if has_path(lattice, senones):
        return lattice
    columns = (lattice.sources, lattice.targets, lattice.labels, lattice.graph_costs)
    arcs = [LatticeArc(*each) for each in zip(*(c.tolist() for c in columns), strict=True)]
    end, first = lattice.num_states - 1, lattice.num_states
    states = [0, *range(first, first + len(senones))]
    costs = [graph_cost, *[0.0] * len(senones)]
    labels = [*(senones + 1).tolist(), 0]
    arcs += map(LatticeArc, states, [*states[1:], end], labels, costs)
    return _arranged(arcs, _state_levels(arcs, 0))


def has_path(lattice: Lattice, senones: Integer[np.ndarray, " frames"]) -> bool:
    """Return whether a path of the lattice reads exactly these senones."""
    frames = np.repeat(lattice.level_frames, lattice.level_sizes)[lattice.sources]
    labels = lattice.labels
    # The end's frame has no senone; only arcs that read nothing leave its level.
    expected = np.append(senones, -1)[frames] + 1
    matches = (labels == 0) | (labels == expected)
    reached = {0}
    for source, target in zip(
        lattice.sources[matches].tolist(), lattice.targets[matches].tolist(), strict=True
    ):
        if source in reached:  # arcs are sorted by source, so all into it were seen
            reached.add(target)
    return lattice.num_states - 1 in reached


def _reversed(arc: LatticeArc) -> LatticeArc:
    return arc._replace(source=arc.target, target=arc.source)


def _reached(arcs: Sequence[LatticeArc], start: int) -> set[int]:
    targets: defaultdict[int, list[int]] = defaultdict(list)
    for arc in arcs:
        targets[arc.source].append(arc.target)
    reached, todo = {start}, [start]
    while todo:
        new = [target for target in targets[todo.pop()] if target not in reached]
        reached.update(new)
        todo += new
    return reached


def _state_levels(arcs: Sequence[LatticeArc], start: int) -> dict[int, _Level]:
    """Return each state's level: a state comes after all states with an arc into it."""
    leaving: defaultdict[int, list[LatticeArc]] = defaultdict(list)
    num_entering: defaultdict[int, int] = defaultdict(int)
    for arc in arcs:
        leaving[arc.source].append(arc)
        num_entering[arc.target] += 1
    levels, todo = {start: _Level(0, 0)}, [start]
    num_done = 0
    while todo:
        state = todo.pop()
        num_done += 1
        frame, depth = levels[state]
        for arc in leaving[state]:
            level = _Level(frame + 1, 0) if arc.label else _Level(frame, depth + 1)
            known = levels.get(arc.target, level)
            if known.frame != level.frame:
                raise ValueError("paths to one state read different numbers of frames")
            levels[arc.target] = max(known, level)
            num_entering[arc.target] -= 1
            if not num_entering[arc.target]:
                todo.append(arc.target)
    if num_done != len(levels):
        raise ValueError("a cycle of arcs: need paths that end")
    return levels


def _arranged(arcs: Sequence[LatticeArc], levels: Mapping[int, _Level]) -> Lattice:
    """Number the states by level, and sort the arcs."""
    states = sorted(levels, key=lambda state: (levels[state], state))
    numbers = {state: number for number, state in enumerate(states)}
    ordered = sorted(
        arc._replace(source=numbers[arc.source], target=numbers[arc.target]) for arc in arcs
    )
    sizes: defaultdict[_Level, int] = defaultdict(int)
    for state in states:
        sizes[levels[state]] += 1
    return Lattice(
        level_sizes=np.array(list(sizes.values()), np.int32),
        level_frames=np.array([level.frame for level in sizes], np.int32),
        sources=np.array([arc.source for arc in ordered], np.int32),
        targets=np.array([arc.target for arc in ordered], np.int32),
        labels=np.array([arc.label for arc in ordered], np.uint16),
        graph_costs=np.array([arc.graph_cost for arc in ordered], np.float32),
    )
