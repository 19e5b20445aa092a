"""The k best at all three offsets lie in one array by their middle frames, as alignments do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.kbest import KBest
from pipeline.shards import (
    KBestAtAllOffsets,
    TargetRow,
    read_targets,
    write_partition,
    write_targets,
)
from pipeline.shards.container import read_plain_columns
from pipeline.shards.targets import footer_of, num_stored_rows, stated_offsets
from pipeline.splicing import STACK, low_rate_alignment, num_low_rate_frames
from tests.training.data.partition_rows import row, row_at_all_offsets


def of_middles(num_frames: int) -> list[KBest]:
    """By offset, targets whose senone is the number of their middle frame."""
    frames = np.arange(num_frames, dtype=np.uint16)
    middles = [low_rate_alignment(frames, offset)[:, np.newaxis] for offset in range(STACK)]
    return [
        KBest(each, np.zeros_like(each, np.float16), each[:, 0].astype(np.float16))
        for each in middles
    ]


@given(st.one_of(st.integers(0, 7), st.integers(0, 400)))
def test_row_j_has_its_middle_at_frame_j_plus_1(num_frames: int) -> None:
    """All frames but the first and last are a middle, each once; offsets are views of the rows."""
    parts = of_middles(num_frames)
    stored = KBestAtAllOffsets.of(parts)
    assert stored.kbest.senones[:, 0].tolist() == list(range(1, num_frames - 1))
    assert len(stored.kbest.log_z) == num_stored_rows(num_frames, 2, "all")
    for offset, part in enumerate(parts):
        found = stored.at(offset)
        assert np.array_equal(found.senones, part.senones)
        assert np.array_equal(found.log_z, part.log_z)
        assert np.shares_memory(found.senones, stored.kbest.senones) or not len(part.log_z)
        assert num_stored_rows(num_frames, offset, "one") == num_low_rate_frames(num_frames, offset)


def test_shards_at_one_offset_state_nothing_new() -> None:
    """Their bytes are those from before there were others; a shard at all says so."""
    one, every = row(1, 20, soft=True), row_at_all_offsets(1, 20)
    _, footer = read_plain_columns(write_partition([one]), ["utterance_id"])
    assert "offsets" not in footer
    _, footer = read_plain_columns(write_partition([every]), ["utterance_id"])
    assert footer["offsets"] == "all"


def test_a_shard_has_one_kind_of_offsets() -> None:
    """A row at one offset among rows at all would be read as damage."""
    stored = KBestAtAllOffsets.of(of_middles(9))
    with pytest.raises(ValueError, match="targets at one offset and at all"):
        footer_of([stored, stored.at(0)])
    with pytest.raises(ValueError, match="offsets = 'some': need 'all', or none"):
        stated_offsets({"offsets": "some"})


def test_rows_of_another_number_of_frames_are_refused() -> None:
    """An utterance of 20 frames has 18 rows at all offsets."""
    cut = TargetRow("a", 1, KBestAtAllOffsets.of(of_middles(19)))
    (found,) = read_targets(write_targets([cut]))
    assert isinstance(found.kbest, KBestAtAllOffsets)
    assert found.kbest.kbest.senones[:, 0].tolist() == list(range(1, 18))
    other = row_at_all_offsets(1, 20)
    with pytest.raises(ValueError, match=r"\(17, 1\): need uint16 \(18, 1\)"):
        write_partition([replace(other, targets=found.kbest)])
