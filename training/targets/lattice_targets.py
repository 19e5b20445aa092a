"""Lattice targets: state posteriors of the teacher's search, in the form of its k best logits.

What the language model knows reaches the student: an utterance without transcript is decoded, and
forward-backward over its lattice gives the probability of each senone at each frame.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import tee
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float32
from scipy.special import log_softmax

from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, KBestWithoutLattice, TeacherFailure, select_kbest
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, TARGETS_GRAPH_STEP
from pipeline.steps.targets import TeacherInput
from training.configuration.decoding import DecodingSettings
from training.configuration.targets import (
    LatticeTargetsConfig,
)
from training.decoding.graph.graph_text import decode_graph
from training.decoding.search_process import GraphFile, SearchError, SearchProcess
from training.models.store import log_priors
from training.sequence_training.lattice_decoder import (
    LatticeBeams,
    LatticeError,
    decode_posteriors,
)
from training.sequence_training.state_posteriors import interpolated_kbest


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """StoredGraph names the graph of a run that all tasks search."""

    store: ObjectStore
    run_uri: str
    output: Output
    num_senones: int


@lru_cache(maxsize=1)
def open_search(stored: StoredGraph) -> SearchProcess:
    """Start this process's search, or return it if the last one was of the same graph."""
    data = read_output(stored.store, stored.run_uri, stored.output)
    return SearchProcess(GraphFile(decode_graph(data, stored.num_senones)))


Logits: TypeAlias = Float32[np.ndarray, "_frames senones"]
Score = Callable[[Iterable[TeacherInput]], Iterator[Logits | TeacherFailure]]
"""A stream of utterances to their logits, in the same order."""


@dataclass(frozen=True, slots=True, eq=False)
class LatticeTeacher:
    """LatticeTeacher answers the targets step: logits from a device, lattices on this core."""

    score: Score
    k: int
    config: LatticeTargetsConfig
    graph: StoredGraph
    acoustic_scale: float
    log_priors: Float32[np.ndarray, " senones"]
    tail_samples: int = 0

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        """Yield each utterance's targets, or the teacher's own where it has no lattice."""
        scored, given = tee(inputs)
        seeds = (each.seed for each in given)
        for logits, seed in zip(self.score(scored), seeds, strict=True):
            if isinstance(logits, TeacherFailure):
                yield logits
            else:
                yield self._targets(logits, seed)

    def _targets(self, logits: Float32[np.ndarray, "_frames senones"], seed: int) -> KBest:
        columns = self.k, self.tail_samples, seed
        if self.config.weight == 0 or not len(logits):
            return select_kbest(logits, *columns)
        # Posteriors divided by priors, as a hybrid system decodes (003 II-A).
        scores = self.acoustic_scale * (log_softmax(logits, axis=1) - self.log_priors)
        beams = LatticeBeams(self.config.beam, self.config.lattice_beam)
        decode = partial(decode_posteriors, scores=scores.astype(np.float32), beams=beams)
        try:
            found = open_search(self.graph).search(decode, len(logits))
        except (LatticeError, SearchError) as error:
            reason = "lattice_failed" if isinstance(error, LatticeError) else "search_failed"
            return KBestWithoutLattice.of(select_kbest(logits, *columns), reason, str(error))
        return interpolated_kbest(logits, found, self.config.weight, *columns)


def open_lattice_teacher(
    store: ObjectStore,
    run_uri: str,
    score: Score,
    k: int,
    config: LatticeTargetsConfig,
    tail_samples: int = 0,
) -> LatticeTeacher:
    """Open the teacher of a run whose graph was built, with the priors of the labelled data.

    `score` makes the logits, by servers of `serve_logits`.
    """
    built = read_manifest(store, run_uri, TARGETS_GRAPH_STEP)
    (output,) = built.outputs
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistic("senone_counts", list[int])
    graph = StoredGraph(store, run_uri, output, len(counts))
    acoustic_scale = DecodingSettings.of(built.statistic("settings", dict[str, Any])).acoustic_scale
    priors = log_priors(counts).numpy()
    return LatticeTeacher(score, k, config, graph, acoustic_scale, priors, tail_samples)
