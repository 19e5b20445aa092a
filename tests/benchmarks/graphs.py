"""Measure the building of decoding graphs, and what a worker needs that maps one.

python -m tests.benchmarks.graphs --text FILE --lexicon FILE --run URI [--models SHARE:COUNTS ...]

Estimates trigrams of a share of the text's lines, without n-grams that occur less than COUNTS
(of unigrams, bigrams, trigrams), and builds the graph of each by the tree of the run's alignment;
each in a process of its own. A worker maps the graph and the grammar, and reads all of both.
The model `drawn` is of 200,000 words and 500 MB, drawn at random, and pruned by --pruning.
"""

import argparse
import gzip
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from infra.store.object_store import ObjectStore
from training.align.labelled import read_tree
from training.decode.arpa import read_arpa
from training.decode.const_fst import ConstFst
from training.decode.entropy_pruning import pruned
from training.decode.grammar import ngram_grammar
from training.decode.graph import grammar_graph, word_ids
from training.decode.lexicon import UNKNOWN, Lexicon, parse_lexicon
from training.decode.ngrams import arpa_lines, kneser_ney

P = ParamSpec("P")
R = TypeVar("R")

DRAWN = "drawn"
MODELS = ("1:1,2,3", "1:1,1,2", "0.8:1,1,1", DRAWN)
"""ARPA files of 9, 25, 60 and 500 MB; the first three of the text of LibriSpeech's corpus."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files are what a measurement leaves for the next one."""

    folder: Path
    name: str

    def path(self, suffix: str) -> Path:
        """Return the path of a file of this model."""
        return self.folder / f"{self.name}.{suffix}"


