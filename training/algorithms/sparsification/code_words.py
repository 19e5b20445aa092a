"""Pack codes of a few bits each into 32-bit words, one after the other, lowest bit first."""

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from training.algorithms.sparsification.message_lengths import WORD_BITS, num_code_words

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
