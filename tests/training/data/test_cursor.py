"""The data cursor: where another number of ranks resumes."""

from training.data.sub_epochs import DataCursor


def test_other_ranks_take_over_what_is_left() -> None:
    """The cursor keeps what each rank took, at most what it had; the rest is counted again."""
    cursor = DataCursor(sub_epoch=3).sharded([5, 2])
    for _ in range(4):
        cursor = cursor.stepped()
    assert cursor.num_steps_left == 1
    assert cursor.resumed(2) == cursor
    taken_over = cursor.resumed(3)
    assert taken_over == DataCursor(3, ((4, 2),))
    assert taken_over.resumed(4) == taken_over  # killed before the rest was sharded
    later = taken_over.sharded([1, 0, 0]).stepped().resumed(1)
    assert later == DataCursor(3, ((4, 2), (1, 0, 0)))
    assert later.next_sub_epoch() == DataCursor(4)


def test_a_sub_epoch_that_has_not_begun_is_sharded_over_any_ranks() -> None:
    """Between sub-epochs nothing is left of the old ranks' plans."""
    assert DataCursor(sub_epoch=2).resumed(7) == DataCursor(sub_epoch=2)
