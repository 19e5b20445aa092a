"""A search that does not end for one reference; its process imports this file."""

import numpy as np

from training.decode.graph import DecodingGraph
from training.sequence_training.lattice_decoder import (
    Beams,
    ReferencedLattice,
    decode_with_reference,
)


def search_without_end(
    graph: DecodingGraph,
    log_likelihoods: np.ndarray,
    beams: Beams,
    reference: np.ndarray,
    unsearchable: np.ndarray,
) -> ReferencedLattice:
    """Decode as usual, unless the reference is the unsearchable one."""
    while np.array_equal(reference, unsearchable):
        pass
    return decode_with_reference(graph, log_likelihoods, beams, reference)
