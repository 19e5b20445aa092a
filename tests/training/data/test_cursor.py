"""Positions: what another number of ranks goes on from."""

from training.data.cursor import Position


def test_other_ranks_take_over_what_is_left() -> None:
    """What each rank made is kept, those out of data no more than they had; then counts are new."""
    position = Position(visit=3).dealt([5, 2])
    for _ in range(4):
        position = position.stepped()
    assert position.num_steps_left == 1
    assert position.resumed(2) == position
    taken_over = position.resumed(3)
    assert taken_over == Position(3, ((4, 2),))
    assert taken_over.resumed(4) == taken_over  # killed before the rest was dealt
    later = taken_over.dealt([1, 0, 0]).stepped().resumed(1)
    assert later == Position(3, ((4, 2), (1, 0, 0)))
    assert later.next_visit() == Position(4)


def test_a_visit_that_has_not_begun_is_dealt_to_whoever_comes() -> None:
    """Between visits nothing is left of the old ranks' plans."""
    assert Position(visit=2).resumed(7) == Position(visit=2)
