"""Graphs of OpenFst's "const" format: written, mapped, and exchanged with kaldifst."""

from pathlib import Path

import kaldifst
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.decode.const_fst import ARC, ConstFst

COSTS = st.floats(-8, 8, width=16)


@st.composite
def transducers(draw: st.DrawFn) -> ConstFst:
    """Draw a transducer of at most six states."""
    num_states = draw(st.integers(1, 6))
    states = st.integers(0, num_states - 1)
    labels = st.integers(0, 9)
    arcs = draw(st.lists(st.tuples(states, labels, labels, COSTS, states), max_size=12))
    finals = draw(
        st.lists(st.one_of(COSTS, st.just(np.inf)), min_size=num_states, max_size=num_states)
    )
    sources = np.array([arc[0] for arc in arcs], np.int32)
    return ConstFst.of(
        sources,
        np.array([arc[1:] for arc in arcs], ARC),
        np.array(finals, np.float32),
        draw(states),
    )


def is_same(one: ConstFst, other: ConstFst) -> bool:
    """Compare all bits."""
    return (
        one.start == other.start
        and one.states.tobytes() == other.states.tobytes()
        and one.arcs.tobytes() == other.arcs.tobytes()
    )


@given(transducers())
def test_mapped_file_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, fst: ConstFst
) -> None:
    path = tmp_path_factory.mktemp("graph") / "graph.fst"
    with path.open("wb") as file:
        file.write(fst.to_bytes())
    assert is_same(ConstFst.mapped(path), fst)


@given(transducers())
def test_kaldifst_has_the_same_transducer(fst: ConstFst) -> None:
    assert is_same(ConstFst.of_kaldifst(fst.to_kaldifst()), fst)


def test_file_of_openfst_is_read(tmp_path: Path) -> None:
    fst = kaldifst.compile("0 1 3 5 0.5\n0 2 0 4 0.25\n1 2 2 0 1\n2 0.75\n", acceptor=False)
    kaldifst.arcsort(fst, sort_type="ilabel")
    kaldifst.StdConstFst(fst).write(str(tmp_path / "graph.fst"))
    assert is_same(ConstFst.mapped(tmp_path / "graph.fst"), ConstFst.of_kaldifst(fst))


@pytest.mark.parametrize("length", [0, 40, 100])
def test_cut_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "graph.fst"
    with path.open("wb") as file:
        fst = ConstFst.of(np.zeros(1, np.int32), np.zeros(1, ARC), np.zeros(1, np.float32), 0)
        file.write(fst.to_bytes())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="build it again"):
        ConstFst.mapped(path)
