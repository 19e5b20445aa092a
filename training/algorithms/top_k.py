"""Send a vector's largest elements in few bits, and keep the rest for later (SparseLoCo).

The vector is cut into chunks of 4096 elements; the last may be shorter. A chunk sends its k
elements of largest magnitude: their indices, and for each a sign and a cell of `bits` - 1 bits.
Cells divide the range of the chunk's sent magnitudes evenly, and the receiver takes a cell's
midpoint. A message is a vector of 32-bit words, whose number is known in advance. For all chunks of
one size it has the midpoints of their lowest and highest cells, two bfloat16 in a word; then a code
of low index bits, sign and cell for each sent element; then the indices' unary bits.

k ascending indices below n take k (2 + log2(n / k)) bits at most (Elias 1974, Fano 1971). Each is
split: its low bits are written as they are, and its high bits in unary. Index i of high part h is a
one at bit i + h; the zeros between ones count the steps of h. This takes 7 bits an index for 3 % of
4096, half a bit more than any code needs, and its length follows from n and k.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from training.algorithms.top_k_lengths import (
    WORD_BITS,
    Chunks,
    chunks_of,
    num_code_words,
    num_low_bits,
    num_message_words,
    num_unary_bits,
)
from training.settings.trainers import TopK


def take_message(
    residual: Float[Tensor, " elements"], change: Float[Tensor, " elements"], top_k: TopK
) -> Int32[Tensor, " words"]:
    """Add a change e = beta e + delta; move Q(TopK(e)) from the residual into a message.

    A change that is not finite makes neither message nor residual finite.
    """
    residual.mul_(top_k.error_decay).add_(change)
    words = residual.new_empty(num_message_words(len(residual), top_k), dtype=torch.int32)
    for chunks in chunks_of(len(residual), top_k):
        e = _view(chunks, residual)
        indices = _largest(e, chunks.num_kept)
        values = e.gather(1, indices)
        levels, cells = _quantized(values.abs(), top_k)
        is_negative = values.signbit()
        # e <- e - Q(TopK(e)), by the values that all receivers compute.
        e.scatter_(1, indices, values - _unquantized(levels, cells, is_negative, top_k))
        low_parts = indices & (1 << chunks.low_bits) - 1
        codes = low_parts << top_k.bits | is_negative.long() << top_k.bits - 1 | cells
        level_words, code_words, unary_words = _parts(chunks, words)
        level_words.copy_(levels.to(torch.bfloat16).view(torch.int32).flatten())
        code_words.copy_(packed(codes.flatten(), chunks.code_bits))
        unary_words.copy_(packed(unary_bits(indices, chunks.size).flatten().long(), 1))
    return words


def add_message(
    total: Float[Tensor, " elements"], message: Int32[Tensor, " words"], top_k: TopK
) -> None:
    """Add what a message sends to `total`."""
    assert len(message) == num_message_words(len(total), top_k)
    for chunks in chunks_of(len(total), top_k):
        level_words, code_words, unary_words = _parts(chunks, message)
        levels = level_words.view(torch.bfloat16).view(-1, 2).to(total.dtype)
        codes = unpacked(code_words, chunks.num_codes, chunks.code_bits).view(chunks.number, -1)
        cells = codes & top_k.num_cells - 1
        is_negative = (codes >> top_k.bits - 1 & 1).bool()
        unary = unpacked(unary_words, chunks.num_unary_bits, 1).view(chunks.number, -1).bool()
        indices = high_parts(unary, chunks.num_kept) << chunks.low_bits | codes >> top_k.bits
        # No index is twice in a chunk, so the order of these sums changes no bit.
        values = _unquantized(levels, cells, is_negative, top_k)
        _view(chunks, total).scatter_add_(1, indices, values)


def _largest(values: Float[Tensor, "chunks size"], num_kept: int) -> Int64[Tensor, "chunks kept"]:
    """Return each row's indices of largest magnitude, in order; of equal ones the first."""
    magnitudes = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = magnitudes.topk(num_kept, 1, sorted=False).values.amin(1, keepdim=True)
    # topk leaves open which of equal elements it takes, so its choice may change with its version.
    kept, equal = magnitudes > least, magnitudes == least
    num_missing = num_kept - kept.sum(1, keepdim=True, dtype=torch.int32)
    kept |= equal & (equal.cumsum(1, dtype=torch.int32) <= num_missing)
    # Their number is known, so that the host waits for no GPU.
    places = kept.nonzero_static(size=num_kept * len(kept))
    return places[:, 1].view(len(kept), num_kept)


