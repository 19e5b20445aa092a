"""The settings of the bootstrap alignment and of the tree of senones (paper 003 VII-C2)."""

from dataclasses import dataclass, field
from typing import Annotated

from infra.configuration import LATER
from infra.ranges import Range, check_ranges
from pipeline.kbest import MAX_SENONES


@dataclass(frozen=True)
class BootstrapConfig:
    """BootstrapConfig bounds the iterations, the Gaussians of a state, and the speech in memory.

    Of more than `max_hours`, utterances are drawn evenly from all speakers.
    """

    num_iterations: Annotated[int, Range(1, 1000)] = 12
    max_gaussians: Annotated[int, Range(1, 1024)] = 8
    min_frames_per_gaussian: Annotated[int, Range(1, 1_000_000)] = 40
    # 0.23 GB an hour: the default binds above 4.6 GB, where few earlier runs were.
    max_hours: Annotated[float, Range(1e-3, 100_000, zero="all")] = field(
        default=20.0, metadata=LATER
    )

    __post_init__ = check_ranges


@dataclass(frozen=True)
class TreeConfig:
    """TreeConfig bounds the tree; `min_count` is the least number of 10 ms frames of a leaf."""

    max_senones: Annotated[int, Range(1, MAX_SENONES)]
    min_count: Annotated[int, Range(1, 1_000_000_000)] = 200

    __post_init__ = check_ranges
