"""Sub-epochs of supervised training and of scheduled learning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.sub_epochs import scheduled_learning_sub_epochs, supervised_sub_epochs


def test_supervised_training_rotates_offsets_and_ends_on_whole_utterances() -> None:
    """The paper's recipe: ten chunked epochs, two on whole utterances (003 II-B)."""
    sub_epochs = supervised_sub_epochs([0.1] * 12, 10)
    assert [sub_epoch.offset for sub_epoch in sub_epochs] == [0, 1, 2] * 4
    assert [sub_epoch.whole_utterances for sub_epoch in sub_epochs] == [False] * 10 + [True] * 2
    assert all(sub_epoch.labelled and sub_epoch.num_shares == 1 for sub_epoch in sub_epochs)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_each_pass_reads_every_unlabelled_share_once(subs: int, passes: int, shares: int) -> None:
    """Unlabelled and labelled sub-epochs alternate, the labelled ones at the higher rate (V-D)."""
    rates = [1 / (step + 1) for step in range(subs * passes)]
    sub_epochs = scheduled_learning_sub_epochs(rates, subs, 1, 1.2, shares)
    unlabelled, labelled = sub_epochs[::2], sub_epochs[1::2]
    assert [sub_epoch.share for sub_epoch in unlabelled] == list(range(subs)) * passes
    assert not any(sub_epoch.labelled for sub_epoch in unlabelled)
    assert [sub_epoch.learning_rate for sub_epoch in unlabelled] == rates
    for first, second in zip(unlabelled, labelled, strict=True):
        assert second.labelled
        assert second.learning_rate == pytest.approx(1.2 * first.learning_rate)
    assert sub_epochs[-1].whole_utterances


def test_labelled_data_is_read_in_turn_with_the_offset_rotating() -> None:
    """After each sub-epoch another share; a new offset once all shares were read (V-D)."""
    sub_epochs = scheduled_learning_sub_epochs([0.1] * 12, 12, 3, 1.5, 2)
    labelled = sub_epochs[1::2]
    assert [sub_epoch.share for sub_epoch in labelled] == [0, 1] * 6
    assert [sub_epoch.offset for sub_epoch in labelled] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert [sub_epoch.whole_utterances for sub_epoch in sub_epochs] == [False] * 18 + [True] * 6


def test_one_labelled_share_rotates_the_offset_every_sub_epoch() -> None:
    """The papers' form: all labelled data after each sub-epoch, another offset each time."""
    sub_epochs = scheduled_learning_sub_epochs([0.1] * 18, 18, 3, 1.2, 1)
    assert [sub_epoch.offset for sub_epoch in sub_epochs[1::2]] == [0, 1, 2] * 6
    unlabelled = sub_epochs[::2]
    assert [sub_epoch.whole_utterances for sub_epoch in unlabelled] == [False] * 15 + [True] * 3
