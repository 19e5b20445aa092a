"""A search that fails for utterances of some lengths; its process imports this file."""

import numpy as np

from training.decode.graph import DecodingGraph
from training.sequence_training.forward_backward import StatePosteriors
from training.sequence_training.lattice_decoder import (
    Beams,
    LatticeError,
    decode_posteriors,
)


def failing_search(
    graph: DecodingGraph, scores: np.ndarray, beams: Beams, unread: int, endless: int
) -> StatePosteriors:
    """Decode as usual, but for utterances of `unread` frames, and of `endless` ones."""
    while len(scores) == endless:
        pass
    if len(scores) == unread:
        raise LatticeError(f"{unread} frames: unread")
    return decode_posteriors(graph, scores, beams)
