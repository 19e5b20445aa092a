"""Choose each model's decoding settings by the word errors of the development speakers.

Tasks score the speakers once with each model, and decode the scores at any settings.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, once
from pipeline.runs.engine import ScratchTasks, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    GRAPH_STEP,
    TUNING_STEP,
    features_step,
    model_step,
)
from training.align.labelled import read_lexicon
from training.evaluate.slices import (
    DecodingPlace,
    DecodingTask,
    ModelsToDecode,
    Piece,
    Slice,
    out_of_vocabulary,
    scored_pieces,
    slices,
)
from training.evaluate.word_errors import WordErrors, word_errors
from training.settings.decoding import DecodingSettings, EvaluationConfig, TuningConfig
from training.tensor_encoding import decode_state, encode_state

_MAX_STORED_SCORES = 2**26
"""An object holds about so many scores, 0.25 GB: a task reads one after the other."""


@dataclass(frozen=True, slots=True)
class ScoringTask(DecodingTask):
    """ScoringTask is one slice whose log-likelihoods a model computes, for all trials to read."""

    rows: Slice
    model: str


@dataclass(frozen=True, slots=True)
class TrialTask(DecodingTask):
    """TrialTask is the stored scores of one slice, to decode at several settings."""

    scores: tuple[Output, ...]
    settings: tuple[DecodingSettings, ...]


@once
def score_slice(task: ScoringTask) -> Commit:
    """Store the log-likelihoods of a slice in float32, so that trials decode evaluation's bits."""
    rows = task.place.rows(task.rows)
    context = task.context
    outputs = []
    for batch in _batches(scored_pieces(rows, task.place.model(task.model))):
        encoded = encode_state(
            [
                (p.row, p.first_frame, rows[p.row].text or "", torch.from_numpy(p.log_likelihoods))
                for p in batch
            ]
        )
        outputs.append(context.put_output(task.name, ".npz", encoded, Tally()))
    return context.commit(Commit(task.name, context.fingerprint, tuple(outputs)))


@once
def try_settings(task: TrialTask) -> Commit:
    """Decode a slice's scores at each settings; the commit has the word errors of each.

    An acoustic scale has one search, whose lattices all settings with that scale rescore.
    """
    context, place = task.context, task.place
    second_passes = [place.second_pass(each) for each in task.settings]
    words: dict[int, dict[int, list[list[str]]]] = defaultdict(dict)
    references: dict[int, list[str]] = {}
    for output in task.scores:
        for row, first, text, scores in decode_state(
            read_output(context.store, context.run_uri, output)
        ):
            references[row] = text.split()
            lattices = {
                scale: place.find_lattice(scores.numpy(), scale)
                for scale in dict.fromkeys(each.acoustic_scale for each in task.settings)
            }
            words[row][first] = [
                [*second_pass.best(lattice).words] if lattice is not None else []
                for each, second_pass in zip(task.settings, second_passes, strict=True)
                for lattice in [lattices[each.acoustic_scale]]
            ]
    errors = [WordErrors()] * len(task.settings)
    for row, pieces in words.items():
        for number in range(len(task.settings)):
            found = [word for first in sorted(pieces) for word in pieces[first][number]]
            errors[number] += word_errors(references[row], found)
    statistics = {"errors": [asdict(each) for each in errors]}
    return context.commit(Commit(task.name, context.fingerprint, statistics=statistics))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        sizes = sum(each.log_likelihoods.size for each in (*batch, piece))
        if batch and sizes > _MAX_STORED_SCORES:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


T = TypeVar("T", ScoringTask, TrialTask)
Count = Callable[[Mapping[str, Sequence[DecodingSettings]]], Mapping[str, Sequence[WordErrors]]]
"""Count the word errors of each model at each of some settings; all models together."""


