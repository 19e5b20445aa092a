"""Score the run's models on the held-out subset (paper 003 VII-B, VII-D, VIII-C)."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from infra.configuration import plain
from infra.store.object_store import ObjectStore
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    EVALUATED_MODELS,
    EVALUATION_STEP,
    HELDOUT,
    STUDENT,
    TEACHER,
    features_step,
    model_step,
    sequence_trained,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.shards import FeatureRow
from pipeline.splicing import low_rate_alignment
from training.decoding.decoder import DecoderConfig, decode
from training.decoding.graph.hclg import DecodingGraph, decoding_graph
from training.decoding.lexicon import Lexicon
from training.distributed.process_group import CPU
from training.evaluation.language_model import EstimatedModel, GivenModel, LanguageModelFiles
from training.evaluation.word_errors import WordErrors, werr, word_errors
from training.models.store import TrainedModel, load_model
from training.recipes import EvaluationConfig
from training.targets.alignment import log_likelihoods, network_alignments, read_tree
from training.targets.labelled import Alignments, read_lexicon, read_shards

WITHOUT_PLACEMENT = "all"


def evaluate(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    device: torch.device = CPU,
    names: Sequence[str] = EVALUATED_MODELS,
) -> StepResult:
    """Decode the held-out subset with each model; write word and frame errors by placement.

    The models `names` are on `device`, the decoder on the CPU.
    """
    features = features_step(HELDOUT)
    reads = [features, ALIGNMENT_STEP, *map(model_step, names)]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, config)

    def score(context: StepContext) -> StepContents:
        rows = [row for shard in read_shards(store, run_uri, features).values() for row in shard]
        if not rows:
            raise ValueError("the held-out subset is empty: list speakers in heldout.speakers")
        models = {name: load_model(store, run_uri, name).to(device) for name in names}
        language_model = files.model(store, run_uri, lexicon.parse(), config)
        scores = score_models(store, run_uri, lexicon.parse(), language_model, config, rows, models)
        heldout = read_manifest(store, run_uri, features).tally_out
        data = json.dumps(scores, indent=1, sort_keys=True).encode()
        output = context.put_output("scores", ".json", data, heldout)
        statistics = {"language_model": dict(language_model.statistics)}
        return StepContents.of_all(heldout, (output,), statistics)

    digests = {**lexicon.digests, **files.digests}
    spec = StepSpec(store, run_uri, EVALUATION_STEP, plain(config), reads, digests)
    return run_step(spec, score)


def score_models(
    store: ObjectStore,
    run_uri: str,
    lexicon: Lexicon,
    language_model: EstimatedModel | GivenModel,
    config: EvaluationConfig,
    rows: Sequence[FeatureRow],
    models: Mapping[str, TrainedModel],
) -> dict[str, Any]:
    """Return word error rates, their reduction and frame accuracies, by model and placement."""
    arpa = language_model.arpa(config.ngram_order)
    graph = decoding_graph(lexicon, read_tree(store, run_uri), arpa)
    decoder = DecoderConfig(config.beam, config.max_active)
    # 003 VII-D tunes the acoustic scale on its test set; here other speakers fixed it.
    errors = {
        name: count_errors(rows, model, graph, decoder, config.acoustic_scale, name)
        for name, model in models.items()
    }
    # Frame accuracy counts against the teacher's alignment of the transcripts.
    reference = network_alignments(
        rows, models[TEACHER], lexicon, read_tree(store, run_uri), config.acoustic_scale
    )
    return {
        **word_error_scores(errors),
        "frame_accuracy": {
            name: frame_accuracy(rows, model, reference) for name, model in models.items()
        },
        "models": {
            name: {"num_parameters": sum(each.numel() for each in trained.model.parameters())}
            for name, trained in models.items()
        },
    }


def word_error_scores(errors: Mapping[str, Mapping[str, WordErrors]]) -> dict[str, Any]:
    """Return counts and rates by model and placement, and the student's WERR by placement.

    `werr_smbr` compares the two after sequence training, as Table II does, where both had it.
    """
    rates = {
        name: {placement: counts.word_error_rate for placement, counts in by_placement.items()}
        for name, by_placement in errors.items()
    }
    scores = {"wer": rates, "werr": reductions(rates[BASELINE], rates[STUDENT])}
    trained_on = [sequence_trained(name) for name in (BASELINE, STUDENT)]
    if errors.keys() >= set(trained_on):
        scores["werr_smbr"] = reductions(*(rates[name] for name in trained_on))
    return {
        **scores,
        "word_errors": {
            name: {placement: asdict(counts) for placement, counts in by_placement.items()}
            for name, by_placement in errors.items()
        },
    }


def reductions(baseline: Mapping[str, float], student: Mapping[str, float]) -> dict[str, float]:
    """Return the WERR by placement, where the baseline has errors."""
    return {place: werr(rate, student[place]) for place, rate in baseline.items() if rate > 0}


def count_errors(
    rows: Sequence[FeatureRow],
    model: TrainedModel,
    graph: DecodingGraph,
    decoder: DecoderConfig,
    acoustic_scale: float,
    name: str,
) -> dict[str, WordErrors]:
    """Decode the rows with a model; return the word errors by placement."""
    errors: dict[str, WordErrors] = defaultdict(WordErrors)
    for row in tqdm(rows, desc=f"decode with {name}", unit="utterance"):
        (scores,) = log_likelihoods([row], model, acoustic_scale)
        hypothesis = decode(graph, scores, decoder)
        # Errors are summed before dividing, so that long utterances weigh by their words.
        errors[placement_of(row)] += word_errors((row.text or "").split(), hypothesis)
    return dict(sorted(errors.items()))


def frame_accuracy(
    rows: Sequence[FeatureRow], model: TrainedModel, reference: Alignments
) -> dict[str, float]:
    """Return the percentage of frames whose best senone is that of the teacher's alignment."""
    correct: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for row in rows:
        aligned = reference[row.utterance_id]
        if isinstance(aligned, str):
            continue
        (scores,) = log_likelihoods([row], model, 1.0)
        # The best senone is that of the posteriors, so the priors are added again.
        best = (scores + model.log_priors.numpy()).argmax(axis=1)
        labels = low_rate_alignment(aligned, 0)
        correct[placement_of(row)] += int(np.count_nonzero(best == labels))
        total[placement_of(row)] += len(labels)
    return {placement: 100 * correct[placement] / total[placement] for placement in sorted(total)}


def placement_of(row: FeatureRow) -> str:
    """Return the device's placement, if the corpus has it."""
    return row.placement or WITHOUT_PLACEMENT
