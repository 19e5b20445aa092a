"""The archive of an exported model: all that recognizes speech, in one zip file without code.

`model.onnx` is the network, `graph.fst` the decoding graph in OpenFst's format, `words.txt` its
words in order, and `model.json` the settings.

A graph's bytes are checked before they are searched: a label or a state that does not exist would
be read beyond the end of an array.
"""

import json
import os
import zipfile
import zlib
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

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
from training.decode.const_fst import ConstFst
from training.decode.decoder import DecoderConfig
from training.decode.graph import DecodingGraph
from training.settings import AcousticScale

NETWORK, GRAPH, WORDS, SETTINGS = "model.onnx", "graph.fst", "words.txt", "model.json"
MEMBERS = (NETWORK, GRAPH, WORDS, SETTINGS)

ExportPrecision = Literal["float32", "int8"]
"""The numbers of an exported network's weights and products."""

_MAX_MEMBER_BYTES = 4 << 30
_MAX_RATIO = 1032
"""Deflate shrinks to no less than a 1032nd: what claims more is forged."""

_REFUSED = (
    *(EOFError, KeyError, NotImplementedError, RecursionError, RuntimeError, TypeError),
    *(ValueError, zipfile.BadZipFile, zlib.error),
)
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""A zip file's earliest date: equal models make equal bytes."""


@dataclass(frozen=True, slots=True)
class ExportedSettings:
    """ExportedSettings: how to hear and decode; outputs are `delay` rows of 30 ms late.

    `silence` are the senones of silence. `log_priors` are subtracted from log posteriors before
    `acoustic_scale` multiplies them.
    """

    format: Annotated[int, Range(2, 2)]
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
    parts = (model.network, model.graph.fst.to_bytes(), words, settings)
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


def _graph(data: bytes, words: tuple[str, ...], num_senones: int) -> DecodingGraph:
    fst = ConstFst.in_bytes(data, GRAPH)
    fst.require_labels(num_senones, len(words))
    return DecodingGraph(fst, words, num_senones)
