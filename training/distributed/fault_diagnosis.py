"""What answers to a failure detector say: who is gone, who does not come, or where everybody is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.distributed.rendezvous import Members


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank was doing when the roll was called: `exchange` is "" while it works alone."""

    exchange: str
    for_s: float
    has_left: bool = False


def find_fault(members: Members, answers: Mapping[int, Answer], waited_s: float) -> str:
    """Name the ranks for whom an exchange failed that had waited for `waited_s` seconds."""
    ranks = range(len(members.processes))
    if silent := [rank for rank in ranks if rank not in answers]:
        return f"{_names(members, silent)} did not answer: killed, stopped or stuck"
    if left := [rank for rank in ranks if answers[rank].has_left]:
        return f"{_names(members, left)} had ended: took fewer steps than the others"
    # Only who has worked alone for as long as others waited is late; the rest is as yet busy.
    if late := [rank for rank in ranks if _is_late(answers[rank], waited_s)]:
        return (
            f"{_names(members, late)} came to no exchange for {waited_s:.0f} s: stuck in its own "
            "work, or slow"
        )
    places = ", ".join(f"rank {rank} {_place(answers[rank])}" for rank in ranks)
    return f"all ranks answered: {places}"


def _names(members: Members, ranks: Sequence[int]) -> str:
    return ", ".join(map(members.name, ranks))


def _is_late(answer: Answer, waited_s: float) -> bool:
    # A tenth: ranks do not come out of the exchange before at the same moment.
    return not answer.exchange and waited_s >= 1 and answer.for_s >= 0.9 * waited_s


def _place(answer: Answer) -> str:
    where = f"in {answer.exchange}" if answer.exchange else "at work alone"
    return f"{where} for {answer.for_s:.0f} s"
