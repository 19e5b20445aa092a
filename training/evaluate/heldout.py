"""Decode the held-out subset with each model, and score it (paper 003 VII-B, VII-D, VIII-C).

A task decodes a slice with one model: words, times, confidence, frames.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.commit import Commit, Repetition, once
from pipeline.runs.engine import ScratchTasks, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output, subsets_of_run
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    DEV,
    EVALUATION_ERRORS,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    GRAPH_STEP,
    HELDOUT,
    TEACHER,
    TUNING_STEP,
    features_step,
    model_step,
)
from pipeline.shards import FeatureRow
from pipeline.splicing import low_rate_alignment
from training.align.labelled import read_lexicon, read_tree
from training.align.network_alignment import align_row
from training.decode.decoder import Span, word_spans
from training.decode.rescoring import Hypothesis
from training.decode.senones import Unaligned
from training.evaluate.scores import ModelScores, model_scores, speaker_scores, word_error_scores
from training.evaluate.slices import (
    DecodingPlace,
    DecodingTask,
    ModelsToDecode,
    Slice,
    out_of_vocabulary,
    scored_pieces,
    slices,
)
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.tuning import recipe_settings, tuned_settings
from training.evaluate.word_errors import (
    DecodedUtterance,
    DecodedWord,
    UtteranceErrors,
    file_order,
    hypothesis_ctm,
    hypothesis_trn,
    read_decoded,
    reference_stm,
    reference_trn,
    write_decoded,
    write_errors,
)
from training.models.parameter_count import num_parameters
from training.settings.decoding import DecodingSettings, EvaluationConfig

_LOW_RATE_MS = STACK * FRAME_SHIFT_MS


@dataclass(frozen=True, slots=True)
class HypothesisTask(DecodingTask):
    """HypothesisTask is one slice to decode with one model, at its settings.

    `labels` are the scale at which this task's model aligns the transcripts, or else the slice as
    an earlier model decoded it, with the labels of its alignment.
    """

    rows: Slice
    model: str
    settings: DecodingSettings
    labels: float | Output


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """_Found is kept of a piece once its logits are released."""

    first_frame: int
    has_failed: bool
    words: tuple[DecodedWord, ...]
    best_senones: np.ndarray
    labels: tuple[int, ...]


@once
def decode_slice(task: HypothesisTask) -> Commit:
    """Decode the utterances of a slice on a worker; its logits never leave the task."""
    context, place = task.context, task.place
    store, run_uri = context.store, context.run_uri
    lexicon = read_lexicon(store, run_uri, place.corpus_uri, [ALIGNMENT_STEP]).parse()
    tree = read_tree(store, run_uri)
    second_pass = place.second_pass(task.settings)
    model, rows = place.model(task.model), place.rows(task.rows)
    known: dict[str, tuple[int, ...]] = {}
    if isinstance(task.labels, Output):
        before = read_decoded(read_output(context.store, context.run_uri, task.labels))
        known = {each.utterance_id: each.labels for each in before}
    found: dict[int, list[_Found]] = defaultdict(list)
    for piece in scored_pieces(rows, model):
        row, scores = rows[piece.row], piece.log_likelihoods
        lattice = place.find_lattice(scores, task.settings.acoustic_scale)
        words: tuple[DecodedWord, ...] = ()
        if lattice is not None:
            hypothesis = second_pass.hypothesis(lattice)
            spans = word_spans(hypothesis.path.senones, hypothesis.path.words, lexicon, tree)
            words = _timed_words(hypothesis, spans, piece.first_frame)
        labels: tuple[int, ...] = ()
        is_whole = len(scores) == len(row.features) // STACK
        if not isinstance(task.labels, Output) and is_whole:
            aligned = align_row(row, task.labels * scores, lexicon, tree)
            # A transcript with a word that the lexicon lacks has errors to count, and no alignment.
            if not isinstance(aligned, Unaligned):
                labels = tuple(low_rate_alignment(aligned, 0).tolist())
        # Posteriors are the likelihoods times the priors; the best senone is theirs.
        best = (scores + model.log_priors.numpy()).argmax(axis=1)
        found[piece.row].append(_Found(piece.first_frame, lattice is None, words, best, labels))
    utterances = [
        _decoded(row, sorted(found[number], key=lambda each: each.first_frame), known)
        for number, row in enumerate(rows)
    ]
    tally = Tally.of(rows)
    output = context.put_output(task.name, ".jsonl", write_decoded(utterances), tally)
    return context.commit(Commit(task.name, context.fingerprint, (output,), tally_in=tally))


def _timed_words(
    hypothesis: Hypothesis, spans: Sequence[Span], first_frame: int
) -> tuple[DecodedWord, ...]:
    return tuple(
        DecodedWord(
            word,
            _LOW_RATE_MS * (first_frame + span.start),
            _LOW_RATE_MS * (span.end - span.start),
            confidence,
        )
        for word, span, confidence in zip(
            hypothesis.path.words, spans, hypothesis.confidences.tolist(), strict=True
        )
    )


def _decoded(
    row: FeatureRow, pieces: Sequence[_Found], known: Mapping[str, tuple[int, ...]]
) -> DecodedUtterance:
    """Put the pieces of an utterance together, and hold its frames against the labels."""
    own = pieces[0].labels if len(pieces) == 1 else ()
    labels = np.array(known.get(row.utterance_id, own), np.int64)
    best = np.concatenate([piece.best_senones for piece in pieces]) if len(labels) else labels
    return DecodedUtterance(
        utterance_id=row.utterance_id,
        speaker_id=row.speaker_id,
        placement=row.placement or WITHOUT_PLACEMENT,
        duration_ms=row.duration_ms,
        reference=row.words,
        words=tuple(word for piece in pieces for word in piece.words),
        has_failed=any(piece.has_failed for piece in pieces),
        num_aligned=len(labels),
        num_correct=int(np.count_nonzero(best == labels)),
        labels=own,
    )


def evaluate(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    models: ModelsToDecode,
) -> StepResult:
    """Decode the held-out subset with each model, a task for each slice of it and each model.

    Hypotheses, references and errors by utterance are kept beside the scores. No utterance is
    left out: a search that finds no path has deleted all words, and one of which no path ends a
    sentence has the best unfinished one.
    """
    features = features_step(HELDOUT)
    is_tuned = DEV in subsets_of_run(store, run_uri)
    reads = [features, ALIGNMENT_STEP, GRAPH_STEP, *map(model_step, models.forms)]
    reads += [TUNING_STEP] if is_tuned else []
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)

    def score(step: StepRun) -> Manifest:
        known = BuiltGraphs.of(store, run_uri).searched_words
        unknown = out_of_vocabulary(store, run_uri, features, known)
        settings = dict.fromkeys(models.forms, recipe_settings(config))
        settings |= tuned_settings(store, run_uri) if is_tuned else {}
        place = DecodingPlace.of(step, corpus_uri, config, models)
        tasks = ScratchTasks(step.context, models.distribute)
        decoded = decode_all(place, tasks, settings, models, config.acoustic_scale)
        num_senones = read_tree(store, run_uri).num_senones
        about: dict[str, Any] = {"decoding": plain(settings)} if is_tuned else {}
        about["out_of_vocabulary"] = plain(unknown)
        about["models"] = {
            model: {"num_parameters": num_parameters(form, num_senones)}
            for model, form in models.forms.items()
        }
        return _scored(step, decoded, about, {"num_unknown_words": unknown.num_unknown})

    spec = StepSpec(
        store,
        run_uri,
        EVALUATION_STEP,
        plain(config),
        reads,
        lexicon.digests,
        # A word at the edge of the beam may be another one where logits have other last bits.
        Repetition.OTHER_LAST_BITS,
    )
    return run_step(spec, score)


def decode_all(
    place: DecodingPlace,
    scratch: ScratchTasks,
    settings: Mapping[str, DecodingSettings],
    models: ModelsToDecode,
    alignment_scale: float,
) -> dict[str, list[Commit]]:
    """Decode every slice with every model; return each model's commits in the slices' order.

    The teacher is first, as it aligns the transcripts, or else the baseline. Then one model follows
    the other, so that a worker keeps one model at a time.
    """
    context = place.context
    parts = slices(read_manifest(context.store, context.run_uri, features_step(HELDOUT)))

    def task(model: str, part: Slice, labels: float | Output) -> HypothesisTask:
        name = f"{model}-{part.name}"
        return HypothesisTask(name, place, part, model, settings[model], labels)

    first = TEACHER if TEACHER in models.forms else BASELINE
    aligning = [task(first, each, alignment_scale) for each in parts]
    aligned = scratch.run(aligning, decode_slice, f"decode with {first}")
    labels = [commit.outputs[0] for commit in aligned]
    others = [name for name in models.forms if name != first]
    tasks = [task(name, *pair) for name in others for pair in zip(parts, labels, strict=True)]
    commits = iter(scratch.run(tasks, decode_slice, f"decode with {', '.join(others)}"))
    return {first: aligned, **{name: [next(commits) for _ in parts] for name in others}}


def _scored(
    step: StepRun,
    decoded: Mapping[str, Sequence[Commit]],
    about: Mapping[str, Any],
    statistics: Mapping[str, Any],
) -> Manifest:
    """Store each model's hypotheses, the errors by utterance, and the scores.

    One model's hypotheses are in memory at a time, beside the errors by utterance of all. The
    manifest's tallies are those of the utterances.
    """
    context = step.context
    files: dict[str, Output] = {}
    models: dict[str, ModelScores] = {}
    errors: dict[str, UtteranceErrors] = {}
    for name, commits in decoded.items():
        utterances = [
            replace(each, labels=())  # which only tasks need, and which take most of the memory
            for commit in commits
            for each in read_decoded(read_output(context.store, context.run_uri, commit.outputs[0]))
        ]
        utterances.sort(key=file_order)
        texts = {f"{name}.trn": hypothesis_trn, f"{name}.ctm": hypothesis_ctm}
        if not models:
            texts |= {"reference.trn": reference_trn, "reference.stm": reference_stm}
        for file, write in texts.items():
            stem, _, suffix = file.rpartition(".")
            files[file] = context.put_output(stem, f".{suffix}", write(utterances), Tally())
        models[name] = ModelScores.of(utterances)
        for each in utterances:
            before = errors.get(each.utterance_id)
            own = {**(before.errors if before else {}), name: each.errors}
            errors[each.utterance_id] = UtteranceErrors(
                each.utterance_id, each.speaker_id, each.placement, each.duration_ms, own
            )
    scored = list(errors.values())
    heldout = read_manifest(context.store, context.run_uri, features_step(HELDOUT)).tally_out
    evaluated = Tally.of(scored)
    assert evaluated == heldout, "every utterance is scored, once"
    files["errors.jsonl"] = context.put_output(
        EVALUATION_ERRORS, ".jsonl", write_errors(scored), heldout
    )
    scores = {
        **word_error_scores(scored),
        **speaker_scores(scored),
        **model_scores(models),
        **about,
        "files": {name: output.key for name, output in files.items()},
    }
    data = json.dumps(scores, indent=1, sort_keys=True).encode()
    output = context.put_output(EVALUATION_SCORES, ".json", data, Tally())
    return step.lossless(heldout, (output, *files.values()), statistics)
