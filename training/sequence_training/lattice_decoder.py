"""Decode an utterance to a lattice: the senone sequences within a beam of the best one.

A raw lattice has all of them; a determinized one has one for each sequence of words. The path of a
reference is added if it is lost.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer

from pipeline.shards import Lattice
from training.decode.decoder import FoundLattice
from training.decode.graph import DecodingGraph
from training.decode.rescoring import SecondPass
from training.decode.search import Search, TooManyArcsError
from training.sequence_training.forward_backward import StatePosteriors, state_posteriors
from training.sequence_training.lattice_paths import (
    LatticeArc,
    add_path,
    determinize,
    has_path,
    make_lattice,
    share_states,
)
from training.settings.decoding import LatticeConfig, LatticeTargetsConfig

Beams: TypeAlias = LatticeConfig | LatticeTargetsConfig
"""The settings of a search, of which a lattice needs `beam`, `max_active` and `lattice_beam`."""

MAX_WIDENINGS = 2
"""The beam is doubled at most this often for an utterance of which no path ends a sentence."""

MAX_ARCS_PER_FRAME = 1000
"""The densest lattice; the paper's have around 10 (003 VII-C3). Each takes 0.74 kB here."""

MAX_STEPS_PER_FRAME = 500_000
"""What determinizing may take, in `determinize`'s steps: around ten times the speech's duration."""

_OTHER_SENONE_COST = 1e5
_REFERENCE_BEAM = 1e4


class LatticeError(ValueError):
    """LatticeError reports an utterance without a lattice: no path reads it, or too many do."""


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
        arcs, costs = _determinized(raw, len(log_likelihoods))
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
    """Return the beams of which a density chooses one: multiples of 1/8, and `lattice_beam`."""
    steps = np.arange(1, math.ceil(8 * config.lattice_beam)) / 8
    return np.append(steps, config.lattice_beam)


def arcs_by_beam(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: LatticeConfig,
) -> Int64[np.ndarray, " beams"]:
    """Count the arcs that read a frame in an utterance's determinized lattice at each beam.

    A wider beam has no fewer arcs. Raises LatticeError for an utterance without lattice.
    """
    raw = search_lattice(graph, log_likelihoods, config)
    arcs, costs = _determinized(raw, len(log_likelihoods))
    ordered = np.sort(costs[np.array([arc.label > 0 for arc in arcs])])
    return np.searchsorted(ordered, candidate_beams(config), "right").astype(np.int64)


def _determinized(
    raw: np.ndarray, num_frames: int
) -> tuple[list[LatticeArc], Float64[np.ndarray, " arcs"]]:
    """Determinize the arcs (SEARCH_ARC) of a search, or raise LatticeError if that takes long."""
    found = determinize(raw, MAX_STEPS_PER_FRAME * num_frames)
    if found is None:
        raise LatticeError(
            f"{num_frames} frames: a lattice of {len(raw)} arcs with too many words before them: "
            "lower sequence_training.lattices.lattice_beam"
        )
    return found


def decode_posteriors(
    graph: DecodingGraph,
    scores: Float32[np.ndarray, "frames senones"],
    beams: Beams,
    second_pass: SecondPass,
) -> StatePosteriors:
    """Decode an utterance by scaled log-likelihoods to its rescored lattice's state posteriors.

    Raises LatticeError for an utterance without lattice.
    """
    found = FoundLattice(search_lattice(graph, scores, beams), ends_sentence=True)
    rescored = second_pass.rescored(found, MAX_ARCS_PER_FRAME * len(scores))
    return state_posteriors(_with_all_paths(rescored), scores)


def decode_lattice(
    graph: DecodingGraph, log_likelihoods: Float32[np.ndarray, "frames senones"], beams: Beams
) -> Lattice:
    """Return the paths within `lattice_beam` of the best, for scaled log-likelihoods.

    Raises LatticeError if no path ends a sentence on the last frame, and if too many do.
    """
    return _with_all_paths(search_lattice(graph, log_likelihoods, beams))


def _with_all_paths(raw: np.ndarray) -> Lattice:
    """Make the lattice of all arcs (SEARCH_ARC) of a search."""
    columns = raw[["source", "target", "label", "graph_cost"]].tolist()
    end = int(raw["target"].max())
    arcs = [LatticeArc(*arc) for arc in columns if arc[1] != end]
    final_costs = {source: cost for source, target, _, cost in columns if target == end}
    return make_lattice(arcs, 0, final_costs)


def search_lattice(
    graph: DecodingGraph, log_likelihoods: Float32[np.ndarray, "frames senones"], beams: Beams
) -> np.ndarray:
    """Return the arcs (SEARCH_ARC) of the paths within `lattice_beam` of the best.

    Log-likelihoods are scaled. Raises LatticeError if no path ends a sentence on the last frame,
    and if too many do.
    """
    num_frames = len(log_likelihoods)
    if not num_frames:
        raise LatticeError("0 frames: too short for one low-rate frame")
    for widening in range(MAX_WIDENINGS + 1):
        beam = beams.beam * 2**widening
        search = Search(graph.searchable, beam, beams.max_active, beams.lattice_beam)
        try:
            search.advance(log_likelihoods)
        except TooManyArcsError as error:
            raise LatticeError(f"{num_frames} frames: {error}") from error
        if search.has_complete_path:
            arcs = search.end_lattice()
            check_density(len(arcs), num_frames)
            return arcs
    raise LatticeError(f"{num_frames} frames: no path within a beam of {beam:g} ends a sentence")


def check_density(num_arcs: int, num_frames: int) -> None:
    """Raise LatticeError for more arcs than memory has room for, before they are copied."""
    if num_arcs > MAX_ARCS_PER_FRAME * num_frames:
        raise LatticeError(
            f"{num_frames} frames: a lattice of {num_arcs} arcs: need at most {MAX_ARCS_PER_FRAME} "
            "a frame: lower lattice_beam"
        )


def reference_cost(graph: DecodingGraph, senones: Integer[np.ndarray, " frames"]) -> float:
    """Return the least graph cost of a path that reads exactly these senones.

    Raises LatticeError if the graph has none.
    """
    # Other senones cost more than the beam allows, so only the reference's paths survive.
    scores = np.full((len(senones), graph.num_senones), -_OTHER_SENONE_COST, np.float32)
    scores[np.arange(len(senones)), senones] = 0
    search = Search(graph.searchable, _REFERENCE_BEAM, np.iinfo(np.int32).max)
    search.advance(scores)
    path = search.best_path(ends_sentence=True)
    if path is not None and search.has_complete_path:
        fst = graph.searchable.fst
        arcs = fst.arcs[path]
        labels = arcs["input_label"]
        if np.array_equal(labels[labels > 0] - 1, senones):
            final_cost = fst.states["final_cost"][arcs["target"][-1]]
            return float(arcs["cost"].sum(dtype=np.float64) + final_cost)
    raise LatticeError(f"{len(senones)} frames: the graph has no path with the aligned senones")
