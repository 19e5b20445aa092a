import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.audit.conservation import names_without

NAMES = st.lists(st.sampled_from([0, 1, 2, 3, 2**53 + 1, 2**63, 2**64 - 1]), max_size=9)


@given(NAMES, NAMES)
def test_names_without_others_are_the_sets_difference(names: list[int], others: list[int]) -> None:
    """Of 64 bits without rounding, from the smallest to the largest, of empty lists too."""
    found = names_without(np.array(names, np.uint64), np.array(others, np.uint64))
    assert found.tolist() == sorted(set(names) - set(others))
