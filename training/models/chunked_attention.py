"""Self-attention and convolution that carry the past of an utterance from chunk to chunk."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional


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
        scores = by_head @ keys * by_head.shape[-1] ** -0.5 + self._biases()
        is_key = is_frame.unfold(1, size, self.chunk_frames)[:, :, None, None]
        # Not minus infinity: a chunk of padding alone would give NaN, and its gradient too.
        lowest = torch.finfo(torch.float32).min
        weights = scores.float().masked_fill(~is_key, lowest).softmax(-1).to(values.dtype)
        attended = (weights @ values.mT).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.outputs(attended), known[:, frames.shape[1] :]

    def _biases(self) -> Float[Tensor, "heads chunk window"]:
        """Return the bias of each of a chunk's frames and each key of its window."""
        # Row i has the distances -i, ..: slices of one table, as a gather's gradient would add
        # in any order on a GPU.
        size = self.left_frames + self.chunk_frames
        return self.distance_bias.unfold(1, size, 1).flip(1)


class CausalConvolution(nn.Module):
    """CausalConvolution: each unit's own filter over the last `kernel_frames` frames."""

    def __init__(self, num_units: int, kernel_frames: int) -> None:
        super().__init__()
        self.kernel_frames = kernel_frames
        self.filters = nn.Conv1d(num_units, num_units, kernel_frames, groups=num_units)

    def forward(
        self,
        frames: Float[Tensor, "batch frames units"],
        past: Float[Tensor, "batch before units"],
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
        self,
        frames: Float[Tensor, "batch frames units"],
        past: Float[Tensor, "batch before units"],
    ) -> tuple[Float[Tensor, "batch frames units"], Float[Tensor, "batch before units"]]:
        """Gate, filter, normalize, mix the units; return the past of the frames after these too."""
        gated = functional.glu(self.inputs(frames), dim=-1)
        filtered, after = self.convolution(gated, past)
        return self.outputs(functional.silu(self.norm(filtered))), after
