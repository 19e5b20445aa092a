"""Learning rates and visits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.schedule import ExponentialDecay, scheduled_learning_visits, supervised_visits


def test_decay_goes_from_initial_to_final_by_a_constant_factor() -> None:
    """Ratios of successive rates are equal; first and last are as given."""
    decay = ExponentialDecay(0.1, 0.001, 5)
    rates = [decay.learning_rate(epoch) for epoch in range(5)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.001)
    ratios = [after / before for before, after in pairwise(rates)]
    assert ratios == pytest.approx([ratios[0]] * 4)


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.1, 0.2), (-1.0, -2.0)])
def test_rates_that_rise_or_vanish_are_refused(rates: tuple[float, float]) -> None:
    """The message names the bound."""
    with pytest.raises(ValueError, match="0 < final <= initial"):
        ExponentialDecay(*rates, 3)


def test_supervised_training_rotates_offsets_and_ends_on_whole_utterances() -> None:
    """The paper's recipe: ten chunked epochs, two on whole utterances (003 II-B)."""
    visits = supervised_visits(ExponentialDecay(1.0, 0.1, 12), 10, 12)
    assert [visit.offset for visit in visits] == [0, 1, 2] * 4
    assert [visit.whole_utterances for visit in visits] == [False] * 10 + [True] * 2
    assert all(visit.labelled and visit.num_shares == 1 for visit in visits)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_each_pass_visits_every_unlabelled_share_once(subs: int, passes: int, shares: int) -> None:
    """Unlabelled and labelled visits alternate, the labelled ones at the higher rate (V-D)."""
    decay = ExponentialDecay(1.0, 0.5, subs * passes)
    visits = scheduled_learning_visits(decay, subs, passes, 1, 1.2, shares)
    unlabelled, labelled = visits[::2], visits[1::2]
    assert [visit.share for visit in unlabelled] == list(range(subs)) * passes
    assert not any(visit.labelled for visit in unlabelled)
    for first, second in zip(unlabelled, labelled, strict=True):
        assert second.labelled
        assert second.learning_rate == pytest.approx(1.2 * first.learning_rate)
    assert visits[-1].whole_utterances
