"""Settings of the pipeline's steps: selection, features, targets, partitions (paper 003 IV-B).

Recipes hold these records where no step runs, so this module imports neither NumPy nor Arrow.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from infra.settings import Items, Range, Seed, Text, check_ranges, plain
from pipeline.filterbank import SAMPLE_RATE_HZ, Engine
from pipeline.filters import SelectionFilters

Storage = Literal["float16", "uint8"]
"""How features lie in a shard; a cell of uint8 begins with each bin's range, float16 [2 bins]."""

MeanNormalization = Literal["causal", "none"]

Offsets = Literal["one", "all"]
"""Whether an utterance has targets at one of its offsets, or at all three."""

Versions = Literal["own", "clearest"]
"""Whether a model hears each version of an utterance itself, or for all of them the clearest."""

MAX_SENONES = 2**16
"""A senone's id has 16 bits."""

LATTICE_OFFSET = 0
"""The offset of the stacking whose low-rate frames lattices read, as decoding does."""

RATES_HZ = (8_000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000)
MAX_CHANNELS = 8  # of a FLAC


@dataclass(frozen=True, slots=True)
class AudioConversion:
    """AudioConversion: rates that are resampled to 16 kHz, and the channel that is heard.

    `channel` is "only", for files of one channel, "mean", or a channel's number from "0" on.
    """

    sample_rates_hz: Annotated[
        tuple[Annotated[int, Range(RATES_HZ[0], RATES_HZ[-1])], ...], Items(0, len(RATES_HZ))
    ] = ()
    channel: Annotated[str, Text(1, 4, r"only|mean|[0-7]", "mean")] = "only"

    def __post_init__(self) -> None:
        check_ranges(self)
        for rate_hz in self.sample_rates_hz:
            if rate_hz not in RATES_HZ:
                raise ValueError(
                    f"sample_rates_hz: {rate_hz}: need some of {', '.join(map(str, RATES_HZ))}"
                )

    @property
    def max_samples_per_s(self) -> int:
        """Return the most samples of all channels in a second of audio that is accepted."""
        channels = 1 if self.channel == "only" else MAX_CHANNELS
        return channels * max(SAMPLE_RATE_HZ, *self.sample_rates_hz, 0)


NO_CONVERSION = AudioConversion()
ANY_AUDIO = AudioConversion(RATES_HZ, "0")
"""It accepts whatever another conversion may have accepted."""


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """`hours` to select from the unlabelled metadata (0 = all), in files of `file_hours`.

    `filters` are for the unlabelled metadata too; they come before the budget. With `date_folders`
    the folder `date=...` of a metadata object is the day of its records, UTC, so that objects of
    days outside the filters' dates are not read.
    """

    # Fewer hours than 2e-7 round to 0 ms, which selects all.
    hours: Annotated[float, Range(2e-7, 1e9, zero="all")]
    file_hours: Annotated[float, Range(1e-6, 1000)]
    seed: Seed
    filters: SelectionFilters = field(default_factory=SelectionFilters)
    date_folders: bool = False

    __post_init__ = check_ranges

    @property
    def budget_ms(self) -> int:
        """The budget in milliseconds; 0 selects all."""
        return round(self.hours * 3_600_000)


MAY_DIFFER = ("hours", "filters.created_before")
"""The settings of a selection that may differ between an increment and its base."""


@dataclass(frozen=True, slots=True)
class ExtractionConfig:
    """GETs in flight per task, the seed of both levels of the shuffle, engine, storage and mean.

    At most so many GETs: fewer while long utterances are in flight, within 256 MB in all. By
    default audio of another rate than 16 kHz, or of several channels, is quarantined. With the
    mean "none" nothing is subtracted: for an ablation, or where gains never differ.
    """

    gets_in_flight: Annotated[int, Range(1, 64)]
    seed: Seed
    engine: Engine = "fast"
    storage: Storage = "float16"
    conversion: AudioConversion = NO_CONVERSION
    mean: MeanNormalization = "causal"

    __post_init__ = check_ranges


def require_below_k(tail_samples: int, k: int) -> None:
    """Raise ValueError unless `tail_samples` of k columns leave one for the best senone."""
    if not 0 <= tail_samples < k:
        raise ValueError(f"tail_samples = {tail_samples}: need 0..{k - 1}, below k = {k}")


@dataclass(frozen=True, slots=True)
class TargetsConfig:
    """`k` logits a frame; a batch of the teacher has at most `request_frames` low-rate frames.

    The last `tail_samples` of the k are drawn from the senones beyond the best. An utterance has
    targets at one of its offsets, which the seed draws, or at all three. Of one that ingest
    simulated in several placements, the teacher hears each version itself, or the clearest for
    all: the teacher then hears clean speech where the student hears the room.
    """

    k: Annotated[int, Range(1, 255)]
    request_frames: Annotated[int, Range(1, 1_000_000)]
    seed: Seed
    offsets: Offsets = "one"
    versions: Versions = "own"
    tail_samples: Annotated[int, Range(0, 254)] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        require_below_k(self.tail_samples, self.k)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the manifest of the targets states."""
        return dict(plain(self))


@dataclass(frozen=True, slots=True)
class RepartitionConfig:
    """Training partitions of about `partition_hours` (the paper's 2), from groups of G shards."""

    partition_hours: Annotated[float, Range(1e-6, 100)]
    num_source_shards: Annotated[int, Range(1, 10_000)]
    seed: Seed

    __post_init__ = check_ranges
