"""Minibatches gathered from a shuffle buffer by index: delayed, padded, bit by bit."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.kbest import KBest, retained_mass, soft_targets
from pipeline.shards import Alignment, PartitionRow
from pipeline.splicing import splice
from tests.training.data.partition_rows import row
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
