"""Choose each model's decoding settings by the word errors of the development speakers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from infra.configuration import plain
from infra.store.object_store import ObjectStore
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    TUNING_STEP,
    features_step,
    model_step,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.shards import FeatureRow
from training.decoding.decoder import DecoderConfig
from training.decoding.decoding_settings import DecodingSettings, TuningConfig
from training.distributed.process_group import CPU
from training.evaluation.decoding import Graphs, count_errors
from training.evaluation.language_model import GivenModel, LanguageModelFiles
from training.evaluation.word_errors import WordErrors
from training.models.registry import ModelConfig
from training.models.store import TrainedModel, load_models
from training.recipes import EvaluationConfig
from training.targets.alignment import read_tree
from training.targets.labelled import read_lexicon, read_shards


def tune(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    tuning: TuningConfig,
    forms: Mapping[str, ModelConfig],
    device: torch.device = CPU,
) -> StepResult:
    """Decode the development speakers over the grid; write each model's choice and curve.

    003 VII-D tunes on its test set; here no held-out speaker has a part in it. The models, of
    these forms by name, are on `device`, the decoder on the CPU.
    """
    features = features_step(DEV)
    reads = [features, ALIGNMENT_STEP, *map(model_step, forms)]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, config)
    reads += files.reads(store, run_uri)

    def choose(context: StepContext) -> StepContents:
        rows = [row for shard in read_shards(store, run_uri, features).values() for row in shard]
        if not any((row.text or "").split() for row in rows):
            raise ValueError("the development speakers have no words: list others in dev.speakers")
        words = lexicon.parse()
        language_model = files.model(store, run_uri, words, config)
        grid = tuning.grid()
        if isinstance(language_model, GivenModel):
            del grid["ngram_order"]  # it has its own
        graphs = Graphs(words, read_tree(store, run_uri), language_model)
        decoder = DecoderConfig(config.beam, config.max_active)
        models = load_models(store, run_uri, forms, device)
        found = {
            name: search(
                recipe_settings(config), grid, partial(total_errors, rows, model, graphs, decoder)
            )
            for name, model in models.items()
        }
        tally = read_manifest(store, run_uri, features).tally_out
        curves = {name: [point.to_json() for point in each.curve] for name, each in found.items()}
        data = json.dumps(curves, indent=1, sort_keys=True).encode()
        output = context.put_output("curves", ".json", data, tally)
        settings = {name: asdict(each.settings) for name, each in found.items()}
        return StepContents.of_all(tally, (output,), {"settings": settings})

    resolved = {"evaluation": plain(config), "tuning": plain(tuning)}
    digests = {**lexicon.digests, **files.digests}
    spec = StepSpec(store, run_uri, TUNING_STEP, resolved, reads, digests)
    return run_step(spec, choose)


def recipe_settings(config: EvaluationConfig) -> DecodingSettings:
    """Return the settings that a recipe states, from which tuning begins."""
    return DecodingSettings(config.acoustic_scale, config.ngram_order)


def tuned_settings(store: ObjectStore, run_uri: str) -> dict[str, DecodingSettings]:
    """Return the settings that tuning chose for each model of the run."""
    chosen = read_manifest(store, run_uri, TUNING_STEP).statistics["settings"]
    return {name: DecodingSettings(**each) for name, each in chosen.items()}


def total_errors(
    rows: Sequence[FeatureRow],
    model: TrainedModel,
    graphs: Graphs,
    decoder: DecoderConfig,
    settings: Sequence[DecodingSettings],
) -> list[WordErrors]:
    """Decode the rows at each settings; return the word errors of each."""
    description = f"tune at {len(settings)} settings"
    found = count_errors(rows, model, settings, graphs, decoder, description)
    return [sum(each.values(), WordErrors()) for each in found]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """CurvePoint: settings that were tried, which of them was varied, and the word errors."""

    varied: str
    settings: DecodingSettings
    errors: WordErrors

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        counts = {**asdict(self.errors), "wer": self.errors.word_error_rate}
        return {"varied": self.varied, "settings": asdict(self.settings), "word_errors": counts}


@dataclass(frozen=True, slots=True)
class Tuned:
    """Tuned holds the chosen settings, and all that were tried."""

    settings: DecodingSettings
    curve: Sequence[CurvePoint]


def search(
    start: DecodingSettings,
    grid: Mapping[str, Sequence[int | float]],
    count: Callable[[Sequence[DecodingSettings]], Sequence[WordErrors]],
) -> Tuned:
    """Choose one setting after the other: the value of the fewest word errors.

    A value must gain an error to replace what `start` states or the grid lists before it. Decodes
    once for the start and each other value: the grid's sum, where all its pairs were a product.
    """
    (errors,) = count([start])
    best = CurvePoint("start", start, errors)
    curve = [best]
    for setting, values in grid.items():
        varied = dict.fromkeys(best.settings.with_value(setting, value) for value in values)
        tried = [each for each in varied if each != best.settings]
        if not tried:
            continue
        points = [CurvePoint(setting, *each) for each in zip(tried, count(tried), strict=True)]
        curve += points
        best = min([best, *points], key=lambda point: point.errors.errors)
    return Tuned(best.settings, curve)
