"""Settings of the architectures that a recipe can name, and of a user's own factory."""

import json
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from infra.settings import IMPLIED, Range, canonical_json, check_ranges, read_record
from pipeline.filterbank import NUM_BINS
from training.entry_point import FactoryName, Settings, require_not_given

FIRST_BINS, FIRST_STRIDE, SECOND_PLACES = 10, 3, 4
"""Of an LSTM's filters, the first see so many bins, at every third; the second so many of these."""

NUM_FIRST_PLACES = (NUM_BINS - FIRST_BINS) // FIRST_STRIDE + 1
NUM_SECOND_PLACES = NUM_FIRST_PLACES - SECOND_PLACES + 1
"""The places at which each filter has an output: 19 and 16, which cover all 64 bins."""

Normalization: TypeAlias = Literal["labelled", "all"]
"""The speech whose global mean and variance normalize a model's inputs."""


@dataclass(frozen=True, slots=True)
class LstmConfig:
    """LstmConfig: the paper has 5 layers of 768 units, for its teacher the same both ways."""

    num_layers: Annotated[int, Range(1, 100)]
    num_units: Annotated[int, Range(1, 16_384)]
    bidirectional: bool
    # 000 3.2 found three low-rate frames to give the best WERR.
    look_ahead: Annotated[int, Range(0, 1000)]
    dropout: Annotated[float, Range(0, 1, below=True)]
    # 0: the papers' LSTMs, which see the bins themselves
    num_filters: Annotated[int, Range(0, 4096)] = 0
    name: Literal["lstm"] = field(default="lstm", metadata=IMPLIED)

    whole_utterances: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_directions(self.bidirectional, self.look_ahead)

    @property
    def delay(self) -> int:
        """Return by how many frames outputs are late: it sees the look-ahead by waiting for it."""
        return self.look_ahead

    @property
    def ignores_lengths(self) -> bool:
        """Return whether padding cannot reach a frame: only backwards in time it could."""
        return not self.bidirectional


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerConfig:
    """ConformerConfig: by default the size of an LSTM of 2 layers of 256 units, 1.0 M parameters.

    Frames see to the end of their chunk: `chunk_frames` - 1 ahead at most, half of it on average.
    By default `left_frames` and the chunk fit into the 32 frames of the chunks of training.
    """

    name: Literal["conformer"] = "conformer"
    num_layers: Annotated[int, Range(1, 100)] = 4
    num_units: Annotated[int, Range(1, 16_384)] = 128
    num_heads: Annotated[int, Range(1, 1024)] = 4
    feed_forward_factor: Annotated[int, Range(1, 64)] = 2
    kernel_frames: Annotated[int, Range(1, 1000)] = 15
    chunk_frames: Annotated[int, Range(1, 1001)] = 4
    left_frames: Annotated[int, Range(0, 10_000)] = 24
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.1

    bidirectional: ClassVar[bool] = False
    delay: ClassVar[int] = 0
    whole_utterances: ClassVar[bool] = False
    ignores_lengths: ClassVar[bool] = False
    """A chunk's last frames could see padding, so attention masks it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.num_units % self.num_heads:
            raise ValueError(
                f"num_units = {self.num_units}: need a multiple of num_heads = {self.num_heads}"
            )

    @property
    def look_ahead(self) -> int:
        """Return how far a chunk's first frame sees ahead."""
        return self.chunk_frames - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """FeedForwardConfig: layers of one width over a window of frames (004 5, CD-DNN-HMM).

    The window is the frame, `left_frames` before it and `look_ahead` after it; outputs wait for it.
    """

    name: Literal["feed_forward"] = "feed_forward"
    num_layers: Annotated[int, Range(1, 100)]
    num_units: Annotated[int, Range(1, 16_384)]
    unit: Literal["sigmoid", "relu"] = "sigmoid"
    left_frames: Annotated[int, Range(0, 1000)] = 2
    look_ahead: Annotated[int, Range(0, 1000)] = 2

    bidirectional: ClassVar[bool] = False
    whole_utterances: ClassVar[bool] = False
    ignores_lengths: ClassVar[bool] = True
    """Windows end at their output, so that padding after the last frame reaches none."""

    __post_init__ = check_ranges

    @property
    def delay(self) -> int:
        """Return by how many frames outputs are late."""
        return self.look_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedBlstmConfig:
    """ProjectedBlstmConfig: a bidirectional LSTM, and a linear layer before the output (001 5.2).

    Paper 001 has 6 layers of 512 units each way, and projects them to 256.
    """

    name: Literal["projected_blstm"] = "projected_blstm"
    num_layers: Annotated[int, Range(1, 100)]
    num_units: Annotated[int, Range(1, 16_384)]
    num_projected_units: Annotated[int, Range(1, 16_384)]
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.0

    bidirectional: ClassVar[bool] = True
    look_ahead: ClassVar[int] = 0
    delay: ClassVar[int] = 0
    whole_utterances: ClassVar[bool] = False
    ignores_lengths: ClassVar[bool] = False

    __post_init__ = check_ranges


