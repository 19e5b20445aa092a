"""The lattice shard: equal bytes for equal lattices, read back whole, and damage refused."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from pipeline.shards import Lattice, LatticeRow, read_lattice_rows, read_lattices, write_lattices
from pipeline.shards import lattices as lattice_shard
from pipeline.shards.container import FLOAT32, UINT16
from pipeline.shards.lattices import check_lattice
from tests.training.sequence_training.random_lattices import random_lattice, seeds
from training.sequence_training.lattice_paths import LatticeArc, make_lattice


def lattice(**changed: list) -> Lattice:
    """Two ways to read a frame, then one to read another, and a way around a state."""
    columns = {
        "level_sizes": [1, 2, 1, 1],
        "level_frames": [0, 1, 1, 2],
        "sources": [0, 0, 1, 2, 3],
        "targets": [1, 2, 3, 3, 4],
        "labels": [3, 4, 0, 0, 1],
        "graph_costs": [0.5, 0.25, 0.0, -1.5, 2.0],
    } | changed
    types = dict.fromkeys(columns, np.dtype("<i4")) | {"labels": UINT16, "graph_costs": FLOAT32}
    return Lattice(**{name: np.array(each, types[name]) for name, each in columns.items()})


def rows() -> list[LatticeRow]:
    return [LatticeRow(f"utterance-{row}", 70 + row, row, lattice()) for row in (0, 3, 4)]


def test_lattices_are_read_back() -> None:
    """All of them, some by number, and the partition's rows alone."""
    data = write_lattices(rows())
    assert data == write_lattices(rows())
    for found, chosen in ((read_lattices(data), (0, 1, 2)), (read_lattices(data, [2, 0]), (2, 0))):
        for each, number in zip(found, chosen, strict=True):
            expected = rows()[number]
            assert (each.utterance_id, each.duration_ms) == (
                expected.utterance_id,
                expected.duration_ms,
            )
            assert each.row == expected.row
            for name in Lattice.__slots__:
                one, other = getattr(each.lattice, name), getattr(expected.lattice, name)
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
    assert read_lattice_rows(io.BytesIO(data)).tolist() == [0, 3, 4]
    assert read_lattices(write_lattices([])) == []


@pytest.mark.parametrize("position", [400, 900, -300, -20])
def test_damaged_bytes_are_refused(position: int) -> None:
    """A flipped byte of values, footer or seal is a ValueError."""
    data = bytearray(write_lattices(rows()))
    data[position] ^= 1
    with pytest.raises(ValueError, match="shard"):
        read_lattices(bytes(data))


@pytest.mark.parametrize(
    ("changed", "need"),
    [
        ({"level_sizes": [2, 1, 1, 1]}, "one start and one end"),
        ({"level_sizes": [1, 2, 1, 0]}, "levels of one state or more"),
        ({"level_frames": [1, 2, 2, 3]}, "one start and one end"),
        ({"level_frames": [0, 1, 2, 1]}, "frames that ascend"),
        ({"level_sizes": [1, 9, 9, 1]}, "no more states than its arcs have ends"),
        ({"targets": [1, 2, 3, 3, 5]}, "states that the levels number"),
        ({"sources": [0, 0, 1, 2, -1]}, "states that the levels number"),
        ({"sources": [0, 1, 0, 2, 3]}, "arcs sorted by source"),
        ({"targets": [1, 2, 2, 3, 4]}, "arcs to later levels"),
        ({"labels": [3, 0, 0, 0, 1]}, "a frame for each label, none for 0"),
        ({"labels": [3, 4, 0, 0, 0]}, "a frame for each label, none for 0"),
        ({"sources": [0, 0, 1, 1, 3]}, "ways on from all states"),
        ({"targets": [1, 1, 3, 3, 4]}, "ways to all states"),
        ({"graph_costs": [0.5, np.inf, 0.0, 0.0, 0.0]}, "finite graph costs"),
        ({"graph_costs": [0.5, np.nan, 0.0, 0.0, 0.0]}, "finite graph costs"),
    ],
)
def test_broken_lattices_are_refused(changed: dict, need: str) -> None:
    """Neither written nor used: training would read beyond its frames, or never end."""
    check_lattice(lattice(), "utterance-0")
    with pytest.raises(ValueError, match=f"utterance-0: a broken lattice: need {need}"):
        write_lattices([LatticeRow("utterance-0", 70, 0, lattice(**changed))])


