"""Measure the C search beside kaldi-decoder: speed, word errors, and memory of a worker.

python -m tests.benchmarks.search --run URI --graph FOLDER [--sentences 15000] [--share 4] [--json]

`pip install kaldi-decoder==0.2.11` first, or leave it out to measure the C search alone. FOLDER
keeps the graph: of the run's lexicon, tree, and a trigram of the first sentences of its
`language_model.txt.gz`. Scores are the aligner's, of one development utterance in `share`; each is
searched by all sides in turn. Seconds are this process's own.
"""

import argparse
import gzip
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.job import recipe_path
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import ALIGNER, BOOTSTRAP_STEP, CORPUS_FOLDER, DEV, features_step
from pipeline.shards import read_features
from tests.benchmarks.measure import Figure, ratios, show
from tests.training.decode.whole_graphs import decoding_graph, kneser_ney_arpa
from training.align.labelled import read_tree
from training.align.network_alignment import batched_log_likelihoods
from training.decode.const_fst import ConstFst
from training.decode.lexicon import parse_lexicon
from training.decode.search import Search, SearchableGraph
from training.evaluate.word_errors import word_errors
from training.models.store import load_model
from training.settings.recipe import read_recipe

try:
    import kaldi_decoder
except ImportError:
    kaldi_decoder = None

BEST_PATHS = (("11/1500", 11.0, 1500), ("13/7000", 13.0, 7000))
BEAM, LATTICE_BEAM = 11.0, 6.0
ALL = 2**31 - 1
OURS, KALDI = "C", "kaldi-decoder"


def build_graph(store: ObjectStore, run_uri: str, num_sentences: int, folder: Path) -> None:
    """Write the graph, its words and its size, unless the folder has them."""
    if (folder / "words.txt").exists():
        return
    corpus_uri = join_uri(run_uri, CORPUS_FOLDER)
    lexicon = parse_lexicon(store.get(join_uri(corpus_uri, "lexicon.txt")).decode())
    text = gzip.decompress(store.get(join_uri(corpus_uri, "language_model.txt.gz")))
    lines = (line.split() for line in text.decode().splitlines())
    known = (words for words in lines if lexicon.pronunciations.keys() >= {*words})
    sentences = list(itertools.islice(known, num_sentences))
    arpa = kneser_ney_arpa(sentences, lexicon.pronunciations, 3)
    print(f"ARPA: {len(arpa) / 1e6:.1f} MB of {len(sentences)} sentences", flush=True)
    graph = decoding_graph(lexicon, read_tree(store, run_uri, BOOTSTRAP_STEP), arpa)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "graph.fst").open("wb") as file:
        file.write(graph.searchable.fst.to_bytes())
    (folder / "words.txt").write_text("\n".join(graph.words) + "\n", encoding="utf-8")


def scored(
    store: ObjectStore, run_uri: str, recipe: str, share: int
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield the scaled scores and the transcript of one development utterance in `share`."""
    settings = read_recipe(recipe_path(recipe))
    model = load_model(store, run_uri, ALIGNER, settings.models.of(ALIGNER))
    rows = [
        row
        for output in read_manifest(store, run_uri, features_step(DEV)).outputs
        for row in read_features(read_output(store, run_uri, output))
    ][::share]
    scale = settings.evaluation.acoustic_scale
    for number, scores in batched_log_likelihoods(rows, model, scale):
        yield scores, (rows[number].text or "").split()


class Ours:
    """Ours searches by C."""

    def __init__(self, folder: Path, num_senones: int) -> None:
        fst = ConstFst.mapped(folder / "graph.fst")
        self.graph = SearchableGraph(fst, num_senones, 2**31)

    def words(self, scores: np.ndarray, beam: float, max_active: int) -> list[int]:
        """Return the numbers of the best path's words."""
        search = Search(self.graph, beam, max_active)
        search.advance(scores)
        path = search.best_path(ends_sentence=True)
        found = self.graph.fst.arcs[path]["output_label"]
        return found[found > 0].tolist()

    def num_arcs(self, scores: np.ndarray, max_active: int) -> int:
        """Return the size of a lattice."""
        search = Search(self.graph, BEAM, max_active, LATTICE_BEAM)
        search.advance(scores)
        return len(search.end_lattice())


class Kaldi:
    """Kaldi searches by kaldi-decoder."""

    def __init__(self, folder: Path, num_senones: int) -> None:
        del num_senones
        self.fst = ConstFst.mapped(folder / "graph.fst").to_kaldifst()

    def words(self, scores: np.ndarray, beam: float, max_active: int) -> list[int]:
        """Return the numbers of the best path's words."""
        options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active)
        search = kaldi_decoder.FasterDecoder(self.fst, options)
        search.decode(kaldi_decoder.DecodableCtc(scores))
        _, path = search.get_best_path()
        return list(kaldifst.get_linear_symbol_sequence(path)[2])

    def num_arcs(self, scores: np.ndarray, max_active: int) -> int:
        """Return the size of a lattice, which takes the path of its text."""
        assert max_active == ALL
        config = kaldi_decoder.LatticeSimpleDecoderConfig(
            beam=BEAM, lattice_beam=LATTICE_BEAM, determinize_lattice=False
        )
        search = kaldi_decoder.LatticeSimpleDecoder(self.fst, config)
        search.decode(kaldi_decoder.DecodableCtc(scores))
        _, raw = search.get_raw_lattice()
        return len(raw.to_str(show_weight_one=True).splitlines())