GIVEN_TO_MODELS = ("num_inputs", "num_senones")
"""The arguments that every factory is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryConfig:
    """FactoryConfig: `factory(num_inputs=, num_senones=, **settings)` makes a torch module.

    `module(frames, lengths)` maps normalized frames (batch, frames, 192), and lengths on the host,
    to logits (batch, frames, senones). Logits t speak of frame t - `delay`, and depend on no frame
    more than `look_ahead` after that one; if `bidirectional`, they may depend on every frame. With
    `whole_utterances` it is not trained on chunks.
    """

    name: Literal["factory"] = "factory"
    factory: FactoryName
    look_ahead: Annotated[int, Range(0, 1000)]
    delay: Annotated[int, Range(0, 1000)] = 0
    bidirectional: bool = False
    whole_utterances: bool = False
    settings: Settings = field(default_factory=dict)

    ignores_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_directions(self.bidirectional, self.look_ahead)
        if self.delay > self.look_ahead:
            raise ValueError(
                f"delay = {self.delay}: need at most look_ahead = {self.look_ahead}: a model that "
                "waits longer sees more"
            )
        require_not_given(self.settings, GIVEN_TO_MODELS)

    def __hash__(self) -> int:
        return hash(canonical_json(self))


def _check_directions(bidirectional: bool, look_ahead: int) -> None:
    if bidirectional and look_ahead:
        raise ValueError(
            f"look_ahead = {look_ahead}: need 0 for a bidirectional model, which sees all frames"
        )


ModelConfig: TypeAlias = (
    LstmConfig | ConformerConfig | FeedForwardConfig | ProjectedBlstmConfig | FactoryConfig
)
"""The settings of each architecture; a recipe's `name` chooses, and without one it is an LSTM.

The logits of a frame may change with `look_ahead` later ones, and if `bidirectional` with all
frames. Outputs are `delay` frames late. With `whole_utterances` it cannot be trained on chunks.
If it `ignores_lengths`, its computations are the same whatever lengths a minibatch has.
"""


@dataclass(frozen=True, slots=True)
class _Form:
    form: ModelConfig


def read_form(text: str) -> ModelConfig:
    """Read a model's settings that another process wrote as JSON; ConfigurationError if none."""
    return read_record(_Form, {"form": json.loads(text)}, "model").form


def check_divisible(model: ModelConfig, num_parts: int) -> None:
    """Raise ValueError where a model's units cannot be divided among so many ranks."""
    if not isinstance(model, LstmConfig) or model.bidirectional or model.num_filters:
        raise ValueError(
            f"student: model_parallel_ranks = {num_parts}: need a unidirectional LSTM without "
            "filters in models.student, or 1"
        )
    if model.num_units < num_parts:
        raise ValueError(
            f"student: model_parallel_ranks = {num_parts}: need at most {model.num_units}, "
            "models.student.num_units"
        )