def alone(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call in a new process, whose peak memory is the call's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def peak_gb() -> float:
    """Return the most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def estimate(text: Path, lexicon: Path, model: str, files: Files) -> str:
    """Write the ARPA text of a model; return what it took."""
    share, _, counts = model.partition(":")
    started = time.process_time()
    words = {word: word for word in parse_lexicon(lexicon.read_text()).pronunciations}
    with gzip.open(text, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    sentences = [
        [words.get(word, UNKNOWN) for word in line.split()]
        for line in lines[: int(float(share) * len(lines))]
    ]
    least = tuple(map(int, counts.split(",")))
    found = kneser_ney(sentences, words.keys(), len(least), least)
    with files.path("arpa").open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in arpa_lines(found))
    return f"estimated in {time.process_time() - started:.0f} CPU s, {peak_gb():.2f} GB"


NUM_WORDS, NUM_BIGRAMS, NUM_TRIGRAMS = 200_000, 6_000_000, 9_500_000


def draw(lexicon: Path, files: Files) -> str:
    """Write an ARPA text of words that follow Zipf's law, and a lexicon of joined pronunciations.

    Frequent words have more bigrams, and frequent bigrams more trigrams; 5.3 and 9.4 million.
    """
    random = np.random.default_rng(1)
    spoken = [each[0] for each in parse_lexicon(lexicon.read_text()).pronunciations.values()]
    names = [f"W{number:06d}" for number in range(NUM_WORDS)]
    with files.path("lexicon").open("w", encoding="utf-8") as file:
        for name, pair in zip(names, random.choice(len(spoken), (NUM_WORDS, 2)), strict=True):
            file.write(f"{name} {' '.join(spoken[pair[0]] + spoken[pair[1]])}\n")
    shares = 1 / np.arange(1, NUM_WORDS + 1)
    shares /= shares.sum()

    def continued(num_histories: int, count: int, power: float) -> tuple[np.ndarray, np.ndarray]:
        histories = (random.random(count) ** power * num_histories).astype(np.int64)
        words = np.searchsorted(np.cumsum(shares), random.random(count)).clip(max=NUM_WORDS - 1)
        return np.divmod(np.unique(histories * NUM_WORDS + words), NUM_WORDS)

    def logs(words: np.ndarray, gain: float) -> list[float]:
        found = np.log10(shares[words]) + gain + random.random(len(words))
        rounded: list[float] = found.clip(-9, -0.1).round(6).tolist()
        return rounded

    firsts, seconds = continued(NUM_WORDS, NUM_BIGRAMS, 2.0)
    bigrams, thirds = continued(len(firsts), NUM_TRIGRAMS, 1.5)
    with files.path("arpa").open("w", encoding="utf-8") as file:
        counts = NUM_WORDS + 2, len(firsts), len(bigrams)
        file.write("\\data\\\n")
        file.writelines(f"ngram {n}={count}\n" for n, count in enumerate(counts, start=1))
        file.write("\n\\1-grams:\n-99\t<s>\t-0.3\n-1.5\t</s>\n")
        of_words = zip(logs(np.arange(NUM_WORDS), 0), names, strict=True)
        file.writelines(f"{log}\t{name}\t-0.4\n" for log, name in of_words)
        file.write("\n\\2-grams:\n")
        for log, one, two in zip(logs(seconds, 0), firsts.tolist(), seconds.tolist(), strict=True):
            file.write(f"{log}\t{names[one]} {names[two]}\t-0.25\n")
        file.write("\n\\3-grams:\n")
        for log, pair, three in zip(
            logs(thirds, 1), bigrams.tolist(), thirds.tolist(), strict=True
        ):
            words = names[firsts[pair]], names[seconds[pair]], names[three]
            file.write(f"{log}\t{' '.join(words)}\n")
        file.write("\n\\end\\\n")
    return f"drawn: {NUM_WORDS:,} words, {len(firsts):,} bigrams, {len(bigrams):,} trigrams"


def build(lexicon: Path, run_uri: str, files: Files, pruning: float) -> str:
    """Write grammar and graph of an ARPA text; return their sizes, and what they took."""
    words: Lexicon = parse_lexicon(lexicon.read_text())
    tree = read_tree(ObjectStore((run_uri,)), run_uri)
    said, started, before_gb = [], time.process_time(), peak_gb()
    with files.path("arpa").open(encoding="utf-8") as file:
        model = read_arpa(file)
    grammar = ngram_grammar(model, word_ids(words))
    read_s, grammar_gb = time.process_time() - started, peak_gb()
    small, said_of_pruning = grammar, ""
    if pruning:
        small = ngram_grammar(pruned(model, pruning), word_ids(words))
        pruned_s = time.process_time() - started - read_s
        said_of_pruning = f"pruned in {pruned_s:.0f} CPU s, {peak_gb():.2f} GB; "
        started += pruned_s
    del model
    graph = grammar_graph(words, tree, small)
    built_s = time.process_time() - started - read_s
    arpa_mb = files.path("arpa").stat().st_size / 1e6
    for name, fst in (("grammar", grammar), ("first_pass", small), ("graph", graph.fst)):
        with files.path(name).open("wb") as file:
            file.write(fst.to_bytes())
        said.append(
            f"{name} of {len(fst.states):,} states, {len(fst.arcs):,} arcs, "
            f"{files.path(name).stat().st_size / 1e6:.0f} MB"
        )
    return (
        f"ARPA of {arpa_mb:.1f} MB; grammar in {read_s:.0f} CPU s, {grammar_gb:.2f} GB; "
        f"{said_of_pruning}"
        f"graph in {built_s:.0f} CPU s, {peak_gb():.2f} GB, {before_gb:.2f} of it imports; "
        f"{'; '.join(said)}"
    )


def work(files: Files) -> str:
    """Map both files as a worker does, read all of them; return what this process alone holds."""
    imports_mb = private_mb()
    fsts = [ConstFst.mapped(files.path(name)) for name in ("grammar", "graph")]
    num_arcs = sum(int((fst.arcs["target"] >= 0).sum()) for fst in fsts)
    return (
        f"a worker that read {num_arcs:,} arcs holds {private_mb():.0f} MB, {imports_mb:.0f} before"
    )


def private_mb() -> float:
    """Return this process's memory beside what it maps of files."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (anonymous,) = (line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(anonymous) / 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lexicon", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--pruning", type=float, default=1e-7)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            files = Files(Path(folder), model.replace(":", "-").replace(",", "-"))
            lexicon, pruning = arguments.lexicon, 0.0
            print(model)
            if model == DRAWN:
                print(" ", alone(draw, lexicon, files))
                lexicon, pruning = files.path("lexicon"), arguments.pruning
            else:
                print(" ", alone(estimate, arguments.text, lexicon, model, files))
            print(" ", alone(build, lexicon, arguments.run, files, pruning))
            print(" ", alone(work, files), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
