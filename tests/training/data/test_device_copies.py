"""Minibatches on their way to a device: copied as they are asked for, and not at all to a CPU."""

from collections.abc import Generator

import pytest
import torch

from tests.training.data.partition_rows import row
from tests.training.data.test_minibatch import segments
from training.data.device_copies import device_copies
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
                yield frames.minibatch(segments((number, 0, 5)), 1)
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
