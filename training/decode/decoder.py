"""Search best paths through decoding graphs: words, or the senone of every frame.

`SearchProcess` searches in a process of its own, so that no utterance holds up a rank or a step:
kaldi-decoder holds the GIL while it searches, and no thread of a rank would answer the others.
"""

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import kaldi_decoder
import kaldifst
import numpy as np
from jaxtyping import Float32, Int64

from infra.bounded_process import BoundedProcess, CallError
from training.decode.graph import DecodingGraph

# Wide enough to keep the path of a known word sequence, whatever the network's scores are.
ALIGNMENT_BEAM = 1000.0


class AlignmentError(ValueError):
    """AlignmentError reports an utterance with too few frames for its transcript's words."""


@dataclass(frozen=True)
class DecoderConfig:
    """DecoderConfig bounds the search; `beam` is in units of scaled log-likelihood."""

    beam: float = 13.0
    max_active: int = 7000

    def __post_init__(self) -> None:
        """Refuse searches that keep nothing."""
        if not self.beam > 0:
            raise ValueError(f"beam = {self.beam}: need more than 0")
        if self.max_active < 2:
            raise ValueError(f"max_active = {self.max_active}: need at least 2 states a frame")


@dataclass(frozen=True, slots=True, eq=False)
class BestPath:
    """BestPath: the words of a search, and the senone of every frame on their path."""

    words: tuple[str, ...]
    senones: Int64[np.ndarray, " frames"]


def best_path(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: DecoderConfig,
) -> BestPath | None:
    """Return the best path for log-likelihoods divided by priors and scaled; None without one.

    If no path ends a sentence on the last frame, the best unfinished one is taken.
    """
    search = _search(graph, log_likelihoods, config.beam, config.max_active)
    return _traced(graph, search, ends_sentence=True)


class StreamingSearch:
    """StreamingSearch finds best paths while log-likelihoods arrive, those that `best_path` finds.

    Each frame is searched once, whatever the pieces.
    """

    def __init__(self, graph: DecodingGraph, config: DecoderConfig) -> None:
        self._graph, self._config = graph, config
        self.restart()

    def restart(self) -> None:
        """Begin a new utterance."""
        options = _options(self._config.beam, self._config.max_active)
        self._search = kaldi_decoder.FasterDecoder(self._graph.fst, options)
        self._search.init_decoding()

    def advance(self, log_likelihoods: Float32[np.ndarray, "frames senones"]) -> None:
        """Search the next frames; ValueError for scores that are not the graph's."""
        _require_scores(self._graph, log_likelihoods)
        if len(log_likelihoods):
            offset = self._search.num_frames_decoded()
            self._search.advance_decoding(kaldi_decoder.DecodableCtc(log_likelihoods, offset))

    def best(self, ends_sentence: bool) -> BestPath | None:
        """Return the best path so far; if it `ends_sentence`, one that does so, where there is."""
        if not self._search.num_frames_decoded():
            return None
        return _traced(self._graph, self._search, ends_sentence)


def decode(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    config: DecoderConfig,
) -> list[str]:
    """Return the words of the best path, as `best_path` does; none without a path."""
    path = best_path(graph, log_likelihoods, config)
    return list(path.words) if path else []


def align(
    graph: DecodingGraph, log_likelihoods: Float32[np.ndarray, "frames senones"]
) -> Int64[np.ndarray, " frames"]:
    """Return the senone of every frame on the best complete path.

    Raises AlignmentError if the frames are too few for the graph's shortest word sequence.
    """
    search = _search(graph, log_likelihoods, ALIGNMENT_BEAM, np.iinfo(np.int32).max)
    found, path = search.get_best_path()
    if not (found and search.reached_final()):
        raise AlignmentError(f"{len(log_likelihoods)} frames: too few for the words to align")
    _, labels, _, _ = kaldifst.get_linear_symbol_sequence(path)
    # Label 0 is epsilon, so senone s has the input label s + 1.
    return np.asarray(labels, dtype=np.int64) - 1


def _search(
    graph: DecodingGraph,
    log_likelihoods: Float32[np.ndarray, "frames senones"],
    beam: float,
    max_active: int,
) -> kaldi_decoder.FasterDecoder:
    _require_scores(graph, log_likelihoods)
    search = kaldi_decoder.FasterDecoder(graph.fst, _options(beam, max_active))
    search.decode(kaldi_decoder.DecodableCtc(log_likelihoods))
    return search


def _options(beam: float, max_active: int) -> kaldi_decoder.FasterDecoderOptions:
    # Token passing as Kaldi's FasterDecoder: beam pruning, and histogram pruning by max_active.
    return kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active)


def _traced(
    graph: DecodingGraph, search: kaldi_decoder.FasterDecoder, ends_sentence: bool
) -> BestPath | None:
    found, path = search.get_best_path(ends_sentence)
    if not found:
        return None
    _, labels, word_ids, _ = kaldifst.get_linear_symbol_sequence(path)
    words = tuple(graph.words[word_id] for word_id in word_ids)
    # Label 0 is epsilon, so senone s has the input label s + 1.
    return BestPath(words, np.asarray(labels, dtype=np.int64) - 1)


def _require_scores(
    graph: DecodingGraph, log_likelihoods: Float32[np.ndarray, "frames senones"]
) -> None:
    num_columns = log_likelihoods.shape[1]
    if num_columns != graph.num_senones:
        raise ValueError(f"{num_columns} senones: need {graph.num_senones}, the graph's")
    if not np.isfinite(log_likelihoods).all():
        raise ValueError("log-likelihoods are not finite: check the acoustic model's output")


T = TypeVar("T")

CPU_SECONDS_PER_FRAME = 1.0
"""A search may take 33 times as long as the speech does, and as long as short speech needs."""

LEAST_CPU_SECONDS = 60.0


class SearchError(ValueError):
    """SearchError reports an utterance whose search took too long, or ended its process."""


class GraphFile:
    """GraphFile holds a decoding graph in a file without name, for processes on this host.

    The file lasts as long as the object, and no longer than this process, however that ends.
    """

    def __init__(self, graph: DecodingGraph) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        weakref.finalize(self, file.close)
        self.descriptor = file.fileno()
        if not graph.fst.write(_path(self.descriptor)):
            need = f"need room for a graph of {graph.fst.num_states} states: set TMPDIR"
            raise OSError(f"{tempfile.gettempdir()} cannot be written: {need}")
        self.read = partial(_read, self.descriptor, graph.words, graph.num_senones)


def _read(descriptor: int, words: tuple[str, ...], num_senones: int) -> DecodingGraph:
    """Read a graph in a process that has the file open."""
    return DecodingGraph(kaldifst.StdVectorFst.read(_path(descriptor)), words, num_senones)


def _path(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"


class SearchProcess(BoundedProcess[DecodingGraph]):
    """SearchProcess searches one graph, utterance by utterance, in a process of its own."""

    def __init__(self, graph: GraphFile) -> None:
        super().__init__(graph.read, (graph.descriptor,))
        self._graph = graph  # its file is needed for each start of the process

    def search(self, function: Callable[[DecodingGraph], T], num_frames: int) -> T:
        """Return what `function` finds in the graph for an utterance of so many low-rate frames.

        Raises what it raises, and SearchError beyond the limit of CPU time or after a crash.
        """
        limit_s = LEAST_CPU_SECONDS + CPU_SECONDS_PER_FRAME * num_frames
        try:
            return self.call(function, limit_s)
        except CallError as error:
            remedy = "lower the beam, or max_active where the search has one"
            raise SearchError(f"{num_frames} frames: the search {error}: {remedy}") from error
