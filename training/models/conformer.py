"""A chunked causal Conformer, which takes speech as it arrives, beside the papers' LSTMs.

Conformer blocks (Gulati et al. 2020) with attention to the chunk and a bounded past, convolutions
that see no future, and LayerNorm in the place of BatchNorm, which would mix utterances and padding.
Attention and convolution carry the past of an utterance from chunk to chunk.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from pipeline.filterbank import NUM_INPUTS
from training.settings.models import ConformerConfig


class ChunkedAttention(nn.Module):
    """ChunkedAttention lets frames attend to their chunk, and to `left_frames` before the chunk.

    A chunk's frames see each other, and keys of earlier layers see no further, so that any number
    of layers looks ahead to the end of the chunk and not beyond. Work and memory grow with the
    frames, not with their square. Position is relative: a learned bias a head and distance.
    """

    def __init__(self, num_units: int, num_heads: int, chunk_frames: int, left_frames: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.chunk_frames = chunk_frames
        self.left_frames = left_frames
        self.inputs = nn.Linear(num_units, 3 * num_units)
        self.outputs = nn.Linear(num_units, num_units)
        # A key is left_frames + chunk_frames - 1 before its query at most, chunk_frames - 1 after.
        distances = left_frames + 2 * chunk_frames - 1
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, distances))

    def forward(
        self,
        frames: Float[Tensor, "batch frames units"],
        past: Float[Tensor, "batch left keys_values"],
        is_frame: Bool[Tensor, "batch all_frames"],
    ) -> tuple[Float[Tensor, "batch frames units"], Float[Tensor, "batch left keys_values"]]:
        """Attend within whole chunks; return the outputs, and the past of the frames after them.

        `past` has keys and values; `is_frame` says which of past and frames are no padding.
        """
        size = self.left_frames + self.chunk_frames
        num_units = frames.shape[-1]
        queries, own = self.inputs(frames).split([num_units, 2 * num_units], dim=-1)
        known = torch.cat([past, own], dim=1)
        # A window of keys for each chunk, heads apart: (batch, chunks, heads, units, window).
        windows = known.unfold(1, size, self.chunk_frames)
        batch, num_chunks, heads = len(frames), windows.shape[1], self.num_heads
        keys, values = windows.reshape(batch, num_chunks, 2, heads, -1, size).unbind(2)
        by_head = queries.reshape(batch, num_chunks, self.chunk_frames, heads, -1).transpose(2, 3)
        # Row i of a chunk has the distances -i, ..: slices of one table, as a gather's gradient
        # would add in any order on a GPU.
        biases = self.distance_bias.unfold(1, size, 1).flip(1)
        scores = by_head @ keys * by_head.shape[-1] ** -0.5 + biases
        is_key = is_frame.unfold(1, size, self.chunk_frames)[:, :, None, None]
        # Not minus infinity: a chunk of padding alone would give NaN, and its gradient too.
        lowest = torch.finfo(torch.float32).min
        weights = scores.float().masked_fill(~is_key, lowest).softmax(-1).to(values.dtype)
        attended = (weights @ values.mT).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.outputs(attended), known[:, frames.shape[1] :]


class CausalConvolution(nn.Module):
    """CausalConvolution: each unit's own filter over the last `kernel_frames` frames."""

    def __init__(self, num_units: int, kernel_frames: int) -> None:
        super().__init__()
        self.kernel_frames = kernel_frames
        self.filters = nn.Conv1d(num_units, num_units, kernel_frames, groups=num_units)

    def forward(
        self, frames: Float[Tensor, "batch frames units"], past: Float[Tensor, "batch before units"]
    ) -> tuple[Float[Tensor, "batch frames units"], Float[Tensor, "batch before units"]]:
        """Filter the frames after `past`, `kernel_frames - 1` frames; return the next past too."""
        known = torch.cat([past, frames], dim=1)
        filtered: Tensor = self.filters(known.mT).mT
        return filtered, known[:, frames.shape[1] :]


