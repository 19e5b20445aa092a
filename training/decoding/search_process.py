"""Search decoding graphs in a process of its own, so that no utterance holds up a rank or a step.

kaldi-decoder holds the GIL while it searches: no thread of a rank would answer the other ranks.
"""

import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import kaldifst

from infra.bounded_process import BoundedProcess, CallError
from training.decoding.graph.hclg import DecodingGraph

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
