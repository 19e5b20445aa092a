"""Lattice targets: state posteriors of the teacher's search, in the form of k best logits.

What the language model knows reaches the student: an utterance without transcript is decoded by the
evaluation's language model, and forward-backward over its lattice gives the probability of each
senone at each frame. One graph is built for all tasks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import tee
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float32
from scipy.special import log_softmax

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, KBestWithoutLattice, TeacherFailure, select_kbest
from pipeline.records import Tally
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    TARGETS_GRAPH_STEP,
    TARGETS_TUNING_STEP,
)
from pipeline.steps.targets import TeacherInput
from training.align.labelled import read_lexicon
from training.align.network_alignment import read_tree
from training.decode.decoder import SearchError, SearchProcess
from training.decode.grammar import GrammarWeights
from training.decode.graph import decoding_graph
from training.evaluate.language_model import LanguageModelFiles
from training.evaluate.stored_graphs import StoredGraph, put_fst, put_words
from training.evaluate.tuning import recipe_settings, tuned_settings
from training.models.store import log_priors
from training.sequence_training.forward_backward import interpolated_kbest
from training.sequence_training.lattice_decoder import LatticeError, decode_posteriors
from training.settings.decoding import (
    DecodingSettings,
    EvaluationConfig,
    LatticeTargetsConfig,
    target_graph_settings,
)


@lru_cache(maxsize=1)
def open_search(stored: StoredGraph) -> SearchProcess:
    """Start this process's search, or return it if the last one was of the same graph."""
    return SearchProcess(stored)


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
        decode = partial(decode_posteriors, scores=scores.astype(np.float32), beams=self.config)
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
    fst, words = built.outputs
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistic("senone_counts", list[int])
    graph = StoredGraph(store, run_uri, fst, words, len(counts))
    acoustic_scale = DecodingSettings.of(built.statistic("settings", dict[str, Any])).acoustic_scale
    priors = log_priors(counts).numpy()
    return LatticeTeacher(score, k, config, graph, acoustic_scale, priors, tail_samples)


def build_target_graph(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    evaluation: EvaluationConfig,
    lattices: LatticeTargetsConfig,
    tuned_model: str = "",
) -> StepResult:
    """Build the graph once, for all tasks; its statistics state the settings that it is for.

    What the recipe leaves open is what was tuned for `tuned_model`, or else the evaluation's.
    """
    reads = [ALIGNMENT_STEP, BOOTSTRAP_STEP, *([TARGETS_TUNING_STEP] if tuned_model else [])]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, evaluation)
    reads += files.reads(store, run_uri)

    def build(step: StepRun) -> Manifest:
        settings = recipe_settings(evaluation)
        if tuned_model:
            settings = tuned_settings(store, run_uri, TARGETS_TUNING_STEP)[tuned_model]
        settings = replace(
            settings,
            acoustic_scale=lattices.acoustic_scale or settings.acoustic_scale,
            ngram_order=lattices.ngram_order or settings.ngram_order,
        )
        words = lexicon.parse()
        language_model = files.model(store, run_uri, words, evaluation)
        weights = GrammarWeights(settings.language_model_scale, settings.insertion_penalty)
        arpa = language_model.arpa(settings.ngram_order)
        graph = decoding_graph(words, read_tree(store, run_uri), arpa, weights)
        outputs = put_fst(step.context, "graph", graph.fst), put_words(step.context, graph.words)
        statistics = {
            "settings": plain(settings),
            "num_states": len(graph.fst.states),
            "language_model": dict(language_model.statistics),
        }
        return step.lossless(Tally(), outputs, statistics)

    config = target_graph_settings(evaluation, lattices)
    digests = {**lexicon.digests, **files.digests}
    return run_step(StepSpec(store, run_uri, TARGETS_GRAPH_STEP, config, reads, digests), build)
