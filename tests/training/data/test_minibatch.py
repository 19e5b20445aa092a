"""Minibatches: gathered from a shuffle buffer by index, bit by bit, and copied to a device."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.kbest import KBest, retained_mass, soft_targets
from pipeline.shards import Alignment, PartitionRow
from pipeline.splicing import splice
from tests.training.data.partition_rows import row
from training.data.dataset import MINIBATCHES_AHEAD, device_copies, made_ahead
from training.data.minibatch import BufferFrames, Minibatch, Targets
from training.data.row_order import Segments, chunked_minibatches, whole_utterance_minibatches
from training.data.targets import GhostTargets, HardTargets, SoftTargets


def segments(*spans: tuple[int, int, int]) -> Segments:
    """Make segments from the utterance, start and stop of each."""
    return Segments(*np.array(spans, np.int64).T)


def minibatch(buffer: BufferFrames, chosen: Segments, delay: int) -> Minibatch:
    """Return the one minibatch of these segments."""
    (found,) = buffer.minibatches([chosen], delay)
    return found


def test_ghost_targets_keep_the_missing_mass() -> None:
    """Joined, gathered and padded as others are; frames sum to what their k best hold."""
    rows = [row(0, 6, True), row(3, 12, True)]
    parts = [BufferFrames.of([each], 0, soft_targets="ghost") for each in rows]
    batch = minibatch(BufferFrames.join(parts), segments((0, 0, 3), (1, 0, 5)), 1)
    plain = minibatch(BufferFrames.of(rows, 0), segments((0, 0, 3), (1, 0, 5)), 1)
    assert isinstance(batch.targets, GhostTargets)
    assert isinstance(plain.targets, SoftTargets)
    assert torch.equal(batch.targets.senones, plain.targets.senones)
    mass = batch.targets.probabilities.sum(-1)
    for each, found in zip(rows, (mass[0, 1:3], mass[1, 1:5]), strict=True):
        assert isinstance(each.targets, KBest)
        np.testing.assert_allclose(found, retained_mass(each.targets), rtol=1e-6)
    assert not mass[0, 3:].any()
    loss = batch.targets.cross_entropy(torch.zeros(2, 5, 9))
    assert float(loss) == pytest.approx(uniform_ghost_loss(mass.numpy()), rel=1e-6)


def uniform_ghost_loss(mass: np.ndarray) -> float:
    """The loss of a uniform student of nine senones, of which four are kept."""
    present = mass > 0
    return float((mass * np.log(9) + (1 - mass) * np.log(9 / 5) * present).sum())


def segment_by_segment(
    rows: Sequence[PartitionRow], offset: int, look_ahead: int, chosen: Segments
) -> Minibatch:
    """The same minibatch made without arithmetic on indices: whole utterances, cut and copied."""
    longest = int((chosen.stops - chosen.starts).max())
    features, labels, senones, probabilities = [], [], [], []

    def cut(whole: np.ndarray, start: int, stop: int, fill: float, dtype: type) -> np.ndarray:
        part = whole[start:stop].astype(dtype)
        widths = [(0, longest - len(part))] + [(0, 0)] * (part.ndim - 1)
        return np.pad(part, widths, constant_values=fill)

    for utterance, start, stop in zip(chosen.utterances, chosen.starts, chosen.stops, strict=True):
        each = rows[utterance]
        spliced = splice(each.features, each.offset if isinstance(each.targets, KBest) else offset)
        repeated = np.concatenate([spliced, np.repeat(spliced[-1:], look_ahead, axis=0)])
        features.append(cut(repeated, start, stop, 0, np.float32))
        if isinstance(each.targets, Alignment):
            late = [-1] * look_ahead + each.targets.senones[offset + 1 :: 3][
                : len(spliced)
            ].tolist()
            labels.append(cut(np.array(late), start, stop, -1, np.int64))
        if isinstance(each.targets, KBest):
            late = np.pad(each.targets.senones, ((look_ahead, 0), (0, 0)))
            senones.append(cut(late, start, stop, 0, np.int64))
            late = np.pad(soft_targets(each.targets), ((look_ahead, 0), (0, 0)))
            probabilities.append(cut(late, start, stop, 0, np.float32))
    lengths = torch.from_numpy(chosen.stops - chosen.starts)
    targets: Targets = (
        HardTargets(stack(labels)) if labels else SoftTargets(stack(senones), stack(probabilities))
    )
    return Minibatch(stack(features), lengths, targets)


def stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def tensors(minibatch: Minibatch) -> list[torch.Tensor]:
    """All tensors of a minibatch."""
    targets = [getattr(minibatch.targets, field.name) for field in fields(minibatch.targets)]
    return [minibatch.features, minibatch.lengths, *targets]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([chunked_minibatches, whole_utterance_minibatches]),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 12),
    st.sampled_from([32, 96]),
)
def test_minibatches_are_bitwise_those_made_segment_by_segment(
    frame_counts, soft, form, offset, look_ahead, num_first, minibatch_frames
) -> None:
    """Of one partition or two, with utterances too short for a low-rate frame among them."""
    rows = [row(number, count, soft) for number, count in enumerate(frame_counts)]
    # Targets at one offset are read at no other one.
    offset = 0 if soft else offset
    parts = [rows[:num_first], rows[num_first:]]
    buffer = BufferFrames.join([BufferFrames.of(part, offset) for part in parts if part])
    lengths = np.where(buffer.counts > 0, buffer.counts + look_ahead, 0)
    num_frames = 0
    batches = form(lengths, minibatch_frames, np.random.default_rng(0))
    made = buffer.minibatches(batches, look_ahead)
    for chosen, found in zip(batches, made, strict=True):
        num_frames += found.num_frames
        expected = segment_by_segment(rows, offset, look_ahead, chosen)
        assert type(found.targets) is type(expected.targets)
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    # Accuracies and losses a frame divide by this: a frame counts once, whatever the look-ahead.
    assert num_frames == buffer.counts.sum()


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