@pytest.mark.parametrize("numbers", [[1, 0], [2, 2], [-1, 0]])
def test_rows_are_the_partitions_in_order(numbers: list[int]) -> None:
    """Each row of the partition at most once, in its order."""
    out_of_order = [LatticeRow(f"utterance-{n}", 70, n, lattice()) for n in numbers]
    with pytest.raises(ValueError, match="each row of the training partition once, in order"):
        write_lattices(out_of_order)


def test_rows_twice_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by number or by row numbers alone: training would take one of the two."""
    twice = [LatticeRow(f"utterance-{n}", 70, 3, lattice()) for n in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(lattice_shard, "_require_order", lambda _: None)
        data = write_lattices(twice)
    need = r"lattices: row 3 after row 3: need each row .*: remove the lattices' folder"
    for chosen in (None, [1, 0]):
        with pytest.raises(ValueError, match=need):
            read_lattices(data, chosen)
    with pytest.raises(ValueError, match=need):
        read_lattice_rows(io.BytesIO(data))
    assert [each.row for each in read_lattices(data, [1])] == [3]


@pytest.mark.parametrize(
    ("changed", "need"),
    [
        ({"packed": b""}, r"numbers of \[\] bytes: need each one of \(1, 2, 4\)"),
        ({"packed": b"\1\1\1\3\1\0"}, r"numbers of \[1, 1, 1, 3, 1\] bytes"),
        ({"num_arcs": -1}, "counts from 0 on"),
        ({"num_arcs": 6}, "packed bytes: need 42 in them"),
        ({"num_arcs": 6, "num_costs": 3, "num_states": 5}, "packed bytes"),
        ({"num_levels": 5, "num_states": 3}, "3 states in its levels"),
        ({"num_levels": 3, "num_states": 7}, "7 states in its levels"),
    ],
)
def test_cells_that_do_not_fit_are_refused(changed: dict, need: str) -> None:
    """Neither widths nor counts are taken on trust, though a seal is around them."""
    cells = lattice_shard._to_cells(rows()[0])
    assert (cells["num_levels"], cells["num_states"], cells["num_arcs"]) == (4, 5, 5)
    cells |= changed
    with pytest.raises(ValueError, match=f"utterance-0: .*{need}"):
        lattice_shard._from_cells({**cells, "packed": pa.py_buffer(cells["packed"])})


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_any_lattice_is_read_back(seed: int) -> None:
    """Arcs without frame, arcs side by side, costs of 0, and senones that last."""
    rng = np.random.default_rng(seed)
    one = random_lattice(rng, int(rng.integers(1, 9))).lattice
    costs = np.where(rng.random(len(one.sources)) < 0.5, np.float32(0), one.graph_costs)
    one = replace(one, graph_costs=costs)
    (found,) = read_lattices(write_lattices([LatticeRow("utterance-0", 70, 0, one)]))
    for name in Lattice.__slots__:
        np.testing.assert_array_equal(getattr(found.lattice, name), getattr(one, name))


def test_arcs_take_few_bytes() -> None:
    """A lattice of ten arcs a frame takes less than half of what its arrays hold."""
    generator = np.random.default_rng(0)
    chain = [LatticeArc(n, n + 1, 1 + n % 7, 0.5) for n in range(300)]
    beside = [LatticeArc(n, n + 1, 8 + int(generator.integers(50)), 0.25) for n in range(300)] * 9
    made = make_lattice(chain + beside, 0, {300: 0.0})
    raw = sum(getattr(made, name).nbytes for name in Lattice.__slots__)
    data = write_lattices([LatticeRow("utterance-0", 70, 0, made)])
    assert len(data) - len(write_lattices([])) < raw / 2
