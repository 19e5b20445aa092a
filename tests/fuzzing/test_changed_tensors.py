"""Changed shards, models, checkpoints and exported models never become other tensors in silence."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.stored_objects import read_contents
from pipeline.shards import read_lattices, write_lattices
from pipeline.shards.container import read_first_rows, seal
from tests.fuzzing.mutations import changed, damaged
from tests.fuzzing.outcomes import FUZZ, REFUSED, num_examples, outcome
from tests.pipeline.shards.test_lattice_shards import rows as lattice_rows
from tests.pipeline.shards.test_shards import KINDS
from training.decode.const_fst import ARC, ConstFst
from training.decode.graph import DecodingGraph
from training.export.archive import (
    GRAPH,
    MEMBERS,
    SETTINGS,
    ExportedModel,
    ExportedSettings,
    read_archive,
    write_archive,
)
from training.models.store import TrainedModel, decode_model, encode_model, make_model
from training.settings.models import LstmConfig
from training.tensor_encoding import decode_state, encode_state

fewer = settings(FUZZ, max_examples=num_examples(60) // 3 + 1)

SHARDS: Mapping[str, tuple[Any, bytes]] = {
    **{kind: (read, write(rows)) for kind, (write, read, rows) in KINDS.items()},
    "lattices": (read_lattices, write_lattices(lattice_rows())),
}
ODD_CELLS = (
    *(None, -1, 0, 2**31 - 1, 2**63 - 1, "", "\0", "x" * 999),
    *(b"", b"\0" * 7, b"\x7f\xff" * 64),
)


@st.composite
def forged_shard(draw: st.DrawFn, data: bytes) -> bytes:
    """Give cells other values, drop or repeat a column or a footer's entry; sound Parquet."""
    table = pq.read_table(io.BytesIO(data))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, table.num_columns - 1))
        kind = draw(st.sampled_from(("cells", "cells", "cells", "drop", "footer")))
        if kind == "drop" and table.num_columns > 1:
            table = table.remove_column(place)
        elif kind == "footer":
            footer = dict(table.schema.metadata or {})
            if footer:
                key = draw(st.sampled_from(sorted(footer)))
                footer[key] = draw(st.sampled_from((b"", b"\xff", b"-1", b"99999999999", b"nan")))
            table = table.replace_schema_metadata(footer)
        else:
            table = _with_cells(draw, table, place)
    sink = io.BytesIO()
    try:
        pq.write_table(table, sink, compression="none", use_dictionary=False)
    except (pa.ArrowException, UnicodeDecodeError):
        return data  # no column has such values
    return seal(sink)


def _with_cells(draw: st.DrawFn, table: pa.Table, place: int) -> pa.Table:
    field = table.schema.field(place)
    cells = table.column(place).to_pylist()
    row = draw(st.integers(0, len(cells) - 1))
    cell = cells[row]
    ways = st.sampled_from(ODD_CELLS)
    cells[row] = draw(ways | damaged(cell)) if isinstance(cell, bytes) else draw(ways)
    try:
        return table.set_column(place, field, pa.array(cells, field.type))
    except (pa.ArrowException, TypeError, OverflowError):
        return table  # the column's type has no such value


@pytest.mark.parametrize("kind", SHARDS)
def test_forged_shards(kind: str) -> None:
    """Sound Parquet of other cells is other rows, or is refused; so do its other readers."""
    read, data = SHARDS[kind]

    @fewer
    @given(forged_shard(data))
    def check(found: bytes) -> None:
        outcome(lambda: read(found))
        outcome(lambda: read_contents("a.parquet", found))
        outcome(lambda: read_first_rows(io.BytesIO(found), 3))

    check()


@FUZZ
@given(st.sampled_from(sorted(SHARDS)).flatmap(lambda kind: damaged(SHARDS[kind][1])))
def test_damaged_shards_are_not_inspected(data: bytes) -> None:
    """The seal is looked at before pyarrow, which aborts the process on some footers."""
    outcome(lambda: read_first_rows(io.BytesIO(data), 3), "shard")


STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2).bfloat16()},
    "optimizer": {"state": {0: {"step": 3}}, "groups": [(0.5, None, True)]},
    "random": torch.arange(5, dtype=torch.uint8),
}
ENCODED = encode_state(STATE)


