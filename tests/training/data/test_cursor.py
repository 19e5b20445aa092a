"""Positions: what another number of ranks goes on from."""

from training.data.cursor import DataCursor


def test_other_ranks_take_over_what_is_left() -> None:
    """What each rank made is kept, those out of data no more than they had; then counts are new."""
    cursor = DataCursor(sub_epoch=3).dealt([5, 2])
    for _ in range(4):
        cursor = cursor.stepped()
    assert cursor.num_steps_left == 1
    assert cursor.resumed(2) == cursor
    taken_over = cursor.resumed(3)
    assert taken_over == DataCursor(3, ((4, 2),))
    assert taken_over.resumed(4) == taken_over  # killed before the rest was dealt
    later = taken_over.dealt([1, 0, 0]).stepped().resumed(1)
    assert later == DataCursor(3, ((4, 2), (1, 0, 0)))
    assert later.next_sub_epoch() == DataCursor(4)


def test_a_sub_epoch_that_has_not_begun_is_dealt_to_whoever_comes() -> None:
    """Between sub-epochs nothing is left of the old ranks' plans."""
    assert DataCursor(sub_epoch=2).resumed(7) == DataCursor(sub_epoch=2)
