import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Hypothesis
from pipeline.shards import (
    Alignment,
    FeatureRow,
    KBestAtAllOffsets,
    PartitionRow,
    TargetRow,
    as_stored,
    read_features,
    read_partition,
    read_partition_index,
    read_partition_lengths,
    read_targets,
    write_features,
    write_partition,
    write_targets,
)
from pipeline.shards.container import seal
from pipeline.splicing import num_low_rate_frames

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def feature_row(number: int = 0, num_frames: int = 10, text: str | None = None) -> FeatureRow:
    generator = np.random.default_rng(number)
    features = generator.standard_normal((num_frames, NUM_BINS)).astype(np.float16)
    created_at = "2019-05-12T10:00:00+00:00"
    return FeatureRow(
        f"utt-{number}", "spk", 10 * num_frames, created_at, "a.flac", "e1", text, "DP1", features
    )


def kbest(num_frames: int, k: int = 3) -> KBest:
    generator = np.random.default_rng(num_frames)
    return select_kbest(generator.standard_normal((num_frames, 12)).astype(np.float32), k)


def target_row(number: int = 0, num_frames: int = 4, offset: int = 1) -> TargetRow:
    return TargetRow(f"utt-{number}", offset, kbest(num_frames))


def hard_row(number: int = 0, num_frames: int = 10) -> PartitionRow:
    features = feature_row(number, num_frames).features
    alignment = Alignment(np.arange(num_frames, dtype=np.uint16))
    return PartitionRow(f"utt-{number}", "spk", 100, "hello", features, alignment, 0)


def soft_row(number: int = 0, num_frames: int = 10, offset: int = 2) -> PartitionRow:
    features = feature_row(number, num_frames).features
    targets = kbest(num_low_rate_frames(num_frames, offset))
    return PartitionRow(f"utt-{number}", "spk", 100, None, features, targets, offset)


def at_all(num_frames: int) -> KBestAtAllOffsets:
    return KBestAtAllOffsets.of([kbest(num_low_rate_frames(num_frames, o)) for o in range(3)])


def soft_row_at_all(number: int, num_frames: int) -> PartitionRow:
    return replace(soft_row(number, num_frames), targets=at_all(num_frames))


