"""Lattice targets: state posteriors of the teacher's search, in the form of k best logits.

What the language model knows reaches the student: an utterance without transcript is decoded by the
evaluation's language model, and forward-backward over its lattice gives the probability of each
senone at each frame. All tasks map the run's graph and grammars.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import tee
from typing import TypeAlias

import numpy as np
from jaxtyping import Float32
from scipy.special import log_softmax

from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, OwnKBest, TeacherFailure, select_kbest
from pipeline.runs.engine import WITHOUT_LATTICE
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, TARGETS_TUNING_STEP
from pipeline.steps.targets import TeacherInput
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.tuning import recipe_settings, tuned_settings
from training.models.store import log_priors
from training.sequence_training.forward_backward import StatePosteriors, interpolated_kbest
from training.sequence_training.lattice_decoder import LatticeError, decode_posteriors
from training.settings.decoding import DecodingSettings, EvaluationConfig, LatticeTargetsConfig

Logits: TypeAlias = Float32[np.ndarray, "_frames senones"]
Score = Callable[[Iterable[TeacherInput]], Iterator[Logits | TeacherFailure]]
"""A stream of utterances to their logits, in the same order."""


def targets_of(
    score: Score,
    inputs: Iterable[TeacherInput],
    targets: Callable[[Logits, TeacherInput], KBest | TeacherFailure],
) -> Iterator[KBest | TeacherFailure]:
    """Yield what `targets` makes of each utterance's logits, and failures as they are."""
    scored, given = tee(inputs)
    for logits, each in zip(score(scored), given, strict=True):
        yield logits if isinstance(logits, TeacherFailure) else targets(logits, each)


@dataclass(frozen=True, slots=True, eq=False)
class LatticeSearch:
    """LatticeSearch makes lattices by a run's graph, and rescores them, at some settings."""

    graphs: BuiltGraphs
    settings: DecodingSettings
    config: LatticeTargetsConfig

    def posteriors(self, log_likelihoods: Float32[np.ndarray, "frames senones"]) -> StatePosteriors:
        """Return how probable each senone is at each frame; LatticeError without a lattice.

        Log-likelihoods are divided by priors, and not scaled.
        """
        scores = self.settings.acoustic_scale * log_likelihoods
        second_pass = self.graphs.second_pass(self.settings, self.config.lattice_beam)
        graph = self.graphs.graph
        return decode_posteriors(graph, scores.astype(np.float32), self.config, second_pass)


@dataclass(frozen=True, slots=True, eq=False)
class LatticeTeacher:
    """LatticeTeacher answers the targets step: logits from a device, lattices on this core."""

    score: Score
    k: int
    search: LatticeSearch
    log_priors: Float32[np.ndarray, " senones"]
    tail_samples: int = 0

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        """Yield each utterance's targets, or the teacher's own where it has no lattice."""
        return targets_of(self.score, inputs, self._targets)

    def _targets(self, logits: Logits, given: TeacherInput) -> KBest:
        columns, weight = (self.k, self.tail_samples, given.seed), self.search.config.weight
        if weight == 0 or not len(logits):
            return select_kbest(logits, *columns)
        try:
            # Posteriors divided by priors, as a hybrid system decodes (003 II-A).
            found = self.search.posteriors(log_softmax(logits, axis=1) - self.log_priors)
        except LatticeError as error:
            kbest = select_kbest(logits, *columns)
            return OwnKBest.of(kbest, WITHOUT_LATTICE, "lattice_failed", str(error))
        return interpolated_kbest(logits, found, weight, *columns)


def open_lattice_teacher(
    store: ObjectStore,
    run_uri: str,
    score: Score,
    k: int,
    config: LatticeTargetsConfig,
    settings: DecodingSettings,
    tail_samples: int = 0,
) -> LatticeTeacher:
    """Open the teacher of a run whose graph was built, with the priors of the labelled data.

    `score` makes the logits, by servers of `serve_logits`; `settings` are those of the search.
    """
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistic("senone_counts", list[int])
    search = LatticeSearch(BuiltGraphs.of(store, run_uri), settings, config)
    return LatticeTeacher(score, k, search, log_priors(counts).numpy(), tail_samples)


def search_settings(
    store: ObjectStore,
    run_uri: str,
    evaluation: EvaluationConfig,
    lattices: LatticeTargetsConfig,
    tuned_model: str = "",
) -> DecodingSettings:
    """Return the settings of the teacher's search: what the recipe states for lattices comes first.

    What it leaves open is what was tuned for `tuned_model`, or else the evaluation's.
    """
    settings = recipe_settings(evaluation)
    if tuned_model:
        settings = tuned_settings(store, run_uri, TARGETS_TUNING_STEP)[tuned_model]
    return replace(
        settings,
        acoustic_scale=lattices.acoustic_scale or settings.acoustic_scale,
        ngram_order=lattices.ngram_order or settings.ngram_order,
    )