def private_mb(side: type[Ours] | type[Kaldi], folder: Path, scores: np.ndarray) -> float:
    """Return what a process takes to load the graph and search once, beside what it shares."""

    def private() -> float:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024

    before = private()
    found = side(folder, scores.shape[1])
    found.words(scores, *BEST_PATHS[-1][1:])
    return private() - before


@dataclass
class Comparison:
    """Comparison searches the utterances by all sides in turn, and keeps figures."""

    utterances: Sequence[tuple[np.ndarray, list[str]]]
    figures: list[Figure] = field(default_factory=list)

    def measure(self, name: str, functions: Mapping[str, Callable]) -> dict[str, list]:
        """Add the speed of each side's function of scores; return what it found."""
        found: dict[str, list] = {side: [] for side in functions}
        seconds: dict[str, list[float]] = {side: [] for side in functions}
        for scores, _ in self.utterances:
            for side, function in functions.items():
                began = time.process_time()
                found[side].append(function(scores))
                seconds[side].append(time.process_time() - began)
        for side, each in seconds.items():
            speeds = [len(scores) / s for (scores, _), s in zip(self.utterances, each, strict=True)]
            whole = self.num_frames / sum(each)
            self.figures.append(
                Figure(f"{name}, {side}", whole, min(speeds), max(speeds), "frames/s")
            )
        if KALDI in seconds:
            quotients = ratios(seconds[KALDI], seconds[OURS])
            self.figures.append(Figure.of(f"{name}, C / kaldi-decoder", quotients, "of the speed"))
        return found

    @property
    def num_frames(self) -> int:
        return sum(len(scores) for scores, _ in self.utterances)

    def best_paths(self, sides: Mapping[str, Any], names: Sequence[str]) -> None:
        """Add speed and word error rate of best paths."""
        num_words = sum(len(reference) for _, reference in self.utterances)
        for name, beam, max_active in BEST_PATHS:
            search = {
                key: partial(side.words, beam=beam, max_active=max_active)
                for key, side in sides.items()
            }
            for side, paths in self.measure(name, search).items():
                num_errors = sum(
                    word_errors(reference, [names[word] for word in path]).errors
                    for (_, reference), path in zip(self.utterances, paths, strict=True)
                )
                rate = 100 * num_errors / num_words
                self.figures.append(Figure.of(f"{name}, {side}: WER", [rate], "%"))

    def lattices(self, sides: Mapping[str, Any], max_active: int) -> None:
        """Add speed and size of lattices."""
        name = f"lattice, beam {BEAM:g}/{LATTICE_BEAM:g}, max_active {max_active}"
        search = {key: partial(side.num_arcs, max_active=max_active) for key, side in sides.items()}
        for side, sizes in self.measure(name, search).items():
            density = sum(sizes) / self.num_frames
            self.figures.append(Figure.of(f"{name}, {side}", [density], "arcs a frame"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--graph", type=Path, required=True)
    parser.add_argument("--recipe", default="recorded")
    parser.add_argument("--sentences", type=int, default=15_000)
    parser.add_argument("--share", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    store, folder = ObjectStore((arguments.run,)), arguments.graph
    build_graph(store, arguments.run, arguments.sentences, folder)
    utterances = list(scored(store, arguments.run, arguments.recipe, arguments.share))
    longest = max((scores for scores, _ in utterances), key=len)
    num_senones = longest.shape[1]
    ours = Ours(folder, num_senones)
    sides: dict[str, Any] = {OURS: ours}
    if kaldi_decoder is not None:
        sides[KALDI] = Kaldi(folder, num_senones)
    comparison = Comparison(utterances)
    names = (folder / "words.txt").read_text(encoding="utf-8").splitlines()
    comparison.best_paths(sides, names)
    comparison.lattices(sides, ALL)
    comparison.lattices({OURS: ours}, 7000)
    for key, side in sides.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            memory = pool.submit(private_mb, type(side), folder, longest).result()
        comparison.figures.append(Figure.of(f"a worker's own memory, {key}", [memory], "MB"))
    graph = ours.graph.fst
    title = (
        f"{len(utterances)} utterances, {comparison.num_frames} frames, {num_senones} senones; "
        f"graph of {len(graph.states)} states, {len(graph.arcs)} arcs, "
        f"{(folder / 'graph.fst').stat().st_size / 1e6:.0f} MB"
    )
    show(title, comparison.figures, arguments.json)


if __name__ == "__main__":
    main()
