"""Compare the smoothings of language models by perplexity, at orders 2 to 5.

python -m tests.benchmarks.perplexity --kaldi-dir DIR [--json]

DIR has text, utt2spk, lexicon.txt, labelled.speakers and heldout.speakers. Models are of the
labelled speakers' transcripts. They predict the held-out speakers' words and sentence ends, and
each labelled speaker's by those of the others. Words outside the lexicon are left out.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.benchmarks.rotation.folds import Corpus
from training.decode import smoothing
from training.decode.arpa import END, START, UNKNOWN, ArpaEntry, Ngram, read_arpa
from training.decode.lexicon import parse_lexicon
from training.decode.smoothing import NO_COUNTS, Discounts, kneser_ney_arpa, witten_bell_arpa

ORDERS = (2, 3, 4, 5)
HELDOUT_SPEAKERS = "held-out speakers"
LEFT_OUT_SPEAKERS = "labelled speakers, one left out at a time"
Sentences = Sequence[Sequence[str]]
Estimate = Callable[[Sentences, Sequence[str], int], str]


def without_one_discount(sentences: Sentences, words: Sequence[str], order: int) -> str:
    """Estimate by Kneser-Ney that has KenLM's discounts wherever the published ones cannot be."""
    published = smoothing.discounts_of

    def discounts(adjusted: Mapping[Ngram, int]) -> Discounts:
        found = published(adjusted)
        return NO_COUNTS if found.one == found.two == found.more else found

    with patch.object(smoothing, "discounts_of", discounts):
        return kneser_ney_arpa(sentences, words, order)


SMOOTHINGS: Mapping[str, Estimate] = {
    "Witten-Bell": witten_bell_arpa,
    "Kneser-Ney, one discount where counts lack": kneser_ney_arpa,
    "Kneser-Ney, 0.5, 1, 1.5 where counts lack": without_one_discount,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial: sentences to estimate a model of, and others that it predicts."""

    known: Sentences
    predicted: Sentences


def log_probability(entries: Mapping[Ngram, ArpaEntry], history: Ngram, word: str) -> float:
    """Return log10 P(word | history) by the back-off weights of an ARPA model."""
    if (entry := entries.get((*history, word))) is not None:
        return entry.log_probability
    shorter = log_probability(entries, history[1:], word)
    return shorter + (entries[history].log_backoff if history in entries else 0.0)


def perplexity(
    trials: Sequence[Trial], words: Sequence[str], estimate: Estimate, order: int
) -> float:
    """Return the perplexity of all trials' words and sentence ends together."""
    total, count = 0.0, 0
    for trial in trials:
        entries = {each.ngram: each for each in read_arpa(estimate(trial.known, words, order))}
        for sentence in trial.predicted:
            padded = (START, *sentence, END)
            for place in range(1, len(padded)):
                # No entry has a word outside the lexicon: backing off drops it and all before it.
                history = padded[max(0, place - order + 1) : place]
                if padded[place] != UNKNOWN:
                    total += log_probability(entries, history, padded[place])
                    count += 1
    return float(10 ** (-total / count)) if count else math.nan


def sentences_of(corpus: Corpus, words: Sequence[str], speakers: Sequence[str]) -> Sentences:
    """Return the transcripts of speakers, with UNKNOWN for words outside the lexicon."""
    return [
        [word if word in words else UNKNOWN for word in text]
        for key, text in corpus.text_of.items()
        if corpus.speaker_of[key] in speakers
    ]


def perplexities(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Measure each smoothing at each order, on the held-out and on the labelled speakers."""
    corpus = Corpus(folder)
    words = list(parse_lexicon((folder / "lexicon.txt").read_text()).pronunciations)
    labelled, heldout = (
        (folder / f"{subset}.speakers").read_text().split() for subset in ("labelled", "heldout")
    )

    def trial(known: Sequence[str], predicted: Sequence[str]) -> Trial:
        return Trial(*(sentences_of(corpus, words, each) for each in (known, predicted)))

    others = [trial([other for other in labelled if other != one], [one]) for one in labelled]
    predicted = {HELDOUT_SPEAKERS: [trial(labelled, heldout)], LEFT_OUT_SPEAKERS: others}
    return {
        title: {
            name: [perplexity(trials, words, estimate, order) for order in ORDERS]
            for name, estimate in SMOOTHINGS.items()
        }
        for title, trials in predicted.items()
    }


def main() -> None:
    """Measure, and print a table of orders for each set of speakers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kaldi-dir", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = perplexities(arguments.kaldi_dir)
    if arguments.json:
        print(json.dumps(found))
        return
    for title, by_smoothing in found.items():
        print("|".join(["", f" {title} ", *(f" order {order} " for order in ORDERS), ""]))
        for name, values in by_smoothing.items():
            print("|".join(["", f" {name} ", *(f" {value:.1f} " for value in values), ""]))


if __name__ == "__main__":
    main()
