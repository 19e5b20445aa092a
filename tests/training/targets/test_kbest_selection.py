import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.kbest import KBest, select_kbest
from training.targets.teacher_messages import select_on_device

FEW_VALUES = st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.25, 2.0, 2.0000002, 30.0, -90000.0])
LOGITS = st.integers(1, 9).flatmap(
    lambda senones: st.tuples(
        arrays(np.float32, (7, senones), elements=FEW_VALUES), st.integers(1, senones)
    )
)


@given(LOGITS)
def test_selects_what_the_host_does(drawn: tuple[np.ndarray, int]) -> None:
    """Senones and logits to the bit, with many ties; log Z within float16's last place."""
    logits, k = drawn
    expected = select_kbest(logits, k)
    (found,) = select_on_device([torch.from_numpy(logits)], k).on_host()
    assert isinstance(found, KBest)
    np.testing.assert_array_equal(found.senones, expected.senones)
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_allclose(found.log_z, expected.log_z, rtol=1e-3)


def test_utterances_are_selected_in_one_piece() -> None:
    """Each has its own rows, of any length; random logits of 3,183 senones."""
    generator = torch.Generator().manual_seed(0)
    utterances = [torch.randn(length, 3183, generator=generator) * 4 for length in (3, 1, 20)]
    for found, logits in zip(select_on_device(utterances, 20).on_host(), utterances, strict=True):
        expected = select_kbest(logits.numpy(), 20)
        assert isinstance(found, KBest)
        np.testing.assert_array_equal(found.senones, expected.senones)
        np.testing.assert_array_equal(found.logits, expected.logits)
        assert (found.log_z == expected.log_z).mean() > 0.9


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_their_utterances_error(poison: float) -> None:
    """The utterances before and after keep their targets."""
    utterances = [torch.zeros(2, 5), torch.zeros(3, 5), torch.zeros(1, 5)]
    utterances[1][2, 4] = poison
    first, failed, last = select_on_device(utterances, 2).on_host()
    assert isinstance(failed, ValueError)
    assert "NaN or infinity" in str(failed)
    assert [len(each.log_z) for each in (first, last)] == [2, 1]


def test_k_is_at_most_the_senones() -> None:
    """The message names both."""
    with pytest.raises(ValueError, match="k = 6 of 5 senones: need 1 <= k"):
        select_on_device([torch.zeros(2, 5)], 6)
