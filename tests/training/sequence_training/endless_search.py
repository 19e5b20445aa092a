"""Searches that do not end, or fail, for some utterances; their processes import this file."""

import numpy as np

from training.decode.graph import DecodingGraph
from training.sequence_training.forward_backward import StatePosteriors
from training.sequence_training.lattice_decoder import (
    Beams,
    LatticeError,
    ReferencedLattice,
    decode_posteriors,
    decode_with_reference,
)
from training.settings.decoding import LatticeConfig


def search_without_end(
    graph: DecodingGraph,
    log_likelihoods: np.ndarray,
    config: LatticeConfig,
    reference: np.ndarray,
    unsearchable: np.ndarray,
) -> ReferencedLattice:
    """Decode as usual, unless the reference is the unsearchable one."""
    while np.array_equal(reference, unsearchable):
        pass
    return decode_with_reference(graph, log_likelihoods, config, reference)


def failing_search(
    graph: DecodingGraph, scores: np.ndarray, beams: Beams, unread: int, endless: int
) -> StatePosteriors:
    """Decode as usual, but for utterances of `unread` frames, and of `endless` ones."""
    while len(scores) == endless:
        pass
    if len(scores) == unread:
        raise LatticeError(f"{unread} frames: unread")
    return decode_posteriors(graph, scores, beams)