def _quantized(
    magnitudes: Float[Tensor, "chunks kept"], top_k: TopK
) -> tuple[Float[Tensor, "chunks 2"], Int64[Tensor, "chunks kept"]]:
    """Return the midpoints of the lowest and highest cells, rounded as sent, and each cell.

    With 2 bits this leaves 1 to 3 % of the square of what is sent of a block's change; cells that
    divide the range from 0 leave 5 to 10 %.
    """
    least, most = magnitudes.aminmax(dim=1, keepdim=True)
    width = (most - least) / top_k.num_cells
    middles = torch.cat([least + width / 2, most - width / 2], 1)
    cells = ((magnitudes - least) / width).floor().clamp(max=top_k.num_cells - 1)
    # Equal magnitudes have cells of width 0.
    return middles.to(torch.bfloat16).to(magnitudes.dtype), cells.nan_to_num(nan=0.0).long()


def _unquantized(
    levels: Float[Tensor, "chunks 2"],
    cells: Int64[Tensor, "chunks kept"],
    is_negative: Bool[Tensor, "chunks kept"],
    top_k: TopK,
) -> Float[Tensor, "chunks kept"]:
    lowest, highest = levels[:, :1], levels[:, 1:]
    magnitudes = lowest + cells * ((highest - lowest) / (top_k.num_cells - 1))
    return torch.where(is_negative, -magnitudes, magnitudes)


def _view(chunks: Chunks, vector: Float[Tensor, " elements"]) -> Float[Tensor, "chunks size"]:
    """Return the chunks of a vector as rows, without copying."""
    return vector[chunks.first_element :][: chunks.number * chunks.size].view(-1, chunks.size)


def _parts(chunks: Chunks, message: Int32[Tensor, " words"]) -> Sequence[Int32[Tensor, " part"]]:
    """Return the chunks' levels, codes and unary bits in a message, without copying."""
    own = message[chunks.first_word :][: sum(chunks.num_words)]
    return own.split_with_sizes(chunks.num_words)


_LOW_BITS = 2**WORD_BITS - 1


def packed(codes: Int64[Tensor, " codes"], num_bits: int) -> Int32[Tensor, " words"]:
    """Pack codes, each at least 0 and below 2^num_bits; num_bits is 31 at most."""
    first_words, shifts = _places(codes, num_bits)
    shifted = codes << shifts
    # A code may end in the next word. No two codes share a bit, so a sum is a bitwise or.
    words = codes.new_zeros(num_code_words(len(codes), num_bits) + 1)
    words.index_add_(0, first_words, shifted & _LOW_BITS)
    words.index_add_(0, first_words + 1, shifted >> WORD_BITS)
    return words[:-1].view(torch.int32)[::2].contiguous()


def unpacked(
    words: Int32[Tensor, " words"], num_codes: int, num_bits: int
) -> Int64[Tensor, " codes"]:
    """Invert `packed`."""
    first_words, shifts = _places(words.new_empty(num_codes, dtype=torch.int64), num_bits)
    wide = torch.cat([words.long() & _LOW_BITS, words.new_zeros(1, dtype=torch.int64)])
    pairs = wide[first_words] | wide[first_words + 1] << WORD_BITS
    codes: Tensor = pairs >> shifts & (1 << num_bits) - 1
    return codes


def _places(
    codes: Int64[Tensor, " codes"], num_bits: int
) -> tuple[Int64[Tensor, " codes"], Int64[Tensor, " codes"]]:
    """Return each code's first word, and its first bit there."""
    first_bits = num_bits * torch.arange(len(codes), device=codes.device)
    return first_bits // WORD_BITS, first_bits % WORD_BITS


def unary_bits(
    indices: Int64[Tensor, "rows indices"], num_values: int
) -> Bool[Tensor, "rows bits"]:
    """Write the high parts of each row's indices, which ascend."""
    num_rows, num_indices = indices.shape
    places = indices >> num_low_bits(num_values, num_indices)
    places += torch.arange(num_indices, device=indices.device)
    num_bits = num_unary_bits(num_values, num_indices)
    bits = torch.zeros(num_rows, num_bits, dtype=torch.bool, device=indices.device)
    return bits.scatter_(1, places, value=True)


def high_parts(
    bits: Bool[Tensor, "rows bits"], num_indices: int
) -> Int64[Tensor, "rows {num_indices}"]:
    """Invert `unary_bits`: return each row's indices without their low bits."""
    places = bits.nonzero_static(size=num_indices * len(bits))[:, 1].view(-1, num_indices)
    high: Tensor = places - torch.arange(num_indices, device=bits.device)
    return high
