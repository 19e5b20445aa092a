"""The archive of an exported model: all that recognizes speech, in one zip file without code.

`model.onnx` is the network, `graph.fst` the decoding graph in OpenFst's format, `words.txt` its
words in order, and `model.json` the settings.

A graph's bytes are checked before OpenFst reads them. OpenFst trusts its counts: of 400 damaged
graphs some never ended, and a label or a state that does not exist is read beyond the end of an
array.
"""

import json
import math
import os
import struct
import tempfile
import zipfile
import zlib
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import kaldifst
import numpy as np

from infra.settings import (
    ConfigurationError,
    Items,
    Range,
    Text,
    check_ranges,
    printable,
    read_record,
)
from pipeline.filterbank import Engine
from training.decode.decoder import DecoderConfig
from training.decode.graph import DecodingGraph
from training.settings import AcousticScale

_KIND = struct.pack("<Ii6si8s", 0x7EB2FDD6, 6, b"vector", 8, b"standard")
_HEADER = struct.Struct("<iiQqqq")
_STATE = struct.Struct("<fq")
_ARC = np.dtype([("input", "<i4"), ("output", "<i4"), ("cost", "<f4"), ("target", "<i4")])
_VERSION, _NO_SYMBOLS = 2, 0


def require_graph(data: bytes, num_labels: int, num_words: int) -> None:
    """Raise ValueError unless the bytes are a whole graph whose arcs name what is there.

    Input labels go up to `num_labels`; output labels are 0 or below `num_words`.
    """
    begin = len(_KIND) + _HEADER.size
    if len(data) < begin or not data.startswith(_KIND):
        raise ValueError(f"{len(data)} bytes are no vector graph of OpenFst")
    version, flags, _, start, num_states, _ = _HEADER.unpack_from(data, len(_KIND))
    if (version, flags) != (_VERSION, _NO_SYMBOLS) or not 0 <= start < num_states:
        raise ValueError(f"a graph of version {version}, flags {flags} that starts at {start}")
    if num_states * _STATE.size > len(data):
        raise ValueError(f"{num_states} states in {len(data)} bytes")
    limits = {"input": num_labels + 1, "output": max(num_words, 1), "target": num_states}
    for state in range(num_states):
        begin = _after_state(data, begin, state, limits)
    if begin != len(data):
        raise ValueError(f"{len(data) - begin} bytes behind the last state")


def _after_state(data: bytes, begin: int, state: int, limits: dict[str, int]) -> int:
    """Return where the next state begins."""
    if begin + _STATE.size > len(data):
        raise ValueError(f"the graph ends before state {state}")
    final, num_arcs = _STATE.unpack_from(data, begin)
    begin += _STATE.size
    if math.isnan(final) or not 0 <= num_arcs <= (len(data) - begin) // _ARC.itemsize:
        raise ValueError(f"state {state} of cost {final} with {num_arcs} arcs")
    arcs = np.frombuffer(data, _ARC, num_arcs, begin)
    for name, limit in limits.items():
        if num_arcs and not 0 <= arcs[name].min() <= arcs[name].max() < limit:
            raise ValueError(f"state {state} has an arc whose {name} is not below {limit}")
    if np.isnan(arcs["cost"]).any():
        raise ValueError(f"state {state} has an arc without a cost")
    return begin + arcs.nbytes


NETWORK, GRAPH, WORDS, SETTINGS = "model.onnx", "graph.fst", "words.txt", "model.json"
MEMBERS = (NETWORK, GRAPH, WORDS, SETTINGS)

ExportPrecision = Literal["float32", "int8"]
"""The numbers of an exported network's weights and products."""

_MAX_MEMBER_BYTES = 4 << 30
_MAX_RATIO = 1032
"""Deflate shrinks to no less than a 1032nd: what claims more is forged."""

_REFUSED = (
    *(EOFError, KeyError, NotImplementedError, RecursionError, RuntimeError, TypeError),
    *(ValueError, zipfile.BadZipFile, zlib.error, struct.error),
)
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""A zip file's earliest date: equal models make equal bytes."""


@dataclass(frozen=True, slots=True)
class ExportedSettings:
    """ExportedSettings: how to hear and decode; outputs are `delay` rows of 30 ms late.

    `silence` are the senones of silence. `log_priors` are subtracted from log posteriors before
    `acoustic_scale` multiplies them.
    """

    format: Annotated[int, Range(1, 1)]
    name: Annotated[str, Text(1, 200)]
    precision: ExportPrecision
    engine: Engine
    delay: Annotated[int, Range(0, 1000)]
    acoustic_scale: AcousticScale
    beam: Annotated[float, Range(1e-6, 1e6)]
    max_active: Annotated[int, Range(2, 1_000_000_000)]
    silence: Annotated[tuple[Annotated[int, Range(0, 65_535)], ...], Items(1, 65_536)]
    log_priors: Annotated[tuple[Annotated[float, Range(-1e6, 0)], ...], Items(1, 65_536)]

    __post_init__ = check_ranges

    @property
    def decoder(self) -> DecoderConfig:
        """Return the bounds of the search."""
        return DecoderConfig(self.beam, self.max_active)


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModel:
    """ExportedModel: a network as ONNX, the graph to search, and the settings of both."""

    network: bytes
    graph: DecodingGraph
    settings: ExportedSettings


def write_archive(path: Path, model: ExportedModel) -> int:
    """Write the archive at once, or leave what was there; return its bytes.

    OSError where the folder cannot be written.
    """
    content = BytesIO()
    settings = json.dumps(asdict(model.settings), indent=1, sort_keys=True).encode()
    words = "".join(f"{word}\n" for word in model.graph.words).encode()
    parts = (model.network, _graph_bytes(model.graph), words, settings)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in zip(MEMBERS, parts, strict=True):
            member = zipfile.ZipInfo(name, _FIRST_DAY)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.getvalue())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(content.getvalue())


def read_archive(path: Path) -> ExportedModel:
    """Read what `write_archive` wrote; ConfigurationError for any other file."""
    where = printable(str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            network, graph, words, settings = (_member(archive, name) for name in MEMBERS)
        table = json.loads(settings)
        table["silence"], table["log_priors"] = list(table["silence"]), list(table["log_priors"])
        read = read_record(ExportedSettings, table, SETTINGS)
        names = tuple(words.decode().splitlines())
        return ExportedModel(network, _graph(graph, names, len(read.log_priors)), read)
    except _REFUSED as error:
        raise ConfigurationError(
            f"{where}: {printable(str(error), 500)}: need an archive of megahour export"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error.strerror or error}") from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    member = archive.getinfo(name)
    size, most = member.file_size, min(_MAX_MEMBER_BYTES, _MAX_RATIO * member.compress_size + 1)
    if size > most:
        raise ValueError(f"{name} has {size} bytes: need at most {most}")
    return archive.read(name)  # which compares its CRC


def _graph_bytes(graph: DecodingGraph) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".fst") as file:
        if not graph.fst.write(file.name):
            raise OSError(f"{tempfile.gettempdir()}: a graph cannot be written: set TMPDIR")
        return Path(file.name).read_bytes()


def _graph(data: bytes, words: tuple[str, ...], num_senones: int) -> DecodingGraph:
    require_graph(data, num_senones, len(words))
    # OpenFst reads files alone.
    with tempfile.NamedTemporaryFile(suffix=".fst") as file:
        Path(file.name).write_bytes(data)
        fst = kaldifst.StdVectorFst.read(file.name)
    if fst is None or fst.start < 0:
        raise ValueError(f"{GRAPH} is no graph of OpenFst")
    return DecodingGraph(fst, words, num_senones)
