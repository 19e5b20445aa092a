"""Score the run's models on the held-out subset (paper 003 VII-B, VII-D, VIII-C)."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from infra.configuration import plain
from infra.store.object_store import ObjectStore
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import read_manifest, subsets_of_run
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    DEV,
    EVALUATION_STEP,
    HELDOUT,
    STUDENT,
    TEACHER,
    TUNING_STEP,
    features_step,
    model_step,
    sequence_trained,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.shards import FeatureRow
from pipeline.splicing import low_rate_alignment
from training.decoding.decoder import DecoderConfig
from training.decoding.decoding_settings import DecodingSettings
from training.distributed.process_group import CPU
from training.evaluation.decoding import Graphs, count_errors, placement_of
from training.evaluation.language_model import LanguageModelFiles
from training.evaluation.tuning import recipe_settings, tuned_settings
from training.evaluation.word_errors import WordErrors, werr
from training.models.registry import ModelConfig
from training.models.store import TrainedModel, load_models
from training.recipes import EvaluationConfig
from training.targets.alignment import log_likelihoods, network_alignments, read_tree
from training.targets.labelled import Alignments, read_lexicon, read_shards


def evaluate(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    forms: Mapping[str, ModelConfig],
    device: torch.device = CPU,
) -> StepResult:
    """Decode the held-out subset with each model; write word and frame errors by placement.

    The models, of these forms by name, are on `device`, the decoder on the CPU.
    """
    features = features_step(HELDOUT)
    is_tuned = DEV in subsets_of_run(store, run_uri, features_step)
    reads = [features, ALIGNMENT_STEP, *map(model_step, forms)]
    reads += [TUNING_STEP] if is_tuned else []
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, config)
    reads += files.reads(store, run_uri)

    def score(context: StepContext) -> StepContents:
        rows = [row for shard in read_shards(store, run_uri, features).values() for row in shard]
        if not rows:
            raise ValueError("the held-out subset is empty: list speakers in heldout.speakers")
        if not any((row.text or "").split() for row in rows):
            raise ValueError("the held-out subset has no words: list others in heldout.speakers")
        models = load_models(store, run_uri, forms, device)
        words, tree = lexicon.parse(), read_tree(store, run_uri)
        language_model = files.model(store, run_uri, words, config)
        settings = dict.fromkeys(forms, recipe_settings(config))
        settings |= tuned_settings(store, run_uri) if is_tuned else {}
        graphs = Graphs(words, tree, language_model)
        errors = count_by_model(
            rows, models, settings, graphs, DecoderConfig(config.beam, config.max_active)
        )
        # Frame accuracy counts against the teacher's alignment of the transcripts.
        place = words, tree, config.acoustic_scale
        reference = network_alignments(rows, models[TEACHER], *place)
        scores = word_error_scores(errors) | model_scores(rows, models, reference)
        scores |= {"decoding": plain(settings)} if is_tuned else {}
        heldout = read_manifest(store, run_uri, features).tally_out
        data = json.dumps(scores, indent=1, sort_keys=True).encode()
        output = context.put_output("scores", ".json", data, heldout)
        statistics = {"language_model": dict(language_model.statistics)}
        return StepContents.of_all(heldout, (output,), statistics)

    digests = {**lexicon.digests, **files.digests}
    spec = StepSpec(store, run_uri, EVALUATION_STEP, plain(config), reads, digests)
    return run_step(spec, score)


def count_by_model(
    rows: Sequence[FeatureRow],
    models: Mapping[str, TrainedModel],
    settings: Mapping[str, DecodingSettings],
    graphs: Graphs,
    decoder: DecoderConfig,
) -> dict[str, dict[str, WordErrors]]:
    """Decode the rows with each model at its settings; return word errors by placement."""
    found = {}
    for name, model in models.items():
        description = f"decode with {name}"
        (found[name],) = count_errors(rows, model, [settings[name]], graphs, decoder, description)
    return found


def word_error_scores(errors: Mapping[str, Mapping[str, WordErrors]]) -> dict[str, Any]:
    """Return counts and rates by model and placement, and the student's WERR by placement.

    `werr_smbr` compares the two after sequence training, as Table II does, where both had it.
    """
    rates = {
        # A placement whose transcripts are all empty has no rate.
        name: {
            placement: counts.word_error_rate
            for placement, counts in by_placement.items()
            if counts.reference_words
        }
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


def model_scores(
    rows: Sequence[FeatureRow], models: Mapping[str, TrainedModel], reference: Alignments
) -> dict[str, Any]:
    """Return each model's frame accuracy by placement, and its size."""
    return {
        "frame_accuracy": {
            name: frame_accuracy(rows, model, reference) for name, model in models.items()
        },
        "models": {
            name: {"num_parameters": sum(each.numel() for each in trained.model.parameters())}
            for name, trained in models.items()
        },
    }


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
