"""Add self-loops to a graph, so that a state may emit its senone for any number of frames."""

import math
from collections import defaultdict

import kaldifst

from training.decoding.graph.transducer import (
    EPSILON,
    Arc,
    arcs_of,
    compile_transducer,
    final_costs_of,
)

# A phone lasts 80 ms or so: 2.5 low-rate frames, or 2.7 frames of 10 ms in each of 3 states.
LOOP_PROBABILITY = 0.6


def add_self_loops(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    """Let every input label repeat, at the cost -log(LOOP_PROBABILITY).

    A state is split until all arcs into each part have the same label, which its loop repeats.
    """
    leaving: defaultdict[int, list[Arc]] = defaultdict(list)
    for arc in arcs_of(fst):
        leaving[arc.source].append(arc)
    final_costs = final_costs_of(fst)
    loop_cost, leave_cost = -math.log(LOOP_PROBABILITY), -math.log(1 - LOOP_PROBABILITY)
    # Search from the start over pairs of a state and the label of the arc into it.
    first = (fst.start, EPSILON)
    numbers, todo = {first: 0}, [first]
    arcs: list[Arc] = []
    new_final_costs: dict[int, float] = {}
    while todo:
        state, label = todo.pop()
        source = numbers[state, label]
        cost = leave_cost if label != EPSILON else 0.0
        if label != EPSILON:
            arcs.append(Arc(source, source, label, EPSILON, loop_cost))
        for arc in leaving[state]:
            target = (arc.target, arc.input_label)
            if target not in numbers:
                numbers[target] = len(numbers)
                todo.append(target)
            arcs.append(arc._replace(source=source, target=numbers[target], cost=arc.cost + cost))
        if state in final_costs:
            new_final_costs[source] = final_costs[state] + cost
    looped = compile_transducer(arcs, new_final_costs)
    kaldifst.connect(looped)
    return looped
