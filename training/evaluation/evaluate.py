"""Score the run's models on the held-out subset (paper 003 VII-B, VII-D, VIII-C)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, committed_tasks
from pipeline.runs.manifest import Output, read_manifest, read_output, subsets_of_run
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    DEV,
    EVALUATION_ERRORS,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    HELDOUT,
    SCRATCH_FOLDER,
    TEACHER,
    TUNING_STEP,
    features_step,
    model_step,
)
from pipeline.runs.step import (
    StepContents,
    StepResult,
    StepSpec,
    commit_each,
    run_step,
)
from training.configuration.decoding import DecodingSettings, EvaluationConfig
from training.decoding.decoder import DecoderConfig
from training.evaluation.decoded import (
    DecodedUtterance,
    file_order,
    hypothesis_ctm,
    hypothesis_trn,
    read_decoded,
    reference_stm,
    reference_trn,
)
from training.evaluation.hypotheses import AlignedBefore, AlignsAt, HypothesisTask, decode_slice
from training.evaluation.language_model import LanguageModelFiles, store_arpas
from training.evaluation.scores import ModelScores, model_scores, speaker_scores, word_error_scores
from training.evaluation.slices import (
    DecodingPlace,
    ModelsToDecode,
    Slice,
    count_unknown_words,
    slices,
)
from training.evaluation.tuning import recipe_settings, tuned_settings
from training.evaluation.utterance_errors import UtteranceErrors, write_errors
from training.models.parameter_count import num_parameters
from training.targets.alignment import read_tree
from training.targets.labelled import read_lexicon


def evaluate(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: EvaluationConfig,
    models: ModelsToDecode,
) -> StepResult:
    """Decode the held-out subset with each model, a task for each slice of it and each model.

    Hypotheses, references and errors by utterance are kept beside the scores. No utterance is
    left out: a search that finds no path has deleted all words.
    """
    features = features_step(HELDOUT)
    is_tuned = DEV in subsets_of_run(store, run_uri, features_step)
    reads = [features, ALIGNMENT_STEP, *map(model_step, models.names)]
    reads += [TUNING_STEP] if is_tuned else []
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, config)
    reads += files.reads(store, run_uri)

    def score(context: StepContext) -> StepContents:
        words = lexicon.parse()
        unknown = count_unknown_words(store, run_uri, features, words.pronunciations.keys())
        settings = dict.fromkeys(models.names, recipe_settings(config))
        settings |= tuned_settings(store, run_uri) if is_tuned else {}
        language_model = files.model(store, run_uri, words, config)
        scratch = replace(context, step=f"{context.step}/{SCRATCH_FOLDER}")
        orders = {each.ngram_order for each in settings.values()}
        place = DecodingPlace(
            scratch,
            corpus_uri,
            DecoderConfig(config.beam, config.max_active),
            store_arpas(scratch, language_model, orders),
            models.forms,
            models.device,
        )
        decoded = decode_all(place, settings, models, config.acoustic_scale)
        about: dict[str, Any] = {"decoding": plain(settings)} if is_tuned else {}
        about["models"] = model_sizes(models, read_tree(store, run_uri).num_senones)
        statistics: dict[str, Any] = {"language_model": dict(language_model.statistics)}
        statistics["num_unknown_words"] = unknown
        return contents(context, fold(context, decoded), about, statistics)

    digests = {**lexicon.digests, **files.digests}
    place = store, run_uri, EVALUATION_STEP, plain(config), reads, digests
    # A word at the edge of the beam may be another one where logits have other last bits.
    return run_step(StepSpec(*place, Repetition.OTHER_LAST_BITS), score)


def decode_all(
    place: DecodingPlace,
    settings: Mapping[str, DecodingSettings],
    models: ModelsToDecode,
    alignment_scale: float,
) -> dict[str, list[Commit]]:
    """Decode every slice with every model; return each model's commits in the slices' order.

    The teacher is first, as it aligns the transcripts, or else the baseline. Then one model follows
    the other, so that a worker keeps one graph and one model at a time.
    """
    context = place.context
    parts = slices(read_manifest(context.store, context.run_uri, features_step(HELDOUT)))

    def task(model: str, part: Slice, labels: AlignedBefore | AlignsAt) -> HypothesisTask:
        name = f"{model}-{part.name}"
        return HypothesisTask(name, place, part, model, settings[model], labels)

    def run(tasks: Sequence[HypothesisTask], description: str) -> list[Commit]:
        by_name = {each.name: each for each in tasks}
        return commit_each(committed, by_name, decode_slice, models.distribute, description)

    committed = committed_tasks(context)
    aligns = AlignsAt(alignment_scale)
    first = TEACHER if TEACHER in models.names else BASELINE
    aligned = run([task(first, each, aligns) for each in parts], f"decode with {first}")
    labels = [AlignedBefore(commit.outputs[0]) for commit in aligned]
    others = [name for name in models.names if name != first]
    tasks = [task(name, *pair) for name in others for pair in zip(parts, labels, strict=True)]
    commits = iter(run(tasks, f"decode with {', '.join(others)}"))
    return {first: aligned, **{name: [next(commits) for _ in parts] for name in others}}


def model_sizes(models: ModelsToDecode, num_senones: int) -> dict[str, dict[str, int]]:
    """Return the number of weights of each model."""
    return {
        name: {"num_parameters": num_parameters(form, num_senones)}
        for name, form in models.forms.items()
    }


@dataclass(frozen=True, slots=True)
class Folded:
    """Folded: all hypotheses, as files and as counts by utterance and by model."""

    files: Mapping[str, Output]
    utterances: Sequence[UtteranceErrors]
    models: Mapping[str, ModelScores]


def fold(context: StepContext, decoded: Mapping[str, Sequence[Commit]]) -> Folded:
    """Store each model's hypotheses, and add up errors by utterance.

    One model's hypotheses are in memory at a time, beside the errors by utterance of all.
    """
    files: dict[str, Output] = {}
    models: dict[str, ModelScores] = {}
    errors: dict[str, UtteranceErrors] = {}
    for name, commits in decoded.items():
        utterances = read_hypotheses(context, commits)
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
    return Folded(files, list(errors.values()), models)


def read_hypotheses(context: StepContext, commits: Sequence[Commit]) -> list[DecodedUtterance]:
    """Read what tasks decoded with one model, in the order of the scoring files."""
    utterances = [
        replace(each, labels=())  # which only tasks need, and which take most of the memory
        for commit in commits
        for each in read_decoded(read_output(context.store, context.run_uri, commit.outputs[0]))
    ]
    return sorted(utterances, key=file_order)


def contents(
    context: StepContext, folded: Folded, about: Mapping[str, Any], statistics: Mapping[str, Any]
) -> StepContents:
    """Store scores and errors by utterance; the manifest's tallies are those of the utterances."""
    heldout = read_manifest(context.store, context.run_uri, features_step(HELDOUT)).tally_out
    evaluated = Tally(len(folded.utterances), sum(each.duration_ms for each in folded.utterances))
    assert evaluated == heldout, "every utterance is scored, once"
    errors = write_errors(folded.utterances)
    files = {
        **folded.files,
        "errors.jsonl": context.put_output(EVALUATION_ERRORS, ".jsonl", errors, heldout),
    }
    scores = {
        **word_error_scores(folded.utterances),
        **speaker_scores(folded.utterances),
        **model_scores(folded.models),
        **about,
        "files": {name: output.key for name, output in files.items()},
    }
    data = json.dumps(scores, indent=1, sort_keys=True).encode()
    output = context.put_output(EVALUATION_SCORES, ".json", data, Tally())
    return StepContents.of_all(heldout, (output, *files.values()), statistics)
