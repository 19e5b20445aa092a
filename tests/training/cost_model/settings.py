"""Define a network whose seconds are easy to compute by hand, and a rank without own costs."""

from training.cost_model.step_time import (
    Fitted,
    Network,
    RankRates,
    ScalingCalibration,
    ScalingWorkload,
)

NETWORK = Network(
    ranks_per_host=4,
    within_gbps=8.0,
    within_latency_us=0.0,
    between_gbps=0.8,
    connection_gbps=0.4,
    between_latency_us=0.0,
    all_gather="direct",
    all_reduce="ring",
)
"""A byte takes 1 ns within a host, 10 ns over a host's link, and 20 ns over one connection."""

RANK = RankRates(
    frames_per_s=1000.0,
    num_parameters=1_000_000,
    encoded_elements_per_s=1e18,
    decoded_words_per_s=1e18,
)
CALIBRATION = ScalingCalibration("by hand", RANK, NETWORK, Fitted(waiting=0.0, congestion=0.0))
WORKLOAD = ScalingWorkload(num_parameters=1_000_000, minibatch_frames=100, density=1e-2)