def plain(value: Any) -> Any:
    """Return a state with its tensors as lists, to compare."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.float().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@FUZZ
@given(damaged(ENCODED))
def test_damaged_states(data: bytes) -> None:
    """A zip's CRC covers the tensors: a damaged state is refused, or is what was stored."""
    found = outcome(lambda: decode_state(data), "no state of megahour")
    assert found is REFUSED or plain(found) == plain(STATE)


def forged_npz(members: Mapping[str, bytes], method: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return content.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@FUZZ
@given(st.data())
def test_forged_states(data: st.DataObject) -> None:
    """Arrays that claim other shapes, and a structure that names other tensors, are refused."""
    members = members_of(ENCODED)
    name = data.draw(st.sampled_from(sorted(members)))
    if name == "structure.npy" and data.draw(st.booleans()):
        text = np.load(io.BytesIO(members[name])).tobytes()
        document = data.draw(changed(json.loads(text)))
        try:
            text = json.dumps(document).encode()
        except RecursionError:
            text = b"[" * 99_999
        buffer = io.BytesIO()
        np.save(buffer, np.frombuffer(text, np.uint8))
        members[name] = buffer.getvalue()
    else:
        members[name] = data.draw(damaged(members[name]))
    method = data.draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    outcome(lambda: decode_state(forged_npz(members, method)), "no state of megahour")


def test_an_array_that_claims_terabytes_is_refused_by_its_size() -> None:
    """The header's shape is compared with the member's bytes before anything is allocated."""
    members = members_of(ENCODED)
    huge = members["0.npy"].replace(b"(2, 3), }         ", b"(2000000, 3000000)")
    assert huge != members["0.npy"]
    found = forged_npz({**members, "0.npy": huge}, zipfile.ZIP_STORED)
    with pytest.raises(ValueError, match="no state of megahour"):
        decode_state(found)


FORM = LstmConfig(1, 4, bidirectional=False, look_ahead=1, dropout=0.0)


def small_model() -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(make_model(FORM, 3).eval(), torch.zeros(3))


@fewer
@given(st.data())
def test_forged_models(data: st.DataObject) -> None:
    """A state of other senones, weights or fields is refused: it takes no memory for its claims."""
    state = decode_state(encode_model(small_model()))
    odd = (None, 10**9, -1, "x", [], {}, torch.zeros(5), torch.zeros(2, 2), torch.zeros(3).int())
    for _ in range(data.draw(st.integers(1, 2))):
        table = state["state"] if data.draw(st.booleans()) else state
        if not isinstance(table, dict) or not table:
            break
        table[data.draw(st.sampled_from(sorted(table)))] = data.draw(st.sampled_from(odd))
        if not isinstance(state.get("state"), dict):
            break
    found = outcome(lambda: decode_model(encode_state(state), FORM))
    if found is not REFUSED:
        assert len(found.log_priors) == 3
        assert found.model.num_senones == 3


def exported() -> ExportedModel:
    fst = ConstFst.of(
        np.array([0, 1]),
        np.array([(1, 1, 0.5, 1), (2, 2, 0.1, 2)], ARC),
        np.array([np.inf, np.inf, 0.0], np.float32),
        0,
    )
    read = ExportedSettings(
        format=3,
        name="student",
        precision="float32",
        engine="fast",
        delay=1,
        acoustic_scale=0.1,
        beam=10.0,
        max_active=100,
        lattice_beam=5.0,
        language_model_scale=1.0,
        insertion_penalty=0.0,
        silence=(0,),
        log_priors=(-1.0, -1.0, -1.0),
    )
    graph = DecodingGraph(fst, ("<eps>", "a", "b", "#0"), 3)
    return ExportedModel(b"onnx", graph, first_pass=fst, grammar=fst, settings=read)


@FUZZ
@given(data=st.data())
def test_changed_exported_models(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A damaged archive, and one of another graph or settings, is refused by its path, or read."""
    path = tmp_path_factory.getbasetemp() / "model.zip"
    write_archive(path, exported())
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(whole)))
    else:
        members = members_of(whole)
        name = data.draw(st.sampled_from((GRAPH, GRAPH, SETTINGS, *MEMBERS)))
        if name == SETTINGS:
            document = json.loads(members[name])
            members[name] = data.draw(changed(document).map(_written))
        else:
            members[name] = data.draw(damaged(members[name]))
        path.write_bytes(forged_npz(members, zipfile.ZIP_DEFLATED))
    outcome(lambda: read_archive(Path(path)), str(path))


def _written(document: Any) -> bytes:
    try:
        return json.dumps(document).encode()
    except RecursionError:
        return b"[" * 99_999