def tune(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    tuning: TuningConfig,
    models: ModelsToDecode,
    name: str = TUNING_STEP,
) -> StepResult:
    """Decode the development speakers over the grid; write each model's choice and curve.

    003 VII-D tunes on its test set; here no held-out speaker has a part in it. Tasks compute each
    model's log-likelihoods once, and keep them in the step's scratch for all settings.
    """
    features = features_step(DEV)
    reads = [features, ALIGNMENT_STEP, GRAPH_STEP, *map(model_step, models.forms)]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)

    def choose(step: StepRun) -> Manifest:
        out_of_vocabulary(store, run_uri, features, ())  # refuses a subset without words
        place = DecodingPlace.of(step, corpus_uri, config, models)
        start, grid = recipe_settings(config), tuning.grid()
        if place.graphs.has_own_order:
            del grid["ngram_order"]
        count = trials(place, ScratchTasks(step.context, models.distribute), models.forms)
        found = search(start, grid, models.forms, count)
        tally = read_manifest(store, run_uri, features).tally_out
        curves = {name: [point.to_json() for point in curve] for name, curve in found.items()}
        data = json.dumps(curves, indent=1, sort_keys=True).encode()
        output = step.context.put_output("curves", ".json", data, tally)
        settings = {name: asdict(best_of(curve).settings) for name, curve in found.items()}
        return step.lossless(tally, (output,), {"settings": settings})

    resolved = {"evaluation": plain(config), "tuning": plain(tuning)}
    last_bits = Repetition.OTHER_LAST_BITS
    spec = StepSpec(store, run_uri, name, resolved, reads, lexicon.digests, last_bits)
    return run_step(spec, choose)


def recipe_settings(config: EvaluationConfig) -> DecodingSettings:
    """Return the settings that a recipe states, from which tuning begins."""
    return DecodingSettings(config.acoustic_scale, config.ngram_order)


def tuned_settings(
    store: ObjectStore, run_uri: str, step: str = TUNING_STEP
) -> dict[str, DecodingSettings]:
    """Return the settings that tuning chose for each model of the run."""
    found = read_manifest(store, run_uri, step)
    chosen = found.statistic("settings", dict[str, dict[str, Any]])
    return {name: DecodingSettings.of(each) for name, each in chosen.items()}


def trials(place: DecodingPlace, scratch: ScratchTasks, models: Iterable[str]) -> Count:
    """Return what counts the development speakers' word errors at settings, for all models at once.

    The log-likelihoods of each model are computed now, where an earlier run has not.
    """
    context = place.context
    parts = slices(read_manifest(context.store, context.run_uri, features_step(DEV)))

    def run(tasks: Sequence[T], function: Callable[[T], Commit], said: str) -> dict[str, Commit]:
        return {each.task: each for each in scratch.run(tasks, function, said)}

    scoring = [
        ScoringTask(f"{name}-scores-{part.name}", place, part, name)
        for name in models
        for part in parts
    ]
    scores = run(scoring, score_slice, "score the development speakers")
    # After a kill the same search asks the same again, so a stage's number names what was tried.
    stages = itertools.count(1)

    def count(asked: Mapping[str, Sequence[DecodingSettings]]) -> dict[str, list[WordErrors]]:
        stage = next(stages)
        tasks = [
            TrialTask(
                f"{name}-trial-{stage}-{part.name}",
                place,
                scores[f"{name}-scores-{part.name}"].outputs,
                tuple(settings),
            )
            for name, settings in asked.items()
            for part in parts
        ]
        commits = run(tasks, try_settings, f"decode at stage {stage} of tuning")
        found: dict[str, list[WordErrors]] = {}
        for name, settings in asked.items():
            found[name] = [WordErrors()] * len(settings)
            for part in parts:
                commit = commits[f"{name}-trial-{stage}-{part.name}"]
                counted = [WordErrors(**each) for each in commit.statistics["errors"]]
                found[name] = [a + b for a, b in zip(found[name], counted, strict=True)]
        return found

    return count


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


def search(
    start: DecodingSettings,
    grid: Mapping[str, Sequence[int | float]],
    models: Iterable[str],
    count: Count,
) -> dict[str, list[CurvePoint]]:
    """Choose one setting after the other: the value of the fewest word errors; return the curves.

    A value must gain an error to replace what `start` states or the grid lists before it. There is
    one decoding for the start and one for each other value: as many as the lists are long, where
    the whole grid would be their product.
    """
    counted = count({name: [start] for name in models})
    curves = {name: [CurvePoint("start", start, errors)] for name, (errors,) in counted.items()}
    for setting, values in grid.items():
        tried = {}
        for name, curve in curves.items():
            best = best_of(curve).settings
            varied = dict.fromkeys(best.with_value(setting, value) for value in values)
            tried[name] = [each for each in varied if each != best]
        # No model has changed this setting before, so all try the same values.
        if not any(tried.values()):
            continue
        for name, errors in count(tried).items():
            pairs = zip(tried[name], errors, strict=True)
            curves[name] += [CurvePoint(setting, *each) for each in pairs]
    return curves


def best_of(curve: Sequence[CurvePoint]) -> CurvePoint:
    """Return the first point of the fewest errors."""
    return min(curve, key=lambda point: point.errors.errors)
