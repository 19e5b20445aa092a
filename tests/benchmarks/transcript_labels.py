"""Measure labels of transcripts, on a run whose unlabelled speech has true transcripts as oracle.

`python -m tests.benchmarks.transcript_labels --run URI --recipe R --transcripts J --text T`, after
`build_graph`. The teacher is the run's `--model`. Word errors of the normalized texts are against a
Kaldi `text`; frames are compared with the alignment of the true transcripts. With `--damage` a
share of a text's words is replaced, left out or preceded by another word. The run's own lattices
weigh frames at each `--lattice-agreement`. True words that the lexicon lacks are aligned by their
letters; those that were heard are garbage, or aligned so too, by each `--unknown-words`.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch
from scipy.special import softmax

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Hypothesis
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import BOOTSTRAP_STEP, TEACHER, UNLABELLED, features_step
from pipeline.sampling import sampling_priority
from pipeline.shards import read_features
from training.align.labelled import read_lexicon, read_tree
from training.align.network_alignment import batched_log_likelihoods
from training.decode.decoder import align
from training.decode.graph import alignment_graph
from training.decode.lexicon import Lexicon
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.word_errors import WordErrors, word_errors
from training.models.store import load_model
from training.settings.decoding import TranscriptsConfig
from training.settings.recipe import read_recipe
from training.targets.lattice_targets import LatticeSearch, search_settings
from training.targets.text_normalization import Normalizer
from training.targets.transcript_targets import (
    TranscriptAligner,
    UnusableTranscriptError,
    own_posteriors,
    trust_of_lattice,
)
from training.targets.transcript_tuning import LEAST_PROBABILITY as LEAST

SCALE = 0.3


def normalized_errors(
    heard: dict[str, Hypothesis], truth: dict[str, list[str]], lexicon: Lexicon
) -> dict[str, float]:
    """Return word errors of the first readings, and the share of words that are unknown."""
    normalizer, errors, unknown, total = Normalizer(lexicon, "en"), WordErrors(), 0, 0
    for name, hypothesis in heard.items():
        read = normalizer(hypothesis.text)
        words = [word for readings in read for word in readings[0]]
        errors += word_errors(truth[name], [word.upper() for word in words])
        unknown += sum(word not in lexicon.pronunciations for word in words)
        total += len(words)
    return {"wer": errors.word_error_rate, "unknown_percent": 100 * unknown / total}


def damaged(text: str, share: float, vocabulary: list[str], seed: int) -> str:
    """Replace 3 of 5, remove 1 of 5 and insert before 1 of 5 of the damaged words."""
    generator, words = np.random.default_rng(seed), list[str]()
    for word in text.split():
        drawn = generator.random() / max(share, 1e-9)
        other = vocabulary[generator.integers(len(vocabulary))]
        if drawn < 0.6:
            words.append(other)
        elif drawn < 0.8:
            continue
        else:
            words += [other, word] if drawn < 1.0 else [word]
    return " ".join(words)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the word errors, and of each damage and garbage cost the labels' right frames."""
    torch.set_num_threads(1)
    run_uri, corpus_uri = arguments.run, arguments.corpus or join_uri(arguments.run, "corpus")
    store = ObjectStore((run_uri, corpus_uri))
    stored = read_lexicon(store, run_uri, corpus_uri, [BOOTSTRAP_STEP])
    lexicon = stored.parse()
    tree, recipe = read_tree(store, run_uri, BOOTSTRAP_STEP), read_recipe(arguments.recipe)
    trained = load_model(store, run_uri, arguments.model, recipe.models.of(arguments.model))
    settings = search_settings(store, run_uri, recipe.evaluation, recipe.targets.lattices)
    graphs = BuiltGraphs.of(store, run_uri)
    search = LatticeSearch(graphs, settings, recipe.targets.lattices)
    lines = map(json.loads, Path(arguments.transcripts).read_text().splitlines())
    heard = {
        each["utterance_id"]: Hypothesis("r", each["pred_text"], each["score"]) for each in lines
    }
    spoken = (line.split() for line in Path(arguments.text).read_text().splitlines())
    truth = {name: words for name, *words in spoken}
    complete = replace(stored, unknown_words="letters").pronounced(chain(*truth.values())).parse()
    found: dict[str, object] = {"normalized": normalized_errors(heard, truth, lexicon)}
    shards = read_manifest(store, run_uri, features_step(UNLABELLED)).outputs
    rows = [
        row
        for shard in shards[:: max(1, len(shards) // 8)]
        for row in read_features(read_output(store, run_uri, shard))
        if not complete.unaligned(truth[row.utterance_id])
    ]
    rows.sort(key=lambda row: sampling_priority(0, row.utterance_id))
    scored = dict(batched_log_likelihoods(rows[: arguments.num], trained, 1.0))
    lattices = {position: own_posteriors(search, scores) for position, scores in scored.items()}
    vocabulary = sorted(lexicon.pronunciations)
    trials = product(
        arguments.damage,
        arguments.garbage_cost,
        arguments.lattice_agreement,
        arguments.unknown_words,
    )
    for damage, cost, agreement, rule in trials:
        config = TranscriptsConfig(garbage_cost=cost, max_garbage=1.0, max_unknown=1.0)
        letters = stored.letters() if rule == "letters" else None
        aligner = TranscriptAligner.of(lexicon, tree, config, letters)
        frames = own_right = right = 0
        garbage, seconds, lost, failed = 0.0, 0.0, 0.0, 0
        for position, scores in scored.items():
            row = rows[position]
            graph = alignment_graph(complete, tree, truth[row.utterance_id])
            senones = align(graph, SCALE * scores)
            own = softmax(scores + trained.log_priors.numpy(), axis=1)
            hypothesis = heard[row.utterance_id]
            text = hypothesis.text
            if damage:
                text = damaged(text, damage, vocabulary, position)
            given = (Hypothesis("r", text, hypothesis.score),)
            begin, labels = time.process_time(), own.copy()
            try:
                words = aligner.posteriors(
                    given, SCALE * scores, SCALE * aligner.config.garbage_cost
                )
                trust = trust_of_lattice(words, lattices[position], len(own), agreement)
                masses = np.bincount(words.frames, words.probabilities, minlength=len(own))
                labels *= (1 - 0.9 * trust * masses)[:, np.newaxis]
                weights = 0.9 * trust[words.frames] * words.probabilities
                labels[words.frames, words.senones] += weights
                garbage += float((1 - masses).sum())
            except UnusableTranscriptError:
                failed += 1
            seconds += time.process_time() - begin
            frames += len(own)
            own_right += int((own.argmax(axis=1) == senones).sum())
            right += int((labels.argmax(axis=1) == senones).sum())
            right_labels = labels[np.arange(len(own)), senones]
            lost -= float(np.log(np.maximum(right_labels, LEAST)).sum())
        name = f"damage {damage:g}, garbage cost {cost:g}, lattice agreement {agreement:g}, {rule}"
        found[name] = {
            "utterances": len(scored),
            "failed": failed,
            "own_right_percent": 100 * own_right / frames,
            "right_percent": 100 * right / frames,
            "cross_entropy": lost / frames,
            "garbage_percent": 100 * garbage / frames,
            "x_real_time": 0.03 * frames / seconds,
        }
    return found


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("run", "recipe", "transcripts", "text"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--damage", type=float, nargs="*", default=[0.0, 0.2])
    parser.add_argument("--garbage-cost", type=float, nargs="*", default=[3.0, 1000.0])
    parser.add_argument("--lattice-agreement", type=float, nargs="*", default=[0.0, 0.5, 1.0])
    parser.add_argument("--unknown-words", nargs="*", default=["row", "letters"])
    parser.add_argument("--model", default=TEACHER)
    parser.add_argument("--corpus", default="", help="URI; default: <run>/corpus")
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
