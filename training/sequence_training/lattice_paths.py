"""Make lattices of arcs: trim and order them, add a path, determinize, and share equal states."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Integer

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
    pairs = [(arc.source, arc.target) for arc in complete]
    on_paths = _reached(pairs, start) & _reached([pair[::-1] for pair in pairs], end)
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
    arcs = _arcs_of(lattice)
    end, first = lattice.num_states - 1, lattice.num_states
    states = [0, *range(first, first + len(senones))]
    costs = [graph_cost, *[0.0] * len(senones)]
    labels = [*(senones + 1).tolist(), 0]
    arcs += map(LatticeArc, states, [*states[1:], end], labels, costs)
    return _arranged(arcs, _state_levels(arcs, 0))


def _arcs_of(lattice: Lattice) -> list[LatticeArc]:
    columns = (lattice.sources, lattice.targets, lattice.labels, lattice.graph_costs)
    return [LatticeArc(*each) for each in zip(*(c.tolist() for c in columns), strict=True)]


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


def _reached(arcs: Sequence[tuple[int, int]], start: int) -> set[int]:
    """Return the states that arcs, of a source and a target, lead to from `start`."""
    targets: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in arcs:
        targets[source].append(target)
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
    """Number the states by level, in a level by the first arc into them, and sort the arcs.

    A state that lasts then keeps its place among the others of its level, and so few bytes suffice.
    """
    entering: defaultdict[int, list[LatticeArc]] = defaultdict(list)
    states_of: defaultdict[_Level, list[int]] = defaultdict(list)
    for arc in arcs:
        entering[arc.target].append(arc)
    for state in sorted(levels):
        states_of[levels[state]].append(state)
    numbers: dict[int, int] = {}

    def first_arc(state: int) -> tuple[int, int, float]:
        return min(
            ((numbers[arc.source], arc.label, arc.graph_cost) for arc in entering[state]),
            default=(0, 0, 0.0),
        )

    for level in sorted(states_of):
        for state in sorted(states_of[level], key=first_arc):
            numbers[state] = len(numbers)
    ordered = sorted(
        arc._replace(source=numbers[arc.source], target=numbers[arc.target]) for arc in arcs
    )
    return Lattice(
        level_sizes=np.array([len(states_of[level]) for level in sorted(states_of)], np.int32),
        level_frames=np.array([level.frame for level in sorted(states_of)], np.int32),
        sources=np.array([arc.source for arc in ordered], np.int32),
        targets=np.array([arc.target for arc in ordered], np.int32),
        labels=np.array([arc.label for arc in ordered], np.uint16),
        graph_costs=np.array([arc.graph_cost for arc in ordered], np.float32),
    )


class SearchArc(NamedTuple):
    """SearchArc is an arc of a search: `word` is 0 for none, `cost` has the acoustic cost too."""

    source: int
    target: int
    label: int
    word: int
    graph_cost: float
    cost: float


def search_arcs(raw: np.ndarray) -> list[SearchArc]:
    """Return the arcs (SEARCH_ARC) of a search one by one."""
    costs = raw["graph_cost"].astype(np.float64) + raw["acoustic_cost"]
    columns = raw[["source", "target", "label", "word", "graph_cost"]].tolist()
    return [
        SearchArc._make((*arc, cost)) for arc, cost in zip(columns, costs.tolist(), strict=True)
    ]


_Words: TypeAlias = tuple[int, int]
"""The last two words of a path, 0 for none."""


def determinize(
    raw: np.ndarray, max_steps: int
) -> tuple[list[LatticeArc], Float64[np.ndarray, " arcs"]] | None:
    """Keep one path at most of each sequence of words; return its arcs and how bad each is.

    sMBR then sums over sentences, each with its best alignment, as it does with Kaldi's lattices;
    raw ones have each sentence in all its alignments. A word begins where the best path of it and
    the word before has it begin (word pair approximation, Ortmanns, Ney and Aubert 1997). So the
    search's best path remains; a bad sentence is lost where its words cannot begin so.

    `raw` has the search's arcs (SEARCH_ARC). The start is state 0 of the arcs returned, the end is
    state 1. An arc's cost is that of the best path through it beyond that of the best path of all.
    None if that takes more than `max_steps`, each of an arc and two words before it.
    """
    entering: defaultdict[int, list[SearchArc]] = defaultdict(list)
    for arc in search_arcs(raw):
        entering[arc.target].append(arc)
    start, end = 0, int(raw["target"].max())
    # A node is a state with two words that paths to it end in: the cost of the best of them, and
    # the one arc by which all of them come.
    costs_to: dict[int, dict[_Words, float]] = {start: {(0, 0): 0.0}}
    ways: dict[int, dict[_Words, SearchArc]] = {}
    for state in range(1, end + 1):
        best: dict[_Words, float] = {}
        way: dict[_Words, SearchArc] = {}
        for arc in entering[state]:
            max_steps -= len(costs_to[arc.source])
            if max_steps < 0:
                return None
            arc_cost, word = arc.cost, arc.word
            for words, cost in costs_to[arc.source].items():
                after = (words[1], word) if word else words
                if after not in best or cost + arc_cost < best[after]:
                    best[after], way[after] = cost + arc_cost, arc
        costs_to[state], ways[state] = best, way
    numbers: dict[tuple[int, _Words], int] = {(start, (0, 0)): 0}
    # All nodes of the end are one state of the lattice.
    numbers |= dict.fromkeys(((end, words) for words in costs_to[end]), 1)
    onwards = dict.fromkeys(((end, words) for words in costs_to[end]), 0.0)
    kept, costs = [], []
    by_last_word: dict[int, dict[int, list[_Words]]] = {}
    for state in range(end, 0, -1):
        for words, arc in ways[state].items():
            if (state, words) not in onwards:
                continue  # dead end
            target, onward = numbers[state, words], onwards[state, words] + arc.cost
            for words_before in _before(words, arc, costs_to, by_last_word):
                cost = costs_to[arc.source][words_before]
                source = arc.source, words_before
                onwards[source] = min(onward, onwards.get(source, math.inf))
                number = numbers.setdefault(source, len(numbers))
                kept.append(LatticeArc(number, target, arc.label, arc.graph_cost))
                costs.append(cost + onward)
    return kept, np.array(costs) - min(costs_to[end].values())


def _before(
    words: _Words,
    arc: SearchArc,
    costs_to: Mapping[int, Mapping[_Words, float]],
    by_last_word: dict[int, dict[int, list[_Words]]],
) -> Sequence[_Words]:
    """Return the words of an arc's source that are these after the arc; keeps them by the last."""
    if not arc.word:
        return [words]
    if arc.source not in by_last_word:
        found = by_last_word[arc.source] = defaultdict(list)
        for each in costs_to[arc.source]:
            found[each[1]].append(each)
    return by_last_word[arc.source].get(words[0], [])


