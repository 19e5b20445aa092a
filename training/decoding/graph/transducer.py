"""Convert weighted transducers to plain arcs and back, between kaldifst's operations."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import kaldifst

EPSILON = 0


class Arc(NamedTuple):
    """Arc is one transition; `cost` is a negative natural log of a probability."""

    source: int
    target: int
    input_label: int
    output_label: int
    cost: float


def compile_transducer(
    arcs: Iterable[Arc], final_costs: Mapping[int, float], start: int = 0
) -> kaldifst.StdVectorFst:
    """Build the transducer with these arcs, sorted by output label for composition."""
    # kaldifst takes the first line's source as the start.
    ordered = sorted(arcs, key=lambda arc: arc.source != start)
    lines = [f"{a.source} {a.target} {a[2]} {a[3]} {a.cost:.6f}" for a in ordered]
    lines += [f"{state} {cost:.6f}" for state, cost in final_costs.items()]
    fst = kaldifst.compile("\n".join(lines) + "\n", acceptor=False)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def arcs_of(fst: kaldifst.StdVectorFst) -> Iterator[Arc]:
    """Yield every arc of a transducer."""
    for state in range(fst.num_states):
        for arc in kaldifst.ArcIterator(fst, state):
            yield Arc(state, arc.nextstate, arc.ilabel, arc.olabel, arc.weight.value)


def final_costs_of(fst: kaldifst.StdVectorFst) -> dict[int, float]:
    """Return the cost of ending in each final state."""
    costs = {state: fst.final(state).value for state in range(fst.num_states)}
    return {state: cost for state, cost in costs.items() if math.isfinite(cost)}


def relabel_inputs(
    fst: kaldifst.StdVectorFst, label: Callable[[int], int]
) -> kaldifst.StdVectorFst:
    """Replace every input label by `label(input_label)`."""
    arcs = [arc._replace(input_label=label(arc.input_label)) for arc in arcs_of(fst)]
    return compile_transducer(arcs, final_costs_of(fst), fst.start)
