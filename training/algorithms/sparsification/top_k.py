"""Send a vector's largest elements in few bits, and keep the rest for later (SparseLoCo).

The vector is cut into chunks of 4096 elements; the last may be shorter. A chunk sends its k
elements of largest magnitude: their indices by `elias_fano`, and for each a sign and a cell of
`bits` - 1 bits. Cells divide the range of the chunk's sent magnitudes evenly, and the receiver
takes a cell's middle. A message is a vector of 32-bit words, whose number is known in advance. For
all chunks of one size it has the middles of their lowest and highest cells, two bfloat16 in a word;
then a code of low index bits, sign and cell for each sent element; then the indices' unary bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from training.algorithms.sparsification.code_words import num_code_words, packed, unpacked
from training.algorithms.sparsification.elias_fano import (
    high_parts,
    num_low_bits,
    num_unary_bits,
    unary_bits,
)
from training.configuration.block_codes import TopK

CHUNK_ELEMENTS = 2**12


@dataclass(frozen=True, slots=True)
class _Chunks:
    """_Chunks says where the words of `number` chunks of equal size lie in a message."""

    first_element: int
    number: int
    size: int
    num_kept: int
    first_word: int
    bits: int

    @property
    def low_bits(self) -> int:
        return num_low_bits(self.size, self.num_kept)

    @property
    def code_bits(self) -> int:
        return self.low_bits + self.bits

    @property
    def num_codes(self) -> int:
        return self.number * self.num_kept

    @property
    def num_unary_bits(self) -> int:
        return self.number * num_unary_bits(self.size, self.num_kept)

    @property
    def num_words(self) -> list[int]:
        codes = num_code_words(self.num_codes, self.code_bits)
        return [self.number, codes, num_code_words(self.num_unary_bits, 1)]

    def view(self, vector: Float[Tensor, " elements"]) -> Float[Tensor, "chunks size"]:
        """Return the chunks of a vector as rows, without copying."""
        return vector[self.first_element :][: self.number * self.size].view(-1, self.size)

    def parts(self, message: Int32[Tensor, " words"]) -> Sequence[Int32[Tensor, " part"]]:
        """Return the chunks' levels, codes and unary bits in a message, without copying."""
        own = message[self.first_word :][: sum(self.num_words)]
        return own.split_with_sizes(self.num_words)


def num_message_words(num_elements: int, top_k: TopK) -> int:
    """Return the number of words of every message of so many elements, 4 bytes each."""
    return sum(sum(chunks.num_words) for chunks in _chunks(num_elements, top_k))


def take_message(
    residual: Float[Tensor, " elements"], change: Float[Tensor, " elements"], top_k: TopK
) -> Int32[Tensor, " words"]:
    """Add a change e = beta e + delta; move Q(TopK(e)) from the residual into a message.

    A change that is not finite makes neither message nor residual finite.
    """
    residual.mul_(top_k.error_decay).add_(change)
    words = residual.new_empty(num_message_words(len(residual), top_k), dtype=torch.int32)
    for chunks in _chunks(len(residual), top_k):
        e = chunks.view(residual)
        indices = _largest(e, chunks.num_kept)
        values = e.gather(1, indices)
        levels, cells = _quantized(values.abs(), top_k)
        is_negative = values.signbit()
        # e <- e - Q(TopK(e)), by the values that all receivers compute.
        e.scatter_(1, indices, values - _unquantized(levels, cells, is_negative, top_k))
        low_parts = indices & (1 << chunks.low_bits) - 1
        codes = low_parts << top_k.bits | is_negative.long() << top_k.bits - 1 | cells
        level_words, code_words, unary_words = chunks.parts(words)
        level_words.copy_(levels.to(torch.bfloat16).view(torch.int32).flatten())
        code_words.copy_(packed(codes.flatten(), chunks.code_bits))
        unary_words.copy_(packed(unary_bits(indices, chunks.size).flatten().long(), 1))
    return words


def add_message(
    total: Float[Tensor, " elements"], message: Int32[Tensor, " words"], top_k: TopK
) -> None:
    """Add what a message sends to `total`; ValueError for another length."""
    if len(message) != (num_words := num_message_words(len(total), top_k)):
        raise ValueError(
            f"a message of {len(message)} words: need {num_words} for {len(total)} parameters at "
            f"a density of {top_k.density}: start all ranks with one model and the same settings"
        )
    for chunks in _chunks(len(total), top_k):
        level_words, code_words, unary_words = chunks.parts(message)
        levels = level_words.view(torch.bfloat16).view(-1, 2).to(total.dtype)
        codes = unpacked(code_words, chunks.num_codes, chunks.code_bits).view(chunks.number, -1)
        cells = codes & top_k.num_cells - 1
        is_negative = (codes >> top_k.bits - 1 & 1).bool()
        unary = unpacked(unary_words, chunks.num_unary_bits, 1).view(chunks.number, -1).bool()
        indices = high_parts(unary, chunks.num_kept) << chunks.low_bits | codes >> top_k.bits
        # No index is twice in a chunk, so the order of these sums changes no bit.
        values = _unquantized(levels, cells, is_negative, top_k)
        chunks.view(total).scatter_add_(1, indices, values)


def _chunks(num_elements: int, top_k: TopK) -> Iterator[_Chunks]:
    """Yield the whole chunks together, and then the last, shorter one; none of them is empty."""
    num_whole, rest = divmod(num_elements, CHUNK_ELEMENTS)
    first_element = first_word = 0
    for number, size in ((num_whole, CHUNK_ELEMENTS), (1, rest)):
        if number * size > 0:
            kept = top_k.num_kept(size)
            yield (chunks := _Chunks(first_element, number, size, kept, first_word, top_k.bits))
            first_element, first_word = number * size, sum(chunks.num_words)


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
    """Return the middles of the lowest and highest cells, as sent, and the magnitudes' cells.

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
