"""A task's requests between being given and being answered, whatever becomes of the servers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infra.devices.in_flight_requests import (
    MAX_LOST_SERVERS,
    InFlightRequests,
    PoolRequest,
    RequestFailure,
)


def filled(count: int, share_frames: int = 10**6) -> InFlightRequests:
    in_flight = InFlightRequests(share_frames)
    for number in range(count):
        in_flight.add(number, PoolRequest(10, str(number).encode()))
    return in_flight


def numbers(in_flight: InFlightRequests, device: str, num_frames: int) -> list[int]:
    return [each.number for each in in_flight.next_for(device, num_frames)]


def test_a_device_gets_about_the_frames_that_it_asks_for() -> None:
    """At least one request, in order, and none twice."""
    in_flight = filled(6)
    assert numbers(in_flight, "a", 1) == [0]
    assert numbers(in_flight, "b", 25) == [1, 2, 3]
    assert numbers(in_flight, "a", 1000) == [4, 5]
    assert numbers(in_flight, "b", 1000) == []
    assert in_flight.num_waiting_frames == 0


def test_a_device_has_no_more_than_its_share() -> None:
    """Until it answers; a share that no request fits holds one."""
    in_flight = filled(7, share_frames=25)
    assert numbers(in_flight, "a", 1000) == [0, 1, 2]
    assert not in_flight.has_for("a")
    assert numbers(in_flight, "a", 1000) == []
    assert numbers(in_flight, "b", 1000) == [3, 4, 5]
    in_flight.answer("a", 1, b"one")
    assert in_flight.has_for("a")
    assert numbers(in_flight, "a", 1000) == [6]
    assert not in_flight.has_for("b")
    alone = filled(2, share_frames=1)
    assert numbers(alone, "a", 1000) == [0]
    assert not alone.has_for("a")


def test_devices_have_equal_parts_of_what_is_not_answered() -> None:
    """At the end none has several batches while another has none; one that has nothing has one."""
    in_flight = filled(8)
    assert numbers(in_flight, "a", 10) == [0]
    assert numbers(in_flight, "b", 10) == [1]
    assert numbers(in_flight, "a", 1000) == [2, 3, 4]
    assert not in_flight.has_for("a")
    in_flight.answer("a", 0, b"zero")
    assert numbers(in_flight, "a", 1000) == [5]
    assert numbers(in_flight, "b", 1000) == [6, 7]
    last = filled(2)
    assert numbers(last, "a", 10) == [0]
    assert numbers(last, "b", 1000) == [1]
    many, parts = filled(40), Counter[str]()
    while many.num_waiting:
        parts.update({each: len(numbers(many, each, 35)) for each in "ab"})
    assert parts == {"a": 20, "b": 20}


def test_what_a_lost_server_had_comes_again() -> None:
    """What waited there is the first again; what it computed is the last, and alone."""
    in_flight = filled(5)
    assert numbers(in_flight, "a", 30) == [0, 1, 2]
    in_flight.computing("a", 0)
    in_flight.computing("a", 1)
    in_flight.answer("a", 1, b"one")
    in_flight.lose("a", "killed")
    again = in_flight.next_for("b", 1000)
    assert [(each.number, each.is_alone) for each in again] == [
        (2, False),
        (3, False),
        (4, False),
        (0, True),
    ]
    assert in_flight.take(1) == b"one"


def test_a_request_fails_that_ends_its_server_three_times() -> None:
    """After two it is sent once more; whatever else the third had is sent again."""
    in_flight = filled(2)
    for lost in range(MAX_LOST_SERVERS):
        assert in_flight.take(0) is None
        assert 0 in numbers(in_flight, "a", 1000)
        in_flight.computing("a", 0)
        in_flight.lose("a", f"reason {lost}")
    assert in_flight.take(0) == RequestFailure("its server ended 3 times, at last: reason 2")
    assert numbers(in_flight, "a", 1000) == [1]


def test_an_answer_of_a_server_that_was_given_up_is_ignored() -> None:
    """The request was sent elsewhere, whose answer counts."""
    in_flight = filled(1)
    numbers(in_flight, "a", 10)
    in_flight.lose("a", "silent")
    in_flight.answer("a", 0, b"late")
    assert in_flight.take(0) is None
    numbers(in_flight, "b", 10)
    in_flight.answer("b", 0, b"right")
    in_flight.answer("b", 0, b"twice")
    assert in_flight.take(0) == b"right"
    assert in_flight.take(0) is None


@given(st.data())
def test_each_request_is_answered_once_whatever_is_lost(data: st.DataObject) -> None:
    """In any order of questions, answers and losses on three devices."""
    in_flight, sent = filled(12), {"a": [], "b": [], "c": []}
    answered: dict[int, object] = {}
    for _ in range(data.draw(st.integers(0, 60))):
        device = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["ask", "answer", "lose"])):
            case "ask":
                sent[device] += numbers(in_flight, device, data.draw(st.integers(1, 40)))
                for number in sent[device]:
                    in_flight.computing(device, number)
            case "answer" if sent[device]:
                number = sent[device].pop(0)
                in_flight.answer(device, number, str(number).encode())
            case "lose":
                sent[device].clear()
                in_flight.lose(device, "killed")
    while rest := numbers(in_flight, "d", 1000):
        for number in rest:
            in_flight.answer("d", number, str(number).encode())
    for device, left in sent.items():
        for number in left:
            in_flight.answer(device, number, str(number).encode())
    for number in range(12):
        answer = in_flight.take(number)
        assert answer == str(number).encode() or isinstance(answer, RequestFailure)
        answered[number] = answer
    assert in_flight.num_frames == 0
    assert in_flight.num_waiting_frames == 0
