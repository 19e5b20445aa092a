"""Compute a point of the learning curve: a sub-epoch's means and exchanges, over all ranks."""

from dataclasses import asdict
from typing import Any

import torch

from training.data.sub_epochs import SubEpoch
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.fit.progress import ExchangeTotals
from training.fit.steps import FrameTotals
from training.trainers.trainer import (
    AdPsgdStatistics,
    BmufStatistics,
    GtcStatistics,
    HtmStatistics,
    Statistics,
    density,
)

RESIDUAL_NORMS = ("residual_norm", "stripe_residual_norm", "block_residual_norm")
"""The numbers of a trainer that are norms of what this rank has not sent yet."""


def curve_point(sub_epoch: SubEpoch, result: FrameTotals, group: ProcessGroup) -> dict[str, Any]:
    """Return a point of the learning curve: the sub-epoch's means over all ranks' frames."""
    totals = torch.tensor(
        [result.num_frames, result.cross_entropy, result.num_correct, result.expected_correct],
        dtype=torch.float64,
    )
    collectives.all_reduce_sum(totals, group)
    num_frames, cross_entropy, num_correct, expected_correct = totals.tolist()
    return {
        "labelled": sub_epoch.labelled,
        "learning_rate": sub_epoch.learning_rate,
        "num_ranks": group.size(),
        "num_frames": int(num_frames),
        "cross_entropy": cross_entropy / max(num_frames, 1),
        "frame_accuracy": num_correct / max(num_frames, 1),
        "expected_frame_accuracy": expected_correct / max(num_frames, 1),
    }


def trainer_point(
    exchanged: ExchangeTotals, statistics: Statistics, group: ProcessGroup
) -> dict[str, Any]:
    """Return what the trainer exchanged in a sub-epoch, and its numbers at the sub-epoch's end.

    Bytes are the sum over the ranks, norms of residuals their root mean square, staleness the mean
    and the largest of all ranks.
    """
    norms = [name for name in RESIDUAL_NORMS if hasattr(statistics, name)]
    squares = [getattr(statistics, name) ** 2 for name in norms]
    totals = torch.tensor([*asdict(exchanged).values(), *squares], dtype=torch.float64)
    collectives.all_reduce_sum(totals, group)
    bytes_sent, num_elements, num_elements_sent = totals[:3].tolist()
    point: dict[str, Any] = {"bytes_sent": int(bytes_sent)}
    if isinstance(statistics, GtcStatistics | HtmStatistics):
        point["density"] = density(int(num_elements_sent), int(num_elements))
    means = (totals[3:] / group.size()).sqrt().tolist()
    point |= dict(zip(norms, means, strict=True))
    if isinstance(statistics, BmufStatistics | HtmStatistics):
        point["block_update_norm"] = statistics.block_update_norm
    if isinstance(statistics, AdPsgdStatistics):
        point |= _staleness(statistics, group)
    return point


def _staleness(statistics: AdPsgdStatistics, group: ProcessGroup) -> dict[str, float]:
    mean = torch.tensor([statistics.mean_staleness], dtype=torch.float64)
    collectives.all_reduce_mean(mean, group)
    largest = collectives.maximum(statistics.max_staleness, group)
    return {"mean_staleness": mean.item(), "max_staleness": largest}
