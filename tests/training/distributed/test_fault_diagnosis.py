"""Diagnose failed exchanges from the ranks' statuses."""

import pytest

from training.distributed.failures import RankStatus, diagnose
from training.distributed.rendezvous import Member, Members

MEMBERS = Members("prefix", tuple(Member(f"host-{rank}", 100 + rank, "") for rank in range(4)))
SUM, ALONE = RankStatus("sum", 300.0), RankStatus("", 2.0)
WAITED_S = 300.0


@pytest.mark.parametrize(
    ("statuses", "fault"),
    [
        ({0: SUM, 2: ALONE, 3: SUM}, "rank 1 (host host-1, process 101) did not answer"),
        ({0: SUM}, "rank 3 (host host-3, process 103) did not answer: killed, stopped or stuck"),
        (
            {0: SUM, 1: RankStatus("", 299.0), 2: ALONE, 3: SUM},
            "rank 1 (host host-1, process 101) cam",
        ),
        (
            {0: SUM, 1: RankStatus("", 0.0, True), 2: SUM},
            "rank 3 (host host-3, process 103) did not",
        ),
        (
            {0: SUM, 1: RankStatus("", 0.0, True), 2: ALONE, 3: SUM},
            "process 101) had ended: took few",
        ),
    ],
)
def test_names_the_ranks_at_fault(statuses: dict[int, RankStatus], fault: str) -> None:
    """Silent ranks come before ranks that left, and those before late ones; busy is not late."""
    found = diagnose(MEMBERS, statuses, WAITED_S)
    assert fault in found
    assert "rank 2" not in found or 2 not in statuses


def test_gives_every_ranks_exchange_if_none_is_at_fault() -> None:
    """Ranks in different exchanges, or an exchange that failed at once: no rank is at fault."""
    statuses = {0: SUM, 1: RankStatus("broadcast", 299.6), 2: ALONE, 3: SUM}
    places = "rank 0 in sum for 300 s, rank 1 in broadcast for 300 s, rank 2 at work alone for 2 s"
    assert places in diagnose(MEMBERS, statuses, WAITED_S)
    at_once = {rank: RankStatus("", 9.0) for rank in range(1, 4)} | {0: RankStatus("sum", 0.001)}
    assert diagnose(MEMBERS, at_once, 0.001).startswith("all ranks answered: rank 0 in sum for 0")


def test_names_all_ranks_that_are_at_fault() -> None:
    """Two that did not answer, each with its host and process."""
    both = "rank 1 (host host-1, process 101), rank 3 (host host-3, process 103) did not answer"
    assert diagnose(MEMBERS, {0: SUM, 2: ALONE}, WAITED_S).startswith(both)


@pytest.mark.parametrize(
    ("waited_s", "alone_s", "is_late"),
    [
        (300.0, 269.9, False),
        (300.0, 270.1, True),
        (10.0, 8.9, False),
        (10.0, 9.0, True),
        (10.0, 9.1, True),
        (1.0, 1.0, True),
        (0.99, 300.0, False),
    ],
)
def test_a_rank_is_late_after_nine_tenths_of_the_wait(
    waited_s: float, alone_s: float, is_late: bool
) -> None:
    """A rank is late if it worked alone for 0.9 of the others' wait, which is at least a second."""
    exchange = RankStatus("sum", waited_s)
    found = diagnose(
        MEMBERS, {0: exchange, 1: RankStatus("", alone_s), 2: exchange, 3: exchange}, waited_s
    )
    late = f"rank 1 (host host-1, process 101) came to no exchange for {waited_s:.0f} s: stuck in"
    assert found.startswith(late if is_late else "all ranks answered: rank 0 in sum for")