_COST_STEP = 2.0**-16
"""Graph costs, in nats, are rounded to multiples of this, so that equal sums are equal."""


def share_states(lattice: Lattice) -> Lattice:
    """Make one state of states with the same ways to them, and of states with the same ways on.

    Each sequence of senones keeps its probability, the sum over its paths; so sMBR's statistics
    stay as they are. Costs move to where paths part.
    """
    arcs = _arcs_of(lattice)
    end = lattice.num_states - 1
    # Backwards in time, the ways to a state are its ways on.
    arcs = _reversed(_with_shared_states(_reversed(arcs), -end, 0))
    arcs = _with_shared_states(arcs, 0, end)
    return _arranged(arcs, _state_levels(arcs, 0))


def _reversed(arcs: Sequence[LatticeArc]) -> list[LatticeArc]:
    return [arc._replace(source=-arc.target, target=-arc.source) for arc in arcs]


def _with_shared_states(arcs: Sequence[LatticeArc], first: int, last: int) -> list[LatticeArc]:
    """Make one state of states with the same ways on; each arc leads to a larger number.

    Of a state's arcs, the cheapest has the cost 0 afterwards: the rest of its cost is in the arcs
    to the state. A state with nothing but an arc that reads no frame becomes that arc's target.
    """
    leaving: defaultdict[int, list[LatticeArc]] = defaultdict(list)
    for arc in arcs:
        leaving[arc.source].append(arc)
    onward, shared, known = {last: 0.0}, {last: last}, dict[object, int]()
    found = []
    for state in sorted(leaving, reverse=True):
        costs: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for arc in leaving[state]:
            costs[arc.label, shared[arc.target]].append(arc.graph_cost + onward[arc.target])
        # Probabilities of arcs side by side add up.
        ways = {way: -float(np.logaddexp.reduce(np.negative(costs[way]))) for way in sorted(costs)}
        onward[state] = 0.0 if state == first else min(ways.values())
        (label, target), *others = ways
        if state != first and not label and not others:
            shared[state] = target
            continue
        steps = [round((cost - onward[state]) / _COST_STEP) for cost in ways.values()]
        # The first state of a kind has the largest number, so that arcs lead to larger ones.
        shared[state] = known.setdefault(tuple(zip(ways, steps, strict=True)), state)
        if shared[state] == state:
            found += [
                LatticeArc(state, target, label, step * _COST_STEP)
                for (label, target), step in zip(ways, steps, strict=True)
            ]
    return found
