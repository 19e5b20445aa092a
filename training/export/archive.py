"""The archive of an exported model: all that recognizes speech, in one zip file without code.

`model.onnx` is the network, `graph.fst` the decoding graph in OpenFst's format, `first_pass.fst`
the grammar of this graph, `grammar.fst` that of the n-gram model which rescores lattices,
`words.txt` their words in order, and `model.json` the settings.

A graph's bytes are checked before they are searched: a label or a state that does not exist would
be read beyond the end of an array.
"""

import json
import re
import zipfile
import zlib
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

from infra.host_folder import replacing
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
from training.decode.grammar import BACKOFF_WORD
from training.decode.graph import DecodingGraph
from training.decode.lexicon import require_visible
from training.decode.rescoring import SecondPass
from training.decode.search import SearchableGraph
from training.settings import AcousticScale

NETWORK, WORDS, SETTINGS = "model.onnx", "words.txt", "model.json"
GRAPH, FIRST_PASS, GRAMMAR = "graph.fst", "first_pass.fst", "grammar.fst"
MEMBERS = (NETWORK, GRAPH, FIRST_PASS, GRAMMAR, WORDS, SETTINGS)

ExportPrecision = Literal["float32", "int8"]
"""The numbers of an exported network's weights and products."""

_MAX_MEMBER_BYTES = 4 << 30
_MAX_RATIO, _SMALL_BYTES = 64, 1 << 20
"""A member beyond a megabyte unpacks to so many times its size at most; ours to a tenth of that."""

_REFUSED = (
    *(EOFError, IndexError, KeyError, NotImplementedError, RecursionError, RuntimeError, TypeError),
    *(ValueError, zipfile.BadZipFile, zlib.error),
)
_PLAIN = re.compile(rb"[\n!-~]*").fullmatch
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)
"""A zip file's earliest date: equal models make equal bytes."""


@dataclass(frozen=True, slots=True)
class ExportedSettings:
    """ExportedSettings: how to hear and decode; outputs are `delay` rows of 30 ms late.

    `silence` are the senones of silence. `log_priors` are subtracted from log posteriors before
    `acoustic_scale` multiplies them. The scale of the language model and the penalty of a word are
    those by which lattices are rescored.
    """

    format: Annotated[int, Range(3, 3)]
    name: Annotated[str, Text(1, 200)]
    precision: ExportPrecision
    engine: Engine
    delay: Annotated[int, Range(0, 1000)]
    acoustic_scale: AcousticScale
    beam: Annotated[float, Range(1e-6, 1e6)]
    max_active: Annotated[int, Range(2, 1_000_000_000)]
    lattice_beam: Annotated[float, Range(1e-6, 1e6)]
    language_model_scale: AcousticScale
    insertion_penalty: Annotated[float, Range(0, 100)]
    silence: Annotated[tuple[Annotated[int, Range(0, 65_535)], ...], Items(1, 65_536)]
    log_priors: Annotated[tuple[Annotated[float, Range(-1e6, 0)], ...], Items(1, 65_536)]

    __post_init__ = check_ranges

    @property
    def decoder(self) -> DecoderConfig:
        """Return the bounds of the search."""
        return DecoderConfig(self.beam, self.max_active, self.lattice_beam)


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModel:
    """ExportedModel: a network as ONNX, the graph to search, grammars, and the settings of all.

    `first_pass` is the grammar of the graph, which `grammar` replaces when lattices are rescored.
    """

    network: bytes
    graph: DecodingGraph
    first_pass: ConstFst
    grammar: ConstFst
    settings: ExportedSettings

    @property
    def second_pass(self) -> SecondPass:
        """Return what rescores lattices of the graph."""
        settings = self.settings
        return SecondPass(
            self.first_pass,
            self.grammar,
            self.graph.words,
            scale=settings.language_model_scale,
            insertion_penalty=settings.insertion_penalty,
            beam=settings.lattice_beam,
        )


def write_archive(path: Path, model: ExportedModel) -> int:
    """Write the archive at once, or leave what was there; return its bytes.

    ValueError for a model that would not be read again. OSError where the folder cannot be written.
    """
    content = BytesIO()
    settings = json.dumps(asdict(model.settings), indent=1, sort_keys=True).encode()
    words = "".join(f"{word}\n" for word in model.graph.words).encode()
    graphs = model.graph.fst, model.first_pass, model.grammar
    parts = (model.network, *(each.to_bytes() for each in graphs), words, settings)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in zip(MEMBERS, parts, strict=True):
            member = zipfile.ZipInfo(name, _FIRST_DAY)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
            _require_room(member)
    with replacing(path) as beside:
        beside.write_bytes(content.getvalue())
    return len(content.getvalue())


def read_archive(path: Path) -> ExportedModel:
    """Read what `write_archive` wrote; ConfigurationError for any other file."""
    where = printable(str(path))
    try:
        with zipfile.ZipFile(path) as archive:
            network, *graphs, words, settings = (_member(archive, name) for name in MEMBERS)
        table = json.loads(settings)
        table["silence"], table["log_priors"] = list(table["silence"]), list(table["log_priors"])
        read = read_record(ExportedSettings, table, SETTINGS)
        names = tuple(words.decode().split("\n")[:-1])
        # What a terminal may be told is no word.
        for name in names if not _PLAIN(words) else ():
            require_visible(name, WORDS)
        num_words, num_senones = len(names), len(read.log_priors)
        limits = {GRAPH: num_senones, FIRST_PASS: num_words - 1, GRAMMAR: num_words - 1}
        searched, first_pass, grammar = (
            _fst(data, name, limit, num_words)
            for (name, limit), data in zip(limits.items(), graphs, strict=True)
        )
        if names[-1] != BACKOFF_WORD:
            raise ValueError(f"{WORDS} ends in {names[-1]!r}: need {BACKOFF_WORD!r}")
        graph = DecodingGraph(searched, names, num_senones)
        return ExportedModel(network, graph, first_pass, grammar, read)
    except _REFUSED as error:
        raise ConfigurationError(
            f"{where}: {printable(str(error), 500)}: need an archive of megahour export"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error.strerror or error}") from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        raise ValueError(f"{name} is packed by method {member.compress_type}: need deflate")
    _require_room(member)
    return archive.read(name)  # which compares its CRC


def _require_room(member: zipfile.ZipInfo) -> None:
    """Raise ValueError for a member that takes more memory than its bytes let expect."""
    most = min(_MAX_MEMBER_BYTES, max(_MAX_RATIO * member.compress_size, _SMALL_BYTES))
    if member.file_size > most:
        raise ValueError(f"{member.filename} has {member.file_size} bytes: need at most {most}")


def _fst(data: bytes, name: str, num_labels: int, num_words: int) -> ConstFst:
    return SearchableGraph(ConstFst.in_bytes(data, name), num_labels, num_words).fst
