"""Measure n-gram models of a large text: estimation, pruning, perplexity, and reading of ARPA.

python -m tests.benchmarks.language_models models --kaldi-dir ../shared/corpora/librispeech
python -m tests.benchmarks.language_models arpa --megabytes 500

The first estimates models of language_model.txt.gz over lexicon.txt, and prunes them by counts, and
by entropy to the same sizes; perplexity is of the held-out speakers' words and sentence ends,
without words outside the lexicon. The second reads an ARPA of random trigrams.
"""

import argparse
import gzip
import io
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from training.decode.arpa import read_arpa, restricted
from training.decode.entropy_pruning import Masses, pruned
from training.decode.lexicon import UNKNOWN, parse_lexicon
from training.decode.ngrams import (
    END,
    START,
    BackoffModel,
    arpa_lines,
    kneser_ney,
    ngram_keys,
    witten_bell,
)

Sentences = Sequence[Sequence[str]]


def perplexity(model: BackoffModel, sentences: Sentences) -> float:
    """Return the perplexity of words and sentence ends; a history ends at an unknown word."""
    suffixes, ngrams = model.suffixes(), model.ngrams
    ids = {word: number for number, word in enumerate(model.words)}
    keys = ngram_keys(ngrams["history"], ngrams["word"], len(ids))
    total, count, longest = 0.0, 0, model.starts[-2]
    for sentence in sentences:
        state = 1 + ids[START]
        for word in (*sentence, END):
            if word == UNKNOWN:
                state = 0
                continue
            while state >= longest:
                state = int(suffixes[state])
            while True:
                wanted = state * len(ids) + ids[word]
                found = int(np.searchsorted(keys, wanted))
                if found < len(keys) and keys[found] == wanted:
                    break
                total += float(ngrams["log_backoff"][state])
                state = int(suffixes[state])
            total += float(ngrams["log_probability"][found])
            count += 1
            state = found
    return float(10 ** (-total / count))


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """ModelFigures: n-grams by length, megabytes of ARPA text, perplexity, seconds to make it."""

    name: str
    num_ngrams: tuple[int, ...]
    megabytes: float
    perplexity: float
    seconds: float


def figures(name: str, model: BackoffModel, heldout: Sentences, seconds: float) -> ModelFigures:
    """Measure a model."""
    return ModelFigures(
        name,
        tuple(int(each) for each in np.diff(model.starts)[1:]),
        sum(len(line) + 1 for line in arpa_lines(model)) / 1e6,
        perplexity(model, heldout),
        seconds,
    )


def model_figures(folder: Path) -> Iterator[ModelFigures]:
    """Estimate and prune the models of a corpus."""
    lexicon = parse_lexicon((folder / "lexicon.txt").read_text())
    known = {word: word for word in lexicon.pronunciations}

    def sentence(text: str) -> list[str]:
        return [known.get(word, UNKNOWN) for word in text.split()]

    with gzip.open(folder / "language_model.txt.gz", "rt") as file:
        sentences = [sentence(line) for line in file]
    texts = dict(line.split(maxsplit=1) for line in (folder / "text").read_text().splitlines())
    speakers = dict(line.split() for line in (folder / "utt2spk").read_text().splitlines())
    chosen = {*(folder / "heldout.speakers").read_text().split()}
    heldout = [sentence(text) for key, text in texts.items() if speakers[key] in chosen]
    for estimate, order in ((kneser_ney, 3), (kneser_ney, 4), (kneser_ney, 5), (witten_bell, 3)):
        started = time.perf_counter()
        model = estimate(sentences, known, order)
        seconds = time.perf_counter() - started
        yield figures(f"{estimate.__name__}, {order} words", model, heldout, seconds)
    whole, histories = kneser_ney(sentences, known, 3), witten_bell(sentences, known, 3)
    for min_counts in ((1, 1, 2), (1, 2, 2), (1, 3, 3)):
        started = time.perf_counter()
        cut = kneser_ney(sentences, known, 3, min_counts)
        seconds = time.perf_counter() - started
        yield figures(f"least counts {min_counts}", cut, heldout, seconds)
        # As many n-grams, but for histories that the pruning keeps.
        num_longer = len(cut.ngrams) - cut.starts[2]
        for name, of_histories in (("Witten-Bell", histories), ("Kneser-Ney", whole)):
            entropies = Masses.of(whole).relative_entropies(of_histories)[whole.starts[2] :]
            threshold = float(np.expm1(np.partition(entropies, -num_longer)[-num_longer]))
            started = time.perf_counter()
            smaller = pruned(whole, threshold, of_histories)
            seconds = time.perf_counter() - started
            title = f"threshold {threshold:.3g}, histories by {name}"
            yield figures(title, smaller, heldout, seconds)
    for threshold in (1e-8, 1e-7, 3e-7, 1e-6, 3e-6):
        started = time.perf_counter()
        smaller = pruned(whole, threshold, histories)
        seconds = time.perf_counter() - started
        yield figures(f"threshold {threshold:g}", smaller, heldout, seconds)


def random_arpa(num_bytes: int, num_words: int = 200_000) -> Iterator[str]:
    """Yield the lines of a trigram model of random words, of about so many bytes."""
    generator = np.random.default_rng(0)
    words = [START, END, *(f"WORD{number}" for number in range(num_words))]
    num_bigrams = num_bytes // 120

    def distinct(histories: int, least: int, num: int) -> np.ndarray:
        keys = generator.integers(least * num_words, histories * num_words, num)
        return np.unique(keys)

    bigrams = distinct(num_words, 1, num_bigrams)
    trigrams = distinct(len(bigrams), 0, 2 * num_bigrams)
    yield from ("\\data\\", f"ngram 1={len(words)}", f"ngram 2={len(bigrams)}")
    yield from (f"ngram 3={len(trigrams)}", "", "\\1-grams:")
    yield from (f"-5.1234567\t{word}\t-0.1234567" for word in words)
    yield from ("", "\\2-grams:")
    for key in bigrams.tolist():
        first, second = divmod(key, num_words)
        yield f"-2.1234567\t{words[2 + first]} {words[2 + second]}\t-0.1234567"
    yield from ("", "\\3-grams:")
    for key in trigrams.tolist():
        history, third = divmod(key, num_words)
        first, second = divmod(int(bigrams[history]), num_words)
        yield f"-1.1234567\t{words[2 + first]} {words[2 + second]} {words[2 + third]}"
    yield from ("", "\\end\\")


def arpa_figures(megabytes: int) -> dict[str, float]:
    """Read an ARPA from memory, as evaluation does, and keep half of its words; CPU seconds."""
    packed, num_bytes = io.BytesIO(), 0
    with gzip.open(packed, "wt", compresslevel=1) as file:
        for line in random_arpa(megabytes * 10**6):
            num_bytes += file.write(f"{line}\n")
    data = packed.getvalue()
    started = time.process_time()
    with gzip.open(io.BytesIO(data), "rt") as lines:
        model = read_arpa(lines)
    read = time.process_time()
    half = restricted(model, model.words[::2])
    return {
        "num_bytes": num_bytes,
        "num_ngrams": len(model.ngrams) - 1,
        "num_kept": len(half.model.ngrams) - 1,
        "read_s": read - started,
        "restrict_s": time.process_time() - read,
        "most_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Measure, and print a line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["models", "arpa"])
    parser.add_argument("--kaldi-dir", type=Path)
    parser.add_argument("--megabytes", type=int, default=500)
    arguments = parser.parse_args()
    if arguments.what == "arpa":
        print(json.dumps(arpa_figures(arguments.megabytes)))
        return
    for each in model_figures(arguments.kaldi_dir):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
