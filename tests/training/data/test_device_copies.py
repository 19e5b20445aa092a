"""Minibatches on their way to a device: copied as they are asked for, and not at all to a CPU."""

import threading
import time
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

from tests.training.data.partition_rows import row
from tests.training.data.test_minibatch import segments
from training.data.dataset import MINIBATCHES_AHEAD, device_copies, made_ahead
from training.data.minibatch import BufferFrames, Minibatch

META = torch.device("meta")


class Reader:
    """Reader yields minibatches, and counts them."""

    def __init__(self, soft: bool) -> None:
        self.num_read, self.is_closed, self._soft = 0, False, soft

    def minibatches(self) -> Generator[Minibatch, None, None]:
        frames = BufferFrames.of([row(number, 30, soft=self._soft) for number in range(4)], 0)
        try:
            for number in range(4):
                self.num_read += 1
                yield from frames.minibatches([segments((number, 0, 5))], 1)
        finally:
            self.is_closed = True


def test_a_cpus_minibatches_are_not_copied() -> None:
    """They are the reader's own, which is closed with them."""
    minibatches = Reader(soft=False).minibatches()
    assert device_copies(minibatches, torch.device("cpu")) is minibatches


@pytest.mark.parametrize("soft", [False, True])
def test_a_minibatch_is_copied_but_for_its_lengths(soft: bool) -> None:
    """Features and all targets are on the device, in their types and shapes."""
    expected = list(Reader(soft).minibatches())
    for copied, own in zip(device_copies(Reader(soft).minibatches(), META), expected, strict=True):
        assert torch.equal(copied.lengths, own.lengths)
        assert copied.num_frames == own.num_frames
        assert type(copied.targets) is type(own.targets)
        names = type(own.targets).__dataclass_fields__
        for before, after in [
            (own.features, copied.features),
            *((getattr(own.targets, name), getattr(copied.targets, name)) for name in names),
        ]:
            assert (after.device, after.dtype, after.shape) == (META, before.dtype, before.shape)


def test_reading_is_not_ahead_and_ends_with_the_copies() -> None:
    """A minibatch is read when it is asked for, and closing closes the reader."""
    reader = Reader(soft=False)
    copies = device_copies(reader.minibatches(), META)
    next(copies)
    assert (reader.num_read, reader.is_closed) == (1, False)
    copies.close()
    assert reader.is_closed


def test_minibatches_are_made_ahead_in_a_thread() -> None:
    """In order, to the last one, prepared there; the lengths are the reader's own."""
    threads = set()

    def prepare(values: Tensor) -> Tensor:
        threads.add(threading.current_thread())
        return values + 1

    reader, expected = Reader(soft=False), list(Reader(soft=False).minibatches())
    made = made_ahead(reader.minibatches(), prepare)
    found = [next(made)]
    _wait_until(lambda: reader.num_read == 1 + MINIBATCHES_AHEAD)
    found += made
    for own, each in zip(expected, found, strict=True):
        assert torch.equal(each.features, own.features + 1)
        assert torch.equal(each.lengths, own.lengths)
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert reader.is_closed


def test_closing_ends_what_is_made_ahead() -> None:
    """The reader is closed, once it is no longer read from."""
    reader = Reader(soft=False)
    made = made_ahead(reader.minibatches(), Tensor.clone)
    next(made)
    made.close()
    assert reader.is_closed


def test_an_error_of_the_reader_comes_in_its_turn() -> None:
    """The minibatches before it are trained on first."""

    def failing() -> Generator[Minibatch, None, None]:
        yield from Reader(soft=False).minibatches()
        raise OSError("the store's answer is broken")

    made = made_ahead(failing(), Tensor.clone)
    assert len([next(made) for _ in range(4)]) == 4
    with pytest.raises(OSError, match="answer is broken"):
        next(made)


def _wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)
