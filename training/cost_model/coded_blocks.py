"""Compute the seconds per step of blocks that send the largest parts of their changes.

SparseLoCo (arXiv 2508.15706), and BMUF whose hosts' leaders exchange by top-k.
"""

from training.algorithms.sparsification.message_lengths import num_message_words
from training.configuration.block_codes import TopK
from training.cost_model.exchanges import (
    Placement,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
)
from training.cost_model.step_time import WORD_BYTES, CostModel


def coded_block_seconds(
    model: CostModel, num_ranks: int, block_size: int, code: TopK, *, by_host: bool
) -> float:
    """Return the seconds per step where each rank gathers the coded changes of all, once a block.

    By host the ranks of each host sum their models first, their leaders exchange the coded changes,
    and the new model is broadcast.
    """
    placement, network = model.placed(num_ranks), model.calibration.network
    rates, congestion = model.calibration.rank, model.calibration.fitted.congestion
    num_elements, model_bytes = model.workload.num_parameters, model.workload.model_bytes
    leaders = Placement(placement.num_hosts, 1) if by_host else placement
    num_words = num_message_words(num_elements, code)
    # Every one who gathers decodes all messages, so decoding grows with their number.
    block_end = (
        num_elements / rates.encoded_elements_per_s
        + all_gather_seconds(float(WORD_BYTES * num_words), leaders, network, congestion)
        + leaders.num_ranks * code.density * num_elements / rates.decoded_words_per_s
    )
    if by_host:
        host = Placement(placement.per_host, placement.per_host)
        block_end += all_reduce_seconds(model_bytes, host, network, congestion)
        block_end += broadcast_seconds(model_bytes, host, network)
    return model.computing_seconds + model.waiting_seconds(num_ranks) + block_end / block_size
