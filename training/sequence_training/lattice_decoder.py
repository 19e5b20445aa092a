"""Decode an utterance to a lattice: the senone sequences within a beam of the best one.

A raw lattice has all of them; a determinized one has one for each sequence of words. The path of a
reference is added if it is lost.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import kaldi_decoder
import kaldifst
import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer

from pipeline.shards import Lattice
from training.decode.graph import DecodingGraph
from training.sequence_training.forward_backward import StatePosteriors, state_posteriors
from training.sequence_training.lattice_paths import (
    LatticeArc,
    SearchArc,
    add_path,
    determinize,
    has_path,
    make_lattice,
    share_states,
)
from training.settings.decoding import LatticeConfig, LatticeTargetsConfig

Beams: TypeAlias = LatticeConfig | LatticeTargetsConfig
"""The settings of a search, of which a lattice needs `beam` and `lattice_beam`."""

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
class RawLattice:
    """RawLattice holds the arcs that a search kept; those into `end` have final states' costs."""

    arcs: list[SearchArc]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReferencedLattice:
    """ReferencedLattice has the path of its reference, which may have been added.

    `num_arcs` counts the arcs that read a frame, before the reference was added and states were
    shared: a lattice's density is this over its frames, as Kaldi's lattice-depth has it.
    """

    lattice: Lattice
    num_arcs: int
    is_added: bool


def decode_with_reference(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: LatticeConfig,
    reference: Integer[np.ndarray, " frames"],
) -> ReferencedLattice:
    """Decode an utterance to a lattice; add the reference's path where the search lost it.

    With a density, the lattice is determinized, pruned to `lattice_beam`, and shares its states.
    Raises LatticeError for an utterance without lattice, and if the graph cannot read it.
    """
    raw = search_lattice(graph, log_likelihoods, config)
    if config.density:
        arcs, costs = determinize(raw.arcs, raw.start, raw.end)
        within = np.flatnonzero(costs <= config.lattice_beam).tolist()
        lattice = make_lattice([arcs[number] for number in within], 0, {1: 0.0})
    else:
        lattice = _with_all_paths(raw)
    num_arcs = int(np.count_nonzero(lattice.labels))
    is_added = not has_path(lattice, reference)
    if is_added:
        lattice = add_path(lattice, reference, reference_cost(graph, reference))
    if config.density:
        lattice = share_states(lattice)
    return ReferencedLattice(lattice, num_arcs, is_added)


def candidate_beams(config: LatticeConfig) -> Float64[np.ndarray, " beams"]:
    """Return the beams of which a density chooses one: multiples of 1/8 up to `lattice_beam`."""
    return np.arange(1, math.ceil(8 * config.lattice_beam) + 1) / 8


def arcs_by_beam(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: LatticeConfig,
) -> Int64[np.ndarray, " beams"]:
    """Count the arcs that read a frame in an utterance's determinized lattice at each beam.

    A wider beam has no fewer arcs. Raises LatticeError for an utterance without lattice.
    """
    raw = search_lattice(graph, log_likelihoods, config)
    arcs, costs = determinize(raw.arcs, raw.start, raw.end)
    ordered = np.sort(costs[np.array([arc.label > 0 for arc in arcs])])
    return np.searchsorted(ordered, candidate_beams(config), "right").astype(np.int64)


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
    return _with_all_paths(search_lattice(graph, log_likelihoods, beams))


def _with_all_paths(raw: RawLattice) -> Lattice:
    arcs = [
        LatticeArc(arc.source, arc.target, arc.label, arc.graph_cost)
        for arc in raw.arcs
        if arc.target != raw.end
    ]
    final_costs = {arc.source: arc.graph_cost for arc in raw.arcs if arc.target == raw.end}
    return make_lattice(arcs, raw.start, final_costs)


def search_lattice(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beams: Beams,
) -> RawLattice:
    """Search the paths within `lattice_beam` of the best, for scaled log-likelihoods.

    Raises LatticeError if no path ends a sentence on the last frame, and if too many do.
    """
    if not np.isfinite(log_likelihoods).all():
        raise ValueError("log-likelihoods are not finite: check the acoustic model's output")
    if not len(log_likelihoods):
        raise LatticeError("0 frames: too short for one low-rate frame")
    may_widen = len(graph.fst.states) <= MAX_STATES_TO_WIDEN
    for widening in range(MAX_WIDENINGS + 1 if may_widen else 1):
        config = kaldi_decoder.LatticeSimpleDecoderConfig(
            beam=beams.beam * 2**widening,
            lattice_beam=beams.lattice_beam,
            # kaldi-decoder determinizes nothing: it hands out no determinized lattice.
            determinize_lattice=False,
        )
        search = kaldi_decoder.LatticeSimpleDecoder(graph.kaldi_fst, config)
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
    search = kaldi_decoder.FasterDecoder(graph.kaldi_fst, options)
    search.decode(kaldi_decoder.DecodableCtc(scores))
    found, path = search.get_best_path()
    if found and search.reached_final():
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        if np.array_equal(np.asarray(labels) - 1, senones):
            return float(weight.value1)
    raise LatticeError(f"{len(senones)} frames: the graph has no path with the aligned senones")


def _from_kaldi(raw: kaldifst.Lattice) -> RawLattice:
    """Convert a raw lattice by way of its text, as kaldifst has no iterator over its arcs.

    Costs have six digits there.
    """
    arcs, end = [], raw.num_states
    for line in raw.to_str(show_weight_one=True).splitlines():
        *places, weight = line.split()
        graph_cost, acoustic_cost = map(float, weight.split(","))
        costs = graph_cost, graph_cost + acoustic_cost
        if len(places) == 4:
            source, target, label, word = map(int, places)
            arcs.append(SearchArc(source, target, label, word, *costs))
        elif len(places) == 1:
            arcs.append(SearchArc(int(places[0]), end, 0, 0, *costs))
    return RawLattice(arcs, raw.start, end)
