"""The settings of the bootstrap alignment and of the tree of senones (paper 003 VII-C2)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from infra.settings import LATER, Range, check_ranges, plain
from pipeline.kbest import MAX_SENONES
from pipeline.placement_versions import Versions
from pipeline.runs.names import UNKNOWN_WORDS_SETTING

UnknownWordsRule = Literal["row", "spn"]
"""Whether an utterance with a word that the lexicon lacks is a ledger row, or the word is noise."""


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


def bootstrap_settings(
    bootstrap: BootstrapConfig, senones: TreeConfig, versions: Versions, rule: UnknownWordsRule
) -> dict[str, Any]:
    """Return what the bootstrap's manifest states; settings that came later, if they are set."""
    settings = {"bootstrap": plain(bootstrap), "senones": plain(senones)}
    settings |= {} if versions == "own" else {"versions": versions}
    return settings | ({} if rule == "row" else {UNKNOWN_WORDS_SETTING: rule})
