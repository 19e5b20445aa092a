"""Decode an utterance to a raw lattice: all senone sequences within a beam of the best one.

A lattice's arcs are trimmed and ordered by level; the path of a reference is added if it is lost.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import kaldi_decoder
import kaldifst
import numpy as np
from jaxtyping import Float32, Integer

from pipeline.shards import Lattice
from training.decode.graph import DecodingGraph
from training.sequence_training.forward_backward import StatePosteriors, state_posteriors
from training.settings.decoding import LatticeConfig, LatticeTargetsConfig

Beams: TypeAlias = LatticeConfig | LatticeTargetsConfig
"""The settings of a search, of which a lattice needs `beam` and `lattice_beam`."""


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


MAX_WIDENINGS = 2
"""The beam is doubled so often, at most, for an utterance of which no path ends a sentence."""

MAX_STATES_TO_WIDEN = 500_000
"""The largest graph, in states, that is searched again with a wider beam, which may keep them all.

The search prunes every 25 frames: some 100 bytes of each state and frame are 1.3 GB.
"""

MAX_ARCS_PER_FRAME = 1000
"""The densest lattice; the paper's have around 10 (003 VII-C3). Each takes 0.74 kB here."""

_OTHER_SENONE_COST = 1e5
_REFERENCE_BEAM = 1e4


class LatticeError(ValueError):
    """LatticeError reports an utterance without a lattice: no path reads it, or too many do."""


@dataclass(frozen=True, slots=True)
class ReferencedLattice:
    """ReferencedLattice has the path of its reference, which may have been added."""

    lattice: Lattice
    is_added: bool


def decode_with_reference(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beams: Beams,
    reference: Integer[np.ndarray, " frames"],
) -> ReferencedLattice:
    """Decode an utterance to a lattice; add the reference's path where the search lost it.

    Raises LatticeError for an utterance without lattice, and if the graph cannot read it.
    """
    lattice = decode_lattice(graph, log_likelihoods, beams)
    if has_path(lattice, reference):
        return ReferencedLattice(lattice, is_added=False)
    cost = reference_cost(graph, reference)
    return ReferencedLattice(add_path(lattice, reference, cost), is_added=True)


def decode_posteriors(
    graph: DecodingGraph, scores: Float32[np.ndarray, "frames senones"], beams: Beams
) -> StatePosteriors:
    """Decode an utterance by scaled log-likelihoods to its lattice's state posteriors.

    Raises LatticeError for an utterance without lattice.
    """
    return state_posteriors(decode_lattice(graph, scores, beams), scores)


def decode_lattice(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beams: Beams,
) -> Lattice:
    """Return the paths within `lattice_beam` of the best, for scaled log-likelihoods.

    Raises LatticeError if no path ends a sentence on the last frame, and if too many do.
    """
    if not np.isfinite(log_likelihoods).all():
        raise ValueError("log-likelihoods are not finite: check the acoustic model's output")
    if not len(log_likelihoods):
        raise LatticeError("0 frames: too short for one low-rate frame")
    may_widen = graph.fst.num_states <= MAX_STATES_TO_WIDEN
    for widening in range(MAX_WIDENINGS + 1 if may_widen else 1):
        config = kaldi_decoder.LatticeSimpleDecoderConfig(
            beam=beams.beam * 2**widening,
            lattice_beam=beams.lattice_beam,
            # The paths are needed as they are: determinizing would keep one for each sentence.
            determinize_lattice=False,
        )
        search = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
        search.decode(kaldi_decoder.DecodableCtc(log_likelihoods))
        # Without a final state, kaldi-decoder would take all states of the last frame for final.
        if math.isfinite(search.final_relative_cost()):
            found, raw = search.get_raw_lattice()
            assert found, "a search that ended has a lattice"
            check_density(sum(map(raw.num_arcs, range(raw.num_states))), len(log_likelihoods))
            return _from_kaldi(raw)
    raise LatticeError(
        f"{len(log_likelihoods)} frames: no path within a beam of {config.beam:g} ends a sentence"
    )


def check_density(num_arcs: int, num_frames: int) -> None:
    """Raise LatticeError for more arcs than memory has room for, before they are copied."""
    if num_arcs > MAX_ARCS_PER_FRAME * num_frames:
        raise LatticeError(
            f"{num_frames} frames: a lattice of {num_arcs} arcs: need at most {MAX_ARCS_PER_FRAME} "
            "a frame: lower sequence_training.lattices.lattice_beam"
        )


def reference_cost(graph: DecodingGraph, senones: Integer[np.ndarray, " frames"]) -> float:
    """Return the least graph cost of a path that reads exactly these senones.

    Raises LatticeError if the graph has none.
    """
    # Other senones cost more than the beam allows, so only the reference's paths survive.
    scores = np.full((len(senones), graph.num_senones), -_OTHER_SENONE_COST, np.float32)
    scores[np.arange(len(senones)), senones] = 0
    options = kaldi_decoder.FasterDecoderOptions(
        beam=_REFERENCE_BEAM, max_active=np.iinfo(np.int32).max
    )
    search = kaldi_decoder.FasterDecoder(graph.fst, options)
    search.decode(kaldi_decoder.DecodableCtc(scores))
    found, path = search.get_best_path()
    if found and search.reached_final():
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        if np.array_equal(np.asarray(labels) - 1, senones):
            return float(weight.value1)
    raise LatticeError(f"{len(senones)} frames: the graph has no path with the aligned senones")


def _from_kaldi(raw: kaldifst.Lattice) -> Lattice:
    """Convert a raw lattice by way of its text, as kaldifst has no iterator over its arcs.

    Costs have six digits there. Acoustic costs are left out: the network gives them again.
    """
    arcs, final_costs = [], {}
    for line in raw.to_str(show_weight_one=True).splitlines():
        *places, weight = line.split()
        graph_cost = float(weight.partition(",")[0])
        if len(places) == 4:
            source, target, label, _ = map(int, places)
            arcs.append(LatticeArc(source, target, label, graph_cost))
        elif len(places) == 1:
            final_costs[int(places[0])] = graph_cost
    return make_lattice(arcs, raw.start, final_costs)
