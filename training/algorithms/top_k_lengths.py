"""Compute the lengths of a top-k message from the vector's length, without torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from training.settings.trainers import TopK

WORD_BITS = 32

CHUNK_ELEMENTS = 2**12


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks says where the words of `number` chunks of equal size lie in a message."""

    first_element: int
    number: int
    size: int
    num_kept: int
    first_word: int
    bits: int

    @property
    def low_bits(self) -> int:
        """Return the bits that each index writes as they are."""
        return num_low_bits(self.size, self.num_kept)

    @property
    def code_bits(self) -> int:
        """Return the bits of a code: an index's low bits, a sign and a cell."""
        return self.low_bits + self.bits

    @property
    def num_codes(self) -> int:
        """Return the number of codes, one for each sent element."""
        return self.number * self.num_kept

    @property
    def num_unary_bits(self) -> int:
        """Return the bits of the indices' high parts."""
        return self.number * num_unary_bits(self.size, self.num_kept)

    @property
    def num_words(self) -> list[int]:
        """Return the words of levels, of codes and of unary bits."""
        codes = num_code_words(self.num_codes, self.code_bits)
        return [self.number, codes, num_code_words(self.num_unary_bits, 1)]


def num_message_words(num_elements: int, top_k: TopK) -> int:
    """Return the number of words of every message of so many elements, 4 bytes each."""
    return sum(sum(chunks.num_words) for chunks in chunks_of(num_elements, top_k))


def chunks_of(num_elements: int, top_k: TopK) -> Iterator[Chunks]:
    """Yield the whole chunks together, and then the last, shorter one; none of them is empty."""
    num_whole, rest = divmod(num_elements, CHUNK_ELEMENTS)
    first_element = first_word = 0
    for number, size in ((num_whole, CHUNK_ELEMENTS), (1, rest)):
        if number * size > 0:
            kept = top_k.num_kept(size)
            yield (chunks := Chunks(first_element, number, size, kept, first_word, top_k.bits))
            first_element, first_word = number * size, sum(chunks.num_words)


def num_code_words(num_codes: int, num_bits: int) -> int:
    """Return the number of words that hold so many codes of `num_bits` each."""
    return -(-num_codes * num_bits // WORD_BITS)


def num_low_bits(num_values: int, num_indices: int) -> int:
    """Return the bits that each index writes as they are: log2(n / k), rounded down."""
    return (num_values // num_indices).bit_length() - 1


def num_unary_bits(num_values: int, num_indices: int) -> int:
    """Return the bits of all high parts together: a one for each index, a zero for each step."""
    return num_indices + (num_values - 1 >> num_low_bits(num_values, num_indices))
