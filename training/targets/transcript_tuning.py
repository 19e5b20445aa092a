"""Choose the thresholds of transcripts on development speakers, of whom the truth is known.

What recognizers heard of them is aligned at each candidate, as labelling will align it, and the
labels are compared with the alignment of the true transcripts: by their cross-entropy, the mean of
-log of what a label gives to the right senone. Held-out and unlabelled transcripts have no part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from scipy.special import softmax

from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.engine import Distribute, ScratchTasks, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    GRAPH_STEP,
    TARGETS_TUNING_STEP,
    features_step,
    model_step,
    task_name,
)
from pipeline.sampling import sampling_priority
from pipeline.shards import FeatureRow, read_features
from training.align.labelled import read_lexicon, unknown_words_of
from training.align.network_alignment import batched_log_likelihoods
from training.decode.decoder import AlignmentError, align
from training.decode.graph import alignment_graph
from training.models.store import load_model
from training.sequence_training.forward_backward import StatePosteriors
from training.settings.decoding import TranscriptsConfig
from training.settings.models import ModelConfig
from training.targets.lattice_targets import LatticeSearch
from training.targets.transcript_targets import (
    TranscriptAligner,
    TranscriptPlace,
    UnusableTranscriptError,
    open_aligner,
    own_posteriors,
    trust_of_lattice,
)

NUM_UTTERANCES = 40
"""About so many development utterances are aligned, each once a candidate: some ten minutes."""

GARBAGE_COSTS = (2.0, 3.0, 4.0, 6.0)
MIN_CONFIDENCES = (0.0, 0.7)
WEIGHTS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""The values that are tried beside the recipe's, all garbage costs with all confidences."""

LEAST_PROBABILITY = 1e-4
"""What a label gives to any senone at least, so that no single frame decides."""


@dataclass(frozen=True, slots=True)
class TuningPlace:
    """TuningPlace says what aligns: a run's model, and how transcripts are read."""

    transcripts: TranscriptPlace
    acoustic_scale: float
    model: str
    form: ModelConfig
    lattices: LatticeSearch | None = None


@lru_cache(maxsize=len(MIN_CONFIDENCES) + 1)
def open_trial_aligner(place: TranscriptPlace, min_confidence: float) -> TranscriptAligner:
    """Return the aligner at a confidence, whose graphs serve all garbage costs."""
    config = replace(place.config, min_confidence=min_confidence)
    return replace(open_aligner(place), config=config)


@dataclass(frozen=True, slots=True)
class TrialTask:
    """TrialTask: a shard of development speech, some utterances of which are aligned."""

    name: str
    context: StepContext
    place: TuningPlace
    features: Output
    num_utterances: int


TUNED = ("garbage_cost", "min_confidence", "weight")
"""The settings that are chosen."""


def candidates(config: TranscriptsConfig) -> list[TranscriptsConfig]:
    """Return the recipe's settings first, then others with each garbage cost and confidence."""
    pairs = product(GARBAGE_COSTS, MIN_CONFIDENCES)
    others = [replace(config, garbage_cost=cost, min_confidence=least) for cost, least in pairs]
    return list(dict.fromkeys([config, *others]))


def weights_of(config: TranscriptsConfig) -> list[float]:
    """Return the recipe's weight first, then the others."""
    return list(dict.fromkeys([config.weight, *WEIGHTS]))


@once
def try_candidates(task: TrialTask) -> Commit:
    """Sum the labels' cross-entropy over the frames, by candidate and weight."""
    place = task.place
    config = place.transcripts.config
    tried, weights = candidates(config), weights_of(config)
    sums = np.zeros((len(tried), len(weights)))
    num_frames = 0
    rows = read_features(read_output(task.context.store, task.context.run_uri, task.features))
    for row, scores, own, truth in aligned_rows(task, sample(rows, task.num_utterances)):
        num_frames += len(truth)
        lattice = None
        if place.lattices:
            lattice = own_posteriors(place.lattices, scores / np.float32(place.acoustic_scale))
        for number, each in enumerate(tried):
            words, masses = word_probabilities(place, each, row, scores, truth, lattice)
            for column, weight in enumerate(weights):
                labels = (1 - weight * masses) * own + weight * words
                sums[number, column] -= np.log(np.maximum(labels, LEAST_PROBABILITY)).sum()
    statistics = {"num_frames": num_frames, "cross_entropy": sums.tolist()}
    record = Commit(task.name, task.context.fingerprint, statistics=statistics)
    return task.context.commit(record)


def sample(rows: Sequence[FeatureRow], number: int) -> list[FeatureRow]:
    """Draw utterances that recognizers heard, by a hash of their ids."""
    heard = [row for row in rows if row.hypotheses and row.words]
    return nsmallest(number, heard, key=lambda row: sampling_priority(0, row.utterance_id))


