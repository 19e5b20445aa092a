"""Compute the seconds per step of trainers that exchange beside the gradients' computation.

1-bit SGD with double buffering (paper 004), and the decentralized family (paper 001).
"""

from training.algorithms.one_bit.optimal_ranks import MinibatchCosts
from training.cost_model.exchanges import all_reduce_seconds, neighbours_seconds
from training.cost_model.step_time import CostModel

COMPRESSION = 32.0
"""Bits of a float32 for each that is sent: Z of paper 004 on a link without latency."""

QUANTIZATION_PASSES = 3
"""A rank quantizes all gradients, adds all stripes up and unquantizes all: three passes."""

POSTPROCESSING_PASSES = 3
"""C of 004 eq. (4), over a rank's stripe alone: momentum, AdaGrad's squares and its division."""


def one_bit_costs(model: CostModel, num_ranks: int) -> MinibatchCosts:
    """Return the terms of 004 eq. (4): a step's minibatch is that of all ranks.

    A pass over the gradients is assumed to take as long as one of GTC's encoding. Fewer bits do not
    shorten a link's latency, so Z is what they save of an exchange's seconds.
    """
    workload, calibration = model.workload, model.calibration
    placement, congestion = model.placed(num_ranks), calibration.fitted.congestion
    exchange, quantized = (
        all_reduce_seconds(num_bytes, placement, calibration.network, congestion)
        for num_bytes in (workload.model_bytes, workload.model_bytes / COMPRESSION)
    )
    pass_s = workload.num_parameters / calibration.rank.encoded_elements_per_s
    return MinibatchCosts(
        frame=model.computing_seconds / workload.minibatch_frames,
        postprocessing=POSTPROCESSING_PASSES * pass_s,
        model_update=QUANTIZATION_PASSES * pass_s,
        exchange=exchange,
        compression=exchange / quantized if quantized > 0 else COMPRESSION,
    )


def one_bit_seconds(model: CostModel, num_ranks: int, *, double_buffering: bool) -> float:
    """Return the seconds per step of 1-bit SGD; half a minibatch hides an exchange (004 2.2)."""
    costs = one_bit_costs(model, num_ranks)
    frames = num_ranks * model.workload.minibatch_frames
    if double_buffering:
        seconds = costs.double_buffered_seconds(frames, num_ranks)
    else:
        seconds = costs.seconds(frames, num_ranks)
    return seconds + model.waiting_seconds(num_ranks)


def ring_mixing_seconds(model: CostModel, num_ranks: int, *, permuted: bool) -> float:
    """Return the seconds per step of D-PSGD, or of RAND-PSGD on a permuted ring (001 2, 3).

    A rank waits for two neighbours, and sends each its model while it computes the gradients.
    """
    size = min(num_ranks, 3)
    return max(
        model.computing_seconds + model.waiting_seconds(size),
        neighbours_seconds(
            model.workload.model_bytes,
            model.placed(num_ranks),
            model.calibration.network,
            permuted=permuted,
        ),
    )


def pairwise_mixing_seconds(model: CostModel, num_ranks: int) -> float:
    """Return the seconds per step of AD-PSGD with an exchange a step; no rank waits for others.

    A slower link makes exchanges rarer and no step longer, but what that loses is not measured. So
    a step takes as long as its exchange: half of a permuted ring's bytes.
    """
    workload, network = model.workload, model.calibration.network
    placement = model.placed(num_ranks)
    both = neighbours_seconds(workload.model_bytes, placement, network, permuted=True)
    return max(model.computing_seconds, both / 2)


def delayed_average_seconds(model: CostModel, num_ranks: int) -> float:
    """Return the seconds per step of D1D-PSGD: an all-reduce beside the gradients (001 4)."""
    network, congestion = model.calibration.network, model.calibration.fitted.congestion
    exchange = all_reduce_seconds(
        model.workload.model_bytes, model.placed(num_ranks), network, congestion
    )
    return max(model.computing_seconds + model.waiting_seconds(num_ranks), exchange)