def plain(value: Any) -> Any:
    """Rows as nested tuples, arrays as their type, shape and bytes, to compare with ==."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list):
        return tuple(map(plain, value))
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value


def test_what_recognizers_heard_is_a_column_of_shards_that_have_some() -> None:
    """Rows without any are written as before there were any."""
    heard = (Hypothesis("whisper", "Nr. \u201c3\u201d", -0.1), Hypothesis("b", ""))
    rows = [feature_row(0), replace(feature_row(1), hypotheses=heard)]
    assert [row.hypotheses for row in read_features(write_features(rows))] == [(), heard]
    plain_rows = [feature_row(0), feature_row(1)]
    assert b"hypotheses" not in write_features(plain_rows)
    assert [row.hypotheses for row in read_features(write_features(plain_rows))] == [(), ()]


def in_bytes(row: Any) -> Any:
    return dataclasses.replace(row, features=as_stored(row.features, "uint8"), storage="uint8")


KINDS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any], Sequence[Any]]] = {
    "features": (
        write_features,
        read_features,
        [feature_row(0), feature_row(1, 0), feature_row(2)],
    ),
    "targets": (write_targets, read_targets, [target_row(0), target_row(1, 0), target_row(2, 7)]),
    "partition": (write_partition, read_partition, [hard_row(0), soft_row(1), soft_row(2, 1, 2)]),
    "aligned partition": (
        write_partition,
        read_partition,
        [hard_row(0), hard_row(1, 0), hard_row(2)],
    ),
    "partition at all offsets": (
        write_partition,
        read_partition,
        [hard_row(0), *(soft_row_at_all(n, count) for n, count in ((1, 10), (2, 2)))],
    ),
    "features of uint8": (
        write_features,
        read_features,
        [in_bytes(row) for row in (feature_row(0), feature_row(1, 0), feature_row(2))],
    ),
    "partition of uint8": (
        write_partition,
        read_partition,
        [in_bytes(row) for row in (hard_row(0), soft_row(1), soft_row(2, 1, 2))],
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_survive_to_the_bit(kind: str, num_rows: int) -> None:
    """Reading gives back what was written, in its order; writing that gives the same bytes."""
    write, read, rows = KINDS[kind]
    data = write(rows[:num_rows])
    assert plain(read(data)) == plain(list(rows[:num_rows]))
    assert write(rows[:num_rows]) == write(read(data)) == data


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.none() | TEXT), max_size=5))
def test_any_text_and_length_survive(rows: list[tuple[int, str | None]]) -> None:
    """Utterances of any length, with any transcript or none."""
    written = [feature_row(number, *row) for number, row in enumerate(rows)]
    assert plain(read_features(write_features(written))) == plain(written)


def test_row_groups_hold_128_utterances() -> None:
    """A reader may take a shard in pieces; pages carry checksums."""
    rows = [feature_row(number, 1) for number in range(300)]
    data = write_features(rows)
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    assert [metadata.row_group(group).num_rows for group in range(3)] == [128, 128, 44]
    assert plain(read_features(data)) == plain(rows)


def test_row_groups_of_long_utterances_are_small() -> None:
    """A reader, and the writer, hold no more than 32 MB and an utterance at a time."""
    num_frames = 10_240_000 // (2 * NUM_BINS)  # 10 MB of float16
    rows = [feature_row(number, num_frames) for number in range(5)]
    metadata = pq.ParquetFile(io.BytesIO(write_features(rows))).metadata
    assert [metadata.row_group(group).num_rows for group in range(2)] == [4, 1]


def test_the_footer_states_the_conventions() -> None:
    """A reader with other tools learns from the footer what the bytes are."""
    footer = pq.ParquetFile(io.BytesIO(write_features([feature_row()]))).metadata.metadata
    expected = {
        b"shard": b"features",
        b"dtype": b"float16",
        b"num_bins": str(NUM_BINS).encode(),
        b"frame_shift_ms": b"10",
        b"normalization": b"causal speaker mean",
    }
    assert expected.items() <= footer.items()
    footer = pq.ParquetFile(io.BytesIO(write_targets([target_row()]))).metadata.metadata
    assert footer[b"k"] == b"3"


def test_lengths_are_read_without_the_tensors(tmp_path: Path) -> None:
    """A trainer plans its minibatches from the lengths alone: damaged features do not matter."""
    rows = [hard_row(0, 500), soft_row(1, 400, 2), soft_row(2, 300, 1)]
    tensor = rows[1].features.tobytes()
    data = write_partition(rows).replace(tensor, bytes(len(tensor)))
    with pytest.raises(ValueError, match="cannot read the shard"):
        read_partition(data)
    (tmp_path / "part").write_bytes(data)
    with (tmp_path / "part").open("rb") as file:
        num_frames, offsets = read_partition_lengths(file)
    assert (num_frames.tolist(), offsets.tolist()) == ([500, 400, 300], [0, 2, 1])
    with (tmp_path / "part").open("rb") as file:
        index = read_partition_index(file)
    assert index.utterance_ids == [row.utterance_id for row in rows]
    assert (index.placements, index.durations_ms) == ([None] * 3, [100] * 3)
    assert (index.num_frames.tolist(), index.offsets.tolist()) == ([500, 400, 300], [0, 2, 1])


def test_placements_are_in_partitions_of_utterances_that_have_one() -> None:
    """They come back, rows without one too; without any the partition has no such column."""
    rows = [hard_row(0), replace(hard_row(1), placement="DP3")]
    data = write_partition(rows)
    assert [row.placement for row in read_partition(data)] == [None, "DP3"]
    assert read_partition_index(io.BytesIO(data)).placements == [None, "DP3"]
    without = pq.ParquetFile(io.BytesIO(write_partition([hard_row(0)]))).schema_arrow.names
    assert pq.ParquetFile(io.BytesIO(data)).schema_arrow.names == [*without, "placement"]


def test_a_partition_can_be_read_in_part() -> None:
    """A rank that shares a partition with others decodes its own rows alone, in its order."""
    rows = [soft_row(number) for number in range(200)]
    chosen = [150, 3, 4]
    assert plain(read_partition(write_partition(rows), chosen)) == plain([rows[n] for n in chosen])


@every_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_is_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    """Any byte changed: a ValueError, or the rows as they were; never other tensors."""
    write, read, rows = KINDS[kind]
    damaged = bytearray(write(rows))
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        assert plain(read(bytes(damaged))) == plain(list(rows))
    except ValueError as error:
        assert str(error)  # noqa: PT017


@every_kind
def test_a_damaged_footer_never_reaches_the_parquet_reader(kind: str) -> None:
    """Page checksums do not cover the footer: the digest before it does."""
    write, read, rows = KINDS[kind]
    damaged = write(rows).replace(b"parquet-cpp-arrow", b"parquet-cpp-Arrow")
    with pytest.raises(ValueError, match="does not match its digest"):
        read(damaged)


@pytest.mark.parametrize(
    ("written", "read_as"), [("features", "targets"), ("targets", "partition")]
)
def test_another_kind_of_shard_is_refused(written: str, read_as: str) -> None:
    """Targets are not read as features; the columns that are needed are named."""
    data = KINDS[written][0](KINDS[written][2])
    with pytest.raises(ValueError, match=r"columns .* need"):
        KINDS[read_as][1](data)


def rewritten(data: bytes, options: dict[str, Any] | None = None, **columns: list[Any]) -> bytes:
    """The shard with some columns replaced by a liar, valid as Parquet."""
    table = pq.read_table(io.BytesIO(data))
    for name, cells in columns.items():
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.array(cells, field.type))
    plainly = {"compression": "none", "use_dictionary": False}
    sink = io.BytesIO()
    pq.write_table(table, sink, **{**plainly, **(options or {})})
    return seal(sink)


RANGES_BYTES = 2 * 2 * NUM_BINS
NAN = np.full((10, NUM_BINS), np.nan, np.float16).tobytes()
LIES: dict[str, tuple[str, dict[str, list[Any]], str]] = {
    "too many frames stated": ("features", {"num_frames": [11]}, f"need {11 * 2 * NUM_BINS}"),
    "too few frames stated": ("features", {"num_frames": [9]}, f"need {9 * 2 * NUM_BINS}"),
    "negative frames": ("features", {"num_frames": [-10]}, "utt-0 features"),
    "huge frames": ("features", {"num_frames": [2**31 - 1]}, f"need {(2**31 - 1) * 2 * NUM_BINS}"),
    "NaN": ("features", {"features": [NAN]}, "NaN or infinity"),
    "target frames": ("targets", {"num_low_rate_frames": [3]}, "utt-0 senones"),
    "target offset": ("targets", {"offset": [3]}, "offset = 3: need 0..2"),
    "rising logits": ("targets", {"logits": [np.ones(12, np.float16).tobytes()]}, "best logit"),
    "short log Z": ("targets", {"log_z": [b"\0\0"]}, "utt-0 log_z"),
    "offset of another length": ("partition", {"offset": [0]}, "utt-0 senones"),
    "offset beyond all": ("partition at all offsets", {"offset": [3]}, "offset = 3: need 0..2"),
    "missing logits": ("partition", {"logits": [None]}, "utt-0 logits"),
    "levels without ranges": (
        "features of uint8",
        {"features": [bytes(RANGES_BYTES - 1)]},
        f"{RANGES_BYTES} bytes of",
    ),
    "too few levels": (
        "features of uint8",
        {"features": [bytes(RANGES_BYTES + 10 * NUM_BINS - 1)]},
        f"need {10 * NUM_BINS}",
    ),
    "infinite ranges": (
        "features of uint8",
        {"features": [b"\x7c" * (RANGES_BYTES + 10 * NUM_BINS)]},
        "NaN or infinity",
    ),
    "odd alignment": ("aligned partition", {"alignment": [b"\0"]}, "utt-0 alignment"),
    "two kinds of targets": (
        "partition",
        {"alignment": [bytes(20)]},
        "utt-0 has both an alignment",
    ),
    "no targets": ("aligned partition", {"alignment": [None]}, "utt-0 has neither an alignment"),
}
FIRST_ROW = {
    "features": feature_row(),
    "targets": target_row(),
    "partition": soft_row(),
    "partition at all offsets": soft_row_at_all(0, 10),
    "aligned partition": hard_row(),
    "features of uint8": in_bytes(feature_row()),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_shard_is_refused(lie: str) -> None:
    """Sound Parquet whose tensors are not what it says: the utterance and the bound are named."""
    kind, columns, message = LIES[lie]
    write, read, _ = KINDS[kind]
    data = rewritten(write([FIRST_ROW[kind]]), **columns)
    with pytest.raises(ValueError, match=message):
        read(data)


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"use_dictionary": True}])
def test_what_could_unpack_to_more_than_its_size_is_refused(options: dict[str, Any]) -> None:
    """No decompression bombs: a shard is as large as its tensors."""
    data = rewritten(write_features([feature_row()]), options)
    with pytest.raises(ValueError, match="plain, uncompressed"):
        read_features(data)


@every_kind
def test_an_utterance_twice_is_refused(kind: str) -> None:
    """Neither written nor read."""
    write, read, rows = KINDS[kind]
    with pytest.raises(ValueError, match="'utt-0' twice"):
        write([rows[0], rows[0]])
    row_ids = ["utt-0"] * 3
    with pytest.raises(ValueError, match="'utt-0' twice"):
        read(rewritten(write(rows), utterance_id=row_ids))


def overflowed() -> FeatureRow:
    row = feature_row()
    row.features[3, 3] = np.inf
    return row


@pytest.mark.parametrize(
    ("write", "rows", "message"),
    [
        (write_targets, [target_row(0), TargetRow("utt-1", 0, kbest(4, k=5))], r"k = \[3, 5\]"),
        (write_partition, [replace(soft_row(), targets=kbest(9))], "utt-0 senones"),
        (write_features, [overflowed()], "utt-0: NaN or infinity"),
        (
            write_features,
            [feature_row(0), in_bytes(feature_row(1))],
            r"storage = \['float16', 'uint8'\]",
        ),
    ],
    ids=["k", "targets of another length", "infinity in float16", "storage"],
)
def test_rows_that_are_no_shard_are_not_written(
    write: Callable[[Any], bytes], rows: Sequence[Any], message: str
) -> None:
    """The footer states one k and one dtype; targets fit their features, which are finite."""
    with pytest.raises(ValueError, match=message):
        write(rows)


def test_one_byte_features_state_it_and_take_half_the_room() -> None:
    """The footer says uint8; a reader gets float16."""
    rows = [feature_row(number, 1000) for number in range(3)]
    wide, narrow = write_features(rows), write_features([in_bytes(row) for row in rows])
    assert pq.ParquetFile(io.BytesIO(narrow)).metadata.metadata[b"dtype"] == b"uint8"
    assert 0.5 < len(narrow) / len(wide) < 0.52
    assert {row.features.dtype for row in read_features(narrow)} == {np.dtype(np.float16)}


def test_float16_features_are_views_of_the_shard() -> None:
    """Reading copies no tensor into memory of its own."""
    (row,) = read_features(write_features([feature_row()]))
    assert not row.features.flags.owndata


def test_an_unknown_storage_is_refused() -> None:
    """A shard of a later version is not misread."""
    data = write_features([feature_row()])
    table = pq.read_table(io.BytesIO(data))
    schema = table.schema.with_metadata({**table.schema.metadata, b"dtype": b"int4"})
    sink = io.BytesIO()
    pq.write_table(table.cast(schema), sink, compression="none", use_dictionary=False)
    with pytest.raises(ValueError, match="dtype = 'int4': need one of"):
        read_features(seal(sink))


def test_only_converted_audio_has_a_form() -> None:
    """Rows with and without one come back; a shard without any has the bytes that it always had."""
    rows = [feature_row(0), replace(feature_row(1), audio_form="44100 Hz, 2 ch"), feature_row(2)]
    found = read_features(write_features(rows))
    assert [row.audio_form for row in found] == [None, "44100 Hz, 2 ch", None]
    chosen = read_features(write_features(rows), [1])
    assert [row.audio_form for row in chosen] == ["44100 Hz, 2 ch"]
    plain = [rows[0], rows[2]]
    assert b"audio_form" not in write_features(plain)
    assert [row.audio_form for row in read_features(write_features(plain))] == [None, None]
