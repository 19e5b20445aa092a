"""Codes of a few bits come back from their words, which hold nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.algorithms.top_k import packed, unpacked
from training.algorithms.top_k_lengths import num_code_words

WIDTHS = st.integers(1, 31)


@given(WIDTHS.flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(0, 2**w - 1)))))
def test_codes_come_back(case: tuple[int, list[int]]) -> None:
    """Any codes of any width return from as many words as their bits need."""
    num_bits, codes = case
    words = packed(torch.tensor(codes, dtype=torch.int64), num_bits)
    assert words.dtype == torch.int32
    assert len(words) == num_code_words(len(codes), num_bits)
    assert unpacked(words, len(codes), num_bits).tolist() == codes


@given(st.lists(st.integers(0, 2**14 - 1), min_size=1))
def test_bits_follow_one_another(codes: list[int]) -> None:
    """The words are one long binary number, in which code i begins at bit 14 i."""
    words = packed(torch.tensor(codes), 14)
    number = int.from_bytes(words.numpy().astype("<u4").tobytes(), "little")
    assert number == sum(code << 14 * place for place, code in enumerate(codes))


@pytest.mark.parametrize(("num_codes", "num_words"), [(0, 0), (1, 1), (16, 7), (17, 8), (32, 14)])
def test_as_many_words_as_the_bits_need(num_codes: int, num_words: int) -> None:
    """16 codes of 14 bits fill 7 words, one more begins an eighth."""
    assert num_code_words(num_codes, 14) == num_words
    ones = packed(torch.full((num_codes,), 2**14 - 1), 14)
    assert len(ones) == num_words
    assert np.bitwise_count(ones.numpy().view(np.uint32)).sum() == 14 * num_codes
