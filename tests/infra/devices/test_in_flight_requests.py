"""A task's batches between being given and being answered, whatever becomes of the servers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infra.devices.device_client import InFlightRequests, RequestFailure
from infra.devices.messages import Batch, PoolRequest


def filled(count: int, share: int = 1000, size: int = 1) -> InFlightRequests:
    """Return batches of `size` requests each of ten frames, `count` requests in all."""
    in_flight = InFlightRequests(share)
    for first in range(0, count, size):
        numbers = list(range(first, first + size))
        in_flight.add(Batch(numbers, [PoolRequest(10, str(each).encode()) for each in numbers]))
    return in_flight


def take_all(in_flight: InFlightRequests, device: str, num_frames: int = 1000) -> list[list[int]]:
    return [[*batch.numbers] for _, batch in in_flight.next_for(device, num_frames)]


def numbers(in_flight: InFlightRequests, device: str, num_frames: int) -> list[int]:
    return [number for each in take_all(in_flight, device, num_frames) for number in each]


def test_a_device_gets_about_the_frames_that_it_asks_for() -> None:
    """At least one batch, in order, and none twice."""
    in_flight = filled(6)
    assert numbers(in_flight, "a", 1) == [0]
    assert numbers(in_flight, "b", 25) == [1, 2, 3]
    assert numbers(in_flight, "a", 1000) == [4, 5]
    assert numbers(in_flight, "b", 1000) == []
    assert in_flight.num_waiting_frames == 0


def test_a_device_has_no_more_than_its_share() -> None:
    """Until it answers a batch."""
    in_flight = filled(7, share=3)
    sent = in_flight.next_for("a", 1000)
    assert [batch.numbers for _, batch in sent] == [[0], [1], [2]]
    assert not in_flight.has_for("a")
    assert numbers(in_flight, "a", 1000) == []
    assert numbers(in_flight, "b", 1000) == [3, 4, 5]
    assert in_flight.answer("a", sent[1][0], b"one")
    assert in_flight.has_for("a")
    assert numbers(in_flight, "a", 1000) == [6]
    assert not in_flight.has_for("b")


def test_devices_have_equal_parts_of_what_is_not_answered() -> None:
    """At the end none has several batches while another has none; one that has nothing has one."""
    in_flight = filled(8)
    ((first, _),) = in_flight.next_for("a", 10)
    assert numbers(in_flight, "b", 10) == [1]
    assert numbers(in_flight, "a", 1000) == [2, 3, 4]
    assert not in_flight.has_for("a")
    in_flight.answer("a", first, b"zero")
    assert numbers(in_flight, "a", 1000) == [5]
    assert numbers(in_flight, "b", 1000) == [6, 7]
    last = filled(2)
    assert numbers(last, "a", 10) == [0]
    assert numbers(last, "b", 1000) == [1]
    many, parts = filled(40), Counter[str]()
    while many.num_waiting:
        parts.update({each: len(numbers(many, each, 35)) for each in "ab"})
    assert parts == {"a": 20, "b": 20}


def test_what_a_lost_server_had_comes_again_as_it_was() -> None:
    """What waited there is the first again; what it computed is the last, whole, and isolated."""
    in_flight = filled(10, size=2)
    sent = in_flight.next_for("a", 60)
    for number, _ in sent[:2]:
        in_flight.computing("a", number)
    assert not in_flight.answer("a", sent[0][0], b"zero")
    for answer in (b"two", b"three"):
        in_flight.answer("a", sent[1][0], answer)
    in_flight.lose("a", "killed")
    again = [(batch.numbers, batch.num_lost) for _, batch in in_flight.next_for("b", 1000)]
    assert again == [([4, 5], 0), ([6, 7], 0), ([8, 9], 0), ([0, 1], 1)]
    assert (in_flight.take(2), in_flight.take(3)) == (b"two", b"three")
    assert in_flight.take(0) is None


def test_a_batch_that_fails_is_halved_until_a_request_fails_alone() -> None:
    """By its order alone; the other halves are computed."""
    in_flight = filled(4, size=4)
    for batches in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1]]):
        sent = in_flight.next_for("a", 1000)
        assert [batch.numbers for _, batch in sent] == batches
        assert in_flight.fail("a", sent[0][0], "poison") is (batches == [[0], [1]])
    assert in_flight.take(0) == RequestFailure("poison")


def test_an_answer_of_a_server_that_was_given_up_is_ignored() -> None:
    """The batch was sent elsewhere, whose answer counts."""
    in_flight = filled(1)
    ((first, _),) = in_flight.next_for("a", 10)
    in_flight.lose("a", "silent")
    in_flight.answer("a", first, b"late")
    assert in_flight.take(0) is None
    ((second, _),) = in_flight.next_for("b", 10)
    in_flight.answer("b", second, b"right")
    in_flight.answer("b", second, b"twice")
    assert in_flight.take(0) == b"right"
    assert in_flight.take(0) is None


@given(st.data())
def test_each_request_is_answered_once_whatever_is_lost(data: st.DataObject) -> None:
    """In any order of questions, answers, failures and losses on three devices."""
    in_flight = filled(12, size=3)
    sent: dict[str, dict[int, Batch]] = {"a": {}, "b": {}, "c": {}}

    def answer(device: str, number: int) -> None:
        for each in sent[device].pop(number).numbers:
            in_flight.answer(device, number, str(each).encode())

    for _ in range(data.draw(st.integers(0, 60))):
        device = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["ask", "answer", "fail", "lose"])):
            case "ask":
                sent[device].update(in_flight.next_for(device, data.draw(st.integers(1, 40))))
                for number in sent[device]:
                    in_flight.computing(device, number)
            case "answer" if sent[device]:
                answer(device, next(iter(sent[device])))
            case "fail" if sent[device]:
                number, _ = sent[device].popitem()
                in_flight.fail(device, number, "poison")
            case "lose":
                sent[device].clear()
                in_flight.lose(device, "killed")
    sent["d"] = {}
    while in_flight.num_waiting:
        sent["d"].update(in_flight.next_for("d", 1000))
        for number in list(sent["d"]):
            answer("d", number)
    for device, left in sent.items():
        for number in list(left):
            answer(device, number)
    for number in range(12):
        found = in_flight.take(number)
        assert found == str(number).encode() or isinstance(found, RequestFailure)
    assert in_flight.num_frames == 0
    assert in_flight.num_waiting_frames == 0
