"""Decode an utterance to a raw lattice: all senone sequences within a beam of the best one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import kaldi_decoder
import kaldifst
import numpy as np
from jaxtyping import Float32, Integer

from pipeline.shards import Lattice
from training.decoding.graph.hclg import DecodingGraph
from training.sequence_training.lattice_arcs import LatticeArc, add_path, has_path, make_lattice
from training.sequence_training.state_posteriors import StatePosteriors, state_posteriors

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
class LatticeBeams:
    """LatticeBeams, in units of scaled log-likelihood: of the search, and of what it keeps."""

    beam: float
    lattice_beam: float


@dataclass(frozen=True, slots=True)
class ReferencedLattice:
    """ReferencedLattice has the path of its reference, which may have been added."""

    lattice: Lattice
    is_added: bool


def decode_with_reference(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beams: LatticeBeams,
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
    graph: DecodingGraph, scores: Float32[np.ndarray, "frames senones"], beams: LatticeBeams
) -> StatePosteriors:
    """Decode an utterance by scaled log-likelihoods to its lattice's state posteriors.

    Raises LatticeError for an utterance without lattice.
    """
    return state_posteriors(decode_lattice(graph, scores, beams), scores)


def decode_lattice(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beams: LatticeBeams,
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
    lines = [line.split() for line in raw.to_str(show_weight_one=True).splitlines()]
    arcs = list(_arcs(lines))
    final_costs = {int(line[0]): _graph_cost(line[1]) for line in lines if len(line) == 2}
    return make_lattice(arcs, raw.start, final_costs)


def _arcs(lines: list[list[str]]) -> Iterator[LatticeArc]:
    for line in lines:
        if len(line) == 5:
            source, target, label, _, weight = line
            yield LatticeArc(int(source), int(target), int(label), _graph_cost(weight))


def _graph_cost(weight: str) -> float:
    return float(weight.partition(",")[0])