FrameValues = Float64[np.ndarray, " frames"]


def aligned_rows(
    task: TrialTask, rows: Sequence[FeatureRow]
) -> Iterator[
    tuple[FeatureRow, Float32[np.ndarray, "_frames senones"], FrameValues, Int64[np.ndarray, " _f"]]
]:
    """Yield scaled scores, the teacher's probability of each frame's right senone, and that senone.

    Utterances whose true transcripts cannot be aligned are left out.
    """
    place = task.place
    context, scale = task.context, place.acoustic_scale
    torch.set_num_threads(1)
    trained = load_model(context.store, context.run_uri, place.model, place.form)
    aligner = open_aligner(place.transcripts)
    for position, scores in batched_log_likelihoods(rows, trained, 1.0):
        row = rows[position]
        if unknown_words_of(row, aligner.lexicon):
            continue
        graph = alignment_graph(aligner.lexicon, aligner.tree, row.words)
        try:
            truth = align(graph, scale * scores)
        except AlignmentError:
            continue
        own = softmax(scores.astype(np.float64) + trained.log_priors.numpy(), axis=1)
        yield row, scale * scores, own[np.arange(len(truth)), truth], truth


def word_probabilities(
    place: TuningPlace,
    config: TranscriptsConfig,
    row: FeatureRow,
    scores: Float32[np.ndarray, "frames senones"],
    truth: Int64[np.ndarray, " frames"],
    lattice: StatePosteriors | None,
) -> tuple[FrameValues, FrameValues]:
    """Return what the words give to each frame's right senone, and to all; 0 without alignment.

    They count as far as the run's own `lattice` agrees, if it is asked.
    """
    words, masses = np.zeros(len(truth)), np.zeros(len(truth))
    aligner = open_trial_aligner(place.transcripts, config.min_confidence)
    frame_cost = place.acoustic_scale * config.garbage_cost
    try:
        found = aligner.posteriors(row.hypotheses, scores, frame_cost)
    except UnusableTranscriptError:
        return words, masses
    is_right = found.senones == truth[found.frames]
    np.add.at(words, found.frames[is_right], found.probabilities[is_right])
    np.add.at(masses, found.frames, found.probabilities)
    masses = np.minimum(masses, 1.0)
    if lattice is None:
        return words, masses
    trust = trust_of_lattice(found, lattice, len(truth), config.lattice_agreement)
    return trust * words, trust * masses


def tune_transcripts(
    place: TuningPlace, settings: Mapping[str, Any], distribute: Distribute
) -> StepResult:
    """Choose garbage cost, confidence and weight; without a frame to compare, the recipe's.

    `settings` are all that decides the trials.
    """
    transcripts = place.transcripts
    store, run_uri, config = transcripts.store, transcripts.run_uri, transcripts.config
    features = features_step(DEV)
    reads = [features, ALIGNMENT_STEP, model_step(place.model)]
    reads += [GRAPH_STEP] if place.lattices else []
    lexicon = read_lexicon(store, run_uri, transcripts.corpus_uri, reads)

    def choose(step: StepRun) -> Manifest:
        shards = read_manifest(store, run_uri, features).outputs
        scratch = ScratchTasks(step.context, distribute)
        number = -(-NUM_UTTERANCES // len(shards))
        tasks = [
            TrialTask(task_name(count), step.context.scratch, place, shard, number)
            for count, shard in enumerate(shards)
        ]
        found = scratch.run(tasks, try_candidates, "align what recognizers heard")
        num_frames = sum(each.statistics["num_frames"] for each in found)
        sums = np.sum([each.statistics["cross_entropy"] for each in found], axis=0)
        # Of equal ones the first, which is the recipe's.
        best, column = np.unravel_index(int(sums.argmin()), sums.shape)
        chosen = replace(candidates(config)[best], weight=weights_of(config)[column])
        means = {"chosen": float(sums.min()), "recipe": float(sums[0, 0])}
        statistics = {
            "settings": {name: getattr(chosen, name) for name in TUNED},
            "num_frames": num_frames,
            "cross_entropy": {name: value / max(num_frames, 1) for name, value in means.items()},
        }
        return step.lossless(Tally(), (), statistics)

    spec = StepSpec(
        store,
        run_uri,
        TARGETS_TUNING_STEP,
        settings,
        reads,
        lexicon.digests,
        Repetition.OTHER_LAST_BITS,
    )
    return run_step(spec, choose)


def tuned_transcripts(config: TranscriptsConfig, tuned: Manifest) -> TranscriptsConfig:
    """Return the recipe's settings with what was chosen; ValueError if it is not stated."""
    chosen: dict[str, Any] = tuned.statistic("settings", dict[str, float])
    if chosen.keys() != {*TUNED}:
        raise ValueError(f"{tuned.step}: settings of {sorted(chosen)}: run the step again")
    return replace(config, **chosen)