class GatedConvolution(nn.Module):
    """GatedConvolution: a Conformer's convolution module, without statistics of the minibatch."""

    def __init__(self, num_units: int, kernel_frames: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(num_units, 2 * num_units)
        self.convolution = CausalConvolution(num_units, kernel_frames)
        self.norm = nn.LayerNorm(num_units)
        self.outputs = nn.Linear(num_units, num_units)

    def forward(
        self, frames: Float[Tensor, "batch frames units"], past: Float[Tensor, "batch before units"]
    ) -> tuple[Float[Tensor, "batch frames units"], Float[Tensor, "batch before units"]]:
        """Gate, filter, normalize, mix the units; return the past of the frames after these too."""
        gated = functional.glu(self.inputs(frames), dim=-1)
        filtered, after = self.convolution(gated, past)
        return self.outputs(functional.silu(self.norm(filtered))), after


@dataclass(frozen=True, slots=True)
class BlockState:
    """BlockState holds what a block keeps of the past: keys and values, gated frames."""

    keys_values: Float[Tensor, "batch left keys_values"]
    gated: Float[Tensor, "batch before units"]


@dataclass(frozen=True, slots=True)
class ConformerState:
    """ConformerState: frames of a chunk that is not complete, and the past of all blocks.

    `is_frame` says which frames of the past there were: none before the utterance.
    """

    pending: Float[Tensor, "pending dim"]
    is_frame: Bool[Tensor, "batch left"]
    blocks: tuple[BlockState, ...]


class Conformer(nn.Module):
    """Conformer maps (batch, frames, 192) and lengths to logits, or an utterance's pieces."""

    def __init__(self, config: ConformerConfig, num_senones: int) -> None:
        super().__init__()
        self.config = config
        self.num_senones = num_senones
        self.inputs = nn.Sequential(
            nn.Linear(NUM_INPUTS, config.num_units), nn.Dropout(config.dropout)
        )
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.num_layers))
        self.output = nn.Linear(config.num_units, num_senones)

    def forward(
        self, frames: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return the logits of whole utterances, or of chunks of training as if they were whole."""
        present = torch.arange(frames.shape[1]) < lengths.view(-1, 1)
        is_frame = present.to(frames.device, non_blocking=True)
        logits, _ = self._logits(frames, is_frame, self._start(frames))
        return logits

    def advance(
        self, frames: Float[Tensor, "frames dim"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], ConformerState]:
        """Return the logits of the chunks that these frames complete, and the state after them."""
        before = state if isinstance(state, ConformerState) else self._start(frames[None])
        known = torch.cat([before.pending, frames])
        num_waiting = 0 if is_last else len(known) % self.config.chunk_frames
        num_ready = len(known) - num_waiting
        ready, pending = known[:num_ready], known[num_ready:]
        if num_ready == 0:
            return frames.new_empty(0, self.num_senones), replace(before, pending=pending)
        is_frame = torch.ones(1, num_ready, dtype=torch.bool, device=frames.device)
        logits, after = self._logits(ready[None], is_frame, before)
        return logits[0], replace(after, pending=pending)

    def _start(self, frames: Float[Tensor, "batch frames dim"]) -> ConformerState:
        """Return the state before an utterance, on the device of its frames."""
        batch, config = len(frames), self.config
        block = BlockState(
            frames.new_zeros(batch, config.left_frames, 2 * config.num_units),
            frames.new_zeros(batch, config.kernel_frames - 1, config.num_units),
        )
        no_frame = torch.zeros(batch, config.left_frames, dtype=torch.bool, device=frames.device)
        return ConformerState(frames[0, :0], no_frame, (block,) * config.num_layers)

    def _logits(
        self,
        frames: Float[Tensor, "batch frames dim"],
        present: Bool[Tensor, "batch frames"],
        state: ConformerState,
    ) -> tuple[Float[Tensor, "batch frames senones"], ConformerState]:
        """Compute the logits of frames that begin a chunk, and the state after them."""
        num_frames = frames.shape[1]
        num_padding = -num_frames % self.config.chunk_frames
        hidden = self.inputs(functional.pad(frames, (0, 0, 0, num_padding)))
        is_frame = torch.cat([state.is_frame, functional.pad(present, (0, num_padding))], dim=1)
        after = []
        for block, before in zip(self.blocks, state.blocks, strict=True):
            hidden, kept = block(hidden, before, is_frame)
            after.append(kept)
        past = is_frame[:, num_frames + num_padding :]
        logits = self.output(hidden[:, :num_frames])
        return logits, ConformerState(state.pending, past, tuple(after))


class ConformerBlock(nn.Module):
    """ConformerBlock: attention and convolution between two halves of a feed-forward layer."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        num_units = config.num_units
        self.first = _feed_forward(config)
        self.attention_norm = nn.LayerNorm(num_units)
        self.attention = ChunkedAttention(
            num_units, config.num_heads, config.chunk_frames, config.left_frames
        )
        self.convolution_norm = nn.LayerNorm(num_units)
        self.convolution = GatedConvolution(num_units, config.kernel_frames)
        self.second = _feed_forward(config)
        self.norm = nn.LayerNorm(num_units)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Float[Tensor, "batch frames units"],
        before: BlockState,
        is_frame: Bool[Tensor, "batch all_frames"],
    ) -> tuple[Float[Tensor, "batch frames units"], BlockState]:
        """Return the block's outputs, and what it keeps of the past for the next frames."""
        hidden = hidden + self.first(hidden) / 2
        attended, keys_values = self.attention(
            self.attention_norm(hidden), before.keys_values, is_frame
        )
        hidden = hidden + self.dropout(attended)
        filtered, gated = self.convolution(self.convolution_norm(hidden), before.gated)
        hidden = hidden + self.dropout(filtered)
        hidden = hidden + self.second(hidden) / 2
        return self.norm(hidden), BlockState(keys_values, gated)


def _feed_forward(config: ConformerConfig) -> nn.Sequential:
    inner = config.feed_forward_factor * config.num_units
    return nn.Sequential(
        nn.LayerNorm(config.num_units),
        nn.Linear(config.num_units, inner),
        nn.SiLU(),
        nn.Dropout(config.dropout),
        nn.Linear(inner, config.num_units),
        nn.Dropout(config.dropout),
    )
