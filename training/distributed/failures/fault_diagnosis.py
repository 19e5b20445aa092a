"""Diagnose a failed exchange from the ranks' statuses: name the ranks at fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.distributed.rendezvous import Members


@dataclass(frozen=True, slots=True)
class RankStatus:
    """RankStatus is a rank's answer to a poll: its exchange ("" between two) and for how long.

    `beside` names what its communication threads are in.
    """

    exchange: str
    duration_s: float
    has_left: bool = False
    beside: str = ""


def diagnose(members: Members, statuses: Mapping[int, RankStatus], waited_s: float) -> str:
    """Name the ranks that made an exchange fail after `waited_s` seconds of waiting."""
    ranks = range(len(members.processes))
    if silent := [rank for rank in ranks if rank not in statuses]:
        return f"{_names(members, silent)} did not answer: killed, stopped or stuck"
    if left := [rank for rank in ranks if statuses[rank].has_left]:
        return f"{_names(members, left)} had ended: took fewer steps than the others"
    # A rank is late only if it worked alone for as long as the others waited.
    if late := [rank for rank in ranks if _is_late(statuses[rank], waited_s)]:
        return (
            f"{_names(members, late)} came to no exchange for {waited_s:.0f} s: stuck in its own "
            "work, or slow"
        )
    places = ", ".join(f"rank {rank} {_place(statuses[rank])}" for rank in ranks)
    return f"all ranks answered: {places}"


def _names(members: Members, ranks: Sequence[int]) -> str:
    return ", ".join(map(members.name, ranks))


def _is_late(status: RankStatus, waited_s: float) -> bool:
    # The margin of 10 %: ranks do not leave the previous exchange at the same moment.
    return not status.exchange and waited_s >= 1 and status.duration_s >= 0.9 * waited_s


def _place(status: RankStatus) -> str:
    where = f"in {status.exchange}" if status.exchange else "at work alone"
    beside = f", beside {status.beside}" if status.beside else ""
    return f"{where} for {status.duration_s:.0f} s{beside}"
