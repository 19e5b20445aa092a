"""The batches that wait for a device, and which client its server asks, for how many frames."""

from hypothesis import given
from hypothesis import strategies as st

from infra.devices.device_server import Admission, QueuedBatch, RequestQueue
from infra.devices.messages import PoolRequest


def batch(number: int, client: int = 0, num_frames: int = 10) -> QueuedBatch:
    return QueuedBatch(client, number, [PoolRequest(num_frames, b"")])


def test_batches_are_taken_in_their_order_and_as_they_are() -> None:
    """What is put back is the first again; none is merged with another."""
    queue = RequestQueue()
    every = [batch(number) for number in range(3)]
    for each in every:
        queue.put(each)
    assert queue.num_frames == 30
    first = queue.take()
    queue.put_first(first)
    assert [queue.take() for _ in every] == every
    assert queue.num_frames == 0


class Clients:
    """Clients answer each question with requests of one frame as long as they have some."""

    def __init__(self, max_frames: int, has: dict[int, int], batch_frames: int = 1) -> None:
        self.has = has
        self.queued: list[int] = []
        self.questions: list[tuple[int, int]] = []
        self.most = 0
        self.admission = Admission(batch_frames, max_frames, lambda: len(self.queued), self.ask)

    def ask(self, client: int, num_frames: int) -> None:
        self.questions.append((client, num_frames))

    def answer_all(self) -> None:
        while self.questions:
            client, num_frames = self.questions.pop(0)
            given = min(self.has[client], num_frames)
            self.has[client] -= given
            self.queued += [client] * given
            self.most = max(self.most, len(self.queued))
            self.admission.sent(client, self.has[client] > 0)

    def compute(self, num_frames: int) -> list[int]:
        done, self.queued = self.queued[:num_frames], self.queued[num_frames:]
        self.admission.fill()
        return done


@given(
    st.integers(1, 50),
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=200),
)
def test_the_queue_is_bounded_and_everything_comes(
    max_frames: int, has: list[int], computed: list[int]
) -> None:
    """However fast the device is, no more than the bound waits, and all clients are served."""
    clients = Clients(max_frames, dict(enumerate(has)))
    for client in clients.has:
        clients.admission.ready(client)
    clients.answer_all()
    done = 0
    while done < sum(has):
        done += len(clients.compute(computed[done % len(computed)]))
        clients.answer_all()
    assert clients.most <= max_frames


def test_a_client_with_much_keeps_no_other_waiting() -> None:
    """Beside a client with a million requests, one with twenty gets half of the device."""
    clients = Clients(8, {0: 10**6, 1: 20})
    clients.admission.ready(0)
    clients.answer_all()
    clients.admission.ready(1)
    done: list[int] = []
    while clients.has[1] or 1 in clients.queued:
        done += clients.compute(4)
        clients.answer_all()
    assert len(done) <= 8 + 2 * 20 + 8


def test_a_client_is_asked_once_at_a_time() -> None:
    """Saying again that requests wait brings no second question, and no lost one."""
    clients = Clients(8, {0: 3})
    clients.admission.ready(0)
    clients.admission.ready(0)
    assert clients.questions == [(0, 8)]
    clients.answer_all()
    assert clients.questions == []
    clients.has[0] = 1
    clients.admission.ready(0)
    assert clients.questions == [(0, 5)]


def test_a_client_that_is_gone_frees_its_share() -> None:
    """What it was asked for goes to another."""
    clients = Clients(8, {0: 8, 1: 8})
    clients.admission.ready(0)
    clients.admission.ready(1)
    assert clients.questions == [(0, 8)]
    clients.admission.gone(0)
    assert clients.questions == [(0, 8), (1, 8)]


def test_a_client_is_asked_for_a_batch_at_least() -> None:
    """Of three clients that are ready two fill the room; the third is asked when there is more."""
    clients = Clients(8, {0: 8, 1: 8, 2: 8}, batch_frames=4)
    clients.queued = [0] * 8
    for client in clients.has:
        clients.admission.ready(client)
    clients.compute(8)
    assert clients.questions == [(0, 4), (1, 4)]
    clients.answer_all()
    clients.compute(4)
    assert clients.questions == [(2, 4)]
