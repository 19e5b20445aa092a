"""Score a model on the held-out speakers of its run, with the scale that development chose.

All models are decoded with one language model, that of the labelled transcripts, and each chooses
its acoustic scale among the same ones. Held-out speakers choose nothing.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import is_finished, read_manifest, read_output
from pipeline.runs.names import (
    CHECKPOINTS_FOLDER,
    DEV,
    HELDOUT,
    TargetsRound,
    features_step,
    model_step,
)
from pipeline.shards import FeatureRow, read_features
from tests.benchmarks.rotation.lanes import NUM_LANES
from tests.training.decode.whole_graphs import decoding_graph, kneser_ney_arpa, witten_bell_arpa
from training.align.labelled import labelled_transcripts, read_tree
from training.align.network_alignment import log_likelihoods
from training.decode.decoder import DecoderConfig, decode
from training.decode.graph import DecodingGraph
from training.decode.lexicon import parse_lexicon
from training.evaluate.word_errors import word_errors
from training.models.store import TrainedModel, load_model
from training.settings.recipe import Recipe

RECIPE = Path(__file__).parent / "recipe.toml"
CLEAN = "clean"
(SECOND_TEACHER,) = TargetsRound(2, 2).siblings(1)
"""The bidirectional model that labels the second round's targets, which the student learns from."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring: the model `name` of `run` under its row's name, and whose transcripts it knows.

    `language_run` is the run whose labelled transcripts make the language model.
    """

    row: str
    name: str
    run: Path
    language_run: Path
    recipe: Recipe
    result: Path


@dataclass(frozen=True, slots=True)
class UtteranceScore:
    """UtteranceScore: the errors and reference words of one held-out utterance."""

    utterance_id: str
    speaker_id: str
    placement: str
    words: int
    errors: int


def score_all(scorings: Sequence[Scoring]) -> None:
    """Score what has no result yet, two models at a time."""
    missing = [each for each in scorings if not each.result.exists()]
    with ProcessPoolExecutor(NUM_LANES, get_context("spawn")) as pool:
        list(pool.map(_score, missing))


def _score(scoring: Scoring) -> None:
    torch.set_num_threads(1)
    store = ObjectStore((str(scoring.run), str(scoring.language_run)))
    run_uri, config = str(scoring.run), scoring.recipe.evaluation
    model = load_model(store, run_uri, scoring.name, scoring.recipe.models.of(scoring.name))
    graph = graph_of(store, scoring)
    decoder = DecoderConfig(config.beam, config.max_active)
    scales = sorted({config.acoustic_scale, *scoring.recipe.tuning.acoustic_scales})
    curve = _curve(rows_of(store, run_uri, DEV), model, graph, decoder, scales)
    best = min(curve, key=lambda scale: (curve[scale], scale))
    utterances = [
        UtteranceScore(
            row.utterance_id,
            row.speaker_id,
            row.placement or CLEAN,
            len((row.text or "").split()),
            errors,
        )
        for row in rows_of(store, run_uri, HELDOUT)
        for errors in errors_at(row, model, graph, decoder, [best])
    ]
    chosen = {"acoustic_scale": best, "development_errors": curve}
    facts = {**_facts(store, run_uri, scoring.name, model), **chosen}
    data = {"facts": facts, "utterances": [asdict(each) for each in utterances]}
    partial = scoring.result.with_suffix(".partial")
    partial.write_text(json.dumps(data))
    partial.rename(scoring.result)


def graph_of(store: ObjectStore, scoring: Scoring) -> DecodingGraph:
    """Build the graph of a run's lexicon and tree, with the language run's transcripts."""
    config, language_uri = scoring.recipe.evaluation, str(scoring.language_run)
    lexicon = parse_lexicon((scoring.run / "corpus" / "lexicon.txt").read_text())
    estimate = {"kneser_ney": kneser_ney_arpa, "witten_bell": witten_bell_arpa}[config.smoothing]
    sentences = labelled_transcripts(store, language_uri)
    arpa = estimate(sentences, lexicon.pronunciations, config.ngram_order)
    return decoding_graph(lexicon, read_tree(store, str(scoring.run)), arpa)


def rows_of(store: ObjectStore, run_uri: str, subset: str) -> list[FeatureRow]:
    """Read all utterances of a subset, in the order of their ids."""
    outputs = read_manifest(store, run_uri, features_step(subset)).outputs
    rows = [row for each in outputs for row in read_features(read_output(store, run_uri, each))]
    return sorted(rows, key=lambda row: row.utterance_id)


def _curve(
    rows: Sequence[FeatureRow],
    model: TrainedModel,
    graph: DecodingGraph,
    decoder: DecoderConfig,
    scales: Sequence[float],
) -> dict[float, int]:
    """Return the errors of the development speakers at each scale."""
    counts = [errors_at(row, model, graph, decoder, scales) for row in rows]
    return {scale: sum(each) for scale, each in zip(scales, zip(*counts, strict=True), strict=True)}


def errors_at(
    row: FeatureRow,
    model: TrainedModel,
    graph: DecodingGraph,
    decoder: DecoderConfig,
    scales: Sequence[float],
) -> list[int]:
    """Decode one utterance at each scale; its logits are computed once."""
    (scores,) = log_likelihoods([row], model, 1.0)
    reference = (row.text or "").split()
    return [
        word_errors(reference, decode(graph, scale * scores, decoder)).errors for scale in scales
    ]


def _facts(store: ObjectStore, run_uri: str, name: str, model: TrainedModel) -> Mapping[str, Any]:
    """Return what models of one table must share: size, frames, updates."""
    curve = read_manifest(store, run_uri, model_step(name)).statistics["curve"]
    checkpoints = Path(run_uri) / model_step(name) / CHECKPOINTS_FOLDER
    updates = [int(path.stem) for path in checkpoints.glob("*.json") if path.stem.isdecimal()]
    return {
        "parameters": sum(each.numel() for each in model.model.parameters()),
        "senones": model.model.num_senones,
        "frames": sum(point["num_frames"] for point in curve),
        "updates": max(updates, default=0),
        "cross_entropy": curve[-1]["cross_entropy"],
    }


def is_trained(run: Path, name: str) -> bool:
    """Return whether the run has the model."""
    return is_finished(ObjectStore((str(run),)), str(run), model_step(name))


def collect(found: Sequence[Scoring], about: dict[str, Any], target: Path) -> None:
    """Write one line of facts, then one for each placement and speaker, utterance by utterance."""
    scored = {each.row: json.loads(each.result.read_text()) for each in found}
    about |= {"models": {row: each["facts"] for row, each in scored.items()}}
    lines = [json.dumps(about, sort_keys=True)]
    columns = [sorted(each["utterances"], key=_place) for each in scored.values()]
    for (placement, speaker), same in groupby(
        zip(*columns, strict=True), key=lambda u: _place(u[0])[:2]
    ):
        utterances = list(same)
        errors = {
            row: [each[column]["errors"] for each in utterances]
            for column, row in enumerate(scored)
        }
        words = [each[0]["words"] for each in utterances]
        ids = [each[0]["utterance_id"] for each in utterances]
        line = {"placement": placement, "speaker": speaker, "utterances": ids, "words": words}
        lines.append(json.dumps({**line, "errors": errors}))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(f"{line}\n" for line in lines))


def _place(utterance: dict[str, Any]) -> tuple[str, str, str]:
    return utterance["placement"], utterance["speaker_id"], utterance["utterance_id"]
