"""Time rescoring with a mapped grammar of a large vocabulary, and show the memory of its process.

`python -m tests.benchmarks.rescoring [--words N] [--successors N] [--beam B] [--json]`. Both
grammars have a history for each word: the first pass's with two successors, the large one's with
`--successors`, drawn at random, so that look-ups are in no order. The lattice has 15 s of frames,
40 states and 120 arcs each, of which one in ten writes a word.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests.benchmarks.measure import Figure, show
from training.decode.const_fst import ARC, ConstFst
from training.decode.decoder import FoundLattice
from training.decode.rescoring import SEARCH_ARC, SecondPass, best_arcs, word_confidences

FRAMES, STATES, ARCS, WITH_WORD = 500, 40, 120, 0.1


def grammar(num_words: int, num_successors: int, seed: int) -> ConstFst:
    """Draw a bigram model: words are 1 to `num_words`, the back-off is `num_words` + 1."""
    random = np.random.default_rng(seed)
    free = num_words - num_successors + 1
    drawn = np.sort(random.integers(1, free + 1, (num_words, num_successors)), axis=1)
    words = np.arange(1, num_words + 1)
    labels = np.concatenate(
        [words, (drawn + np.arange(num_successors)).ravel(), np.full(num_words, num_words + 1)]
    )
    sources = np.concatenate([np.zeros(num_words), np.repeat(words, num_successors), words])
    arcs = np.zeros(len(labels), ARC)
    arcs["input_label"], arcs["cost"] = labels, random.uniform(1, 9, len(labels))
    arcs["target"] = np.where(labels > num_words, 0, labels)
    return ConstFst.of(sources.astype(np.int32), arcs, np.full(num_words + 1, 3, np.float32), 0)


def lattice(num_words: int, seed: int) -> np.ndarray:
    """Draw a lattice; every state has an arc to the next frame, and one from the frame before."""
    random = np.random.default_rng(seed)
    arcs = np.zeros((FRAMES, ARCS), SEARCH_ARC)
    firsts = STATES * np.arange(FRAMES)[:, None]
    arcs["source"] = firsts + np.arange(ARCS) % STATES
    arcs["target"] = firsts + STATES + random.permuted(arcs["source"] - firsts, axis=1)
    arcs["label"] = random.integers(1, 1000, arcs.shape)
    has_word = random.random(arcs.shape) < WITH_WORD
    arcs["word"] = np.where(has_word, random.integers(1, num_words + 1, arcs.shape), 0)
    arcs["graph_cost"] = random.uniform(0, 3, arcs.shape)
    arcs["acoustic_cost"] = random.uniform(0, 3, arcs.shape)
    ends = np.zeros(STATES, SEARCH_ARC)
    ends["source"] = FRAMES * STATES + np.arange(STATES)
    ends["target"] = (FRAMES + 1) * STATES
    found = np.concatenate([arcs.ravel(), ends])
    # The first frame has one state.
    found["source"] = np.maximum(found["source"] - (STATES - 1), 0)
    found["target"] -= STATES - 1
    return found[np.argsort(found["source"], kind="stable")]


def megabytes() -> tuple[float, float]:
    """Return this process's own memory, and that with the files that it maps."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e6, memory.rss / 1e6


def figures(num_words: int, num_successors: int, beam: float, num_rounds: int) -> list[Figure]:
    """Return seconds a second of speech, arcs a frame, and the memory at the end."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("first.fst", "large.fst")]
        for path, successors in zip(paths, (2, num_successors), strict=True):
            with path.open("wb") as file:
                file.write(grammar(num_words, successors, seed=successors).to_bytes())
        first, large = map(ConstFst.mapped, paths)
        words = ("",) * (num_words + 2)
        second_pass = SecondPass(first, large, words, scale=1.0, insertion_penalty=0.0, beam=beam)
        own_before, _ = megabytes()
        rescoring, confidence, arcs = [], [], []
        for number in range(num_rounds):
            each = lattice(num_words, number)
            started = time.process_time()
            found = second_pass.rescored(FoundLattice(each, ends_sentence=True))
            rescored = time.process_time()
            word_confidences(found, best_arcs(found))
            rescoring.append((rescored - started) / (0.03 * FRAMES))
            confidence.append((time.process_time() - rescored) / (0.03 * FRAMES))
            arcs.append(len(found) / FRAMES)
        own, with_files = megabytes()
        return [
            Figure.of("large grammar", [len(large.arcs) / 1e6], "million arcs"),
            Figure.of("its file", [paths[1].stat().st_size / 1e6], "MB"),
            Figure.of("rescoring, CPU", rescoring, "of real time"),
            Figure.of("confidence, CPU", confidence, "of real time"),
            Figure.of("arcs a frame", arcs, f"of {ARCS} before"),
            Figure.of("own memory, before", [own_before], "MB"),
            Figure.of("own memory", [own], "MB"),
            Figure.of("memory with mapped pages", [with_files], "MB"),
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=200_000)
    parser.add_argument("--successors", type=int, default=84)
    parser.add_argument("--beam", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = arguments.words, arguments.successors
    measured = figures(*sizes, arguments.beam, arguments.rounds)
    show(f"rescoring with {sizes[0]:,} words, one core", measured, arguments.json)
