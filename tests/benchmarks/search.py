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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.job import recipe_path
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import ALIGNER, BOOTSTRAP_STEP, CORPUS_FOLDER, DEV, features_step
from pipeline.shards import read_features
from tests.benchmarks.measure import Figure, ratios, show
from training.align.network_alignment import batched_log_likelihoods, read_tree
from training.decode.const_fst import ConstFst
from training.decode.graph import decoding_graph
from training.decode.lexicon import parse_lexicon
from training.decode.ngrams import kneser_ney_arpa
from training.decode.search import Search, SearchableGraph
from training.evaluate.word_errors import word_errors
from training.models.store import load_model
from training.settings.recipe import read_recipe

BEST_PATHS = (("11/1500", 11.0, 1500), ("13/7000", 13.0, 7000))
BEAM, LATTICE_BEAM = 11.0, 6.0
ALL = 2**31 - 1


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
        graph.searchable.fst.write(file)
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
        self.graph = SearchableGraph(fst, num_senones, None)

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
        import kaldi_decoder
        import kaldifst

        options = kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=max_active)
        search = kaldi_decoder.FasterDecoder(self.fst, options)
        search.decode(kaldi_decoder.DecodableCtc(scores))
        _, path = search.get_best_path()
        return list(kaldifst.get_linear_symbol_sequence(path)[2])

    def num_arcs(self, scores: np.ndarray, max_active: int) -> int:
        """Return the size of a lattice, which takes the path of its text."""
        import kaldi_decoder

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
    names = (folder / "words.txt").read_text(encoding="utf-8").splitlines()
    num_senones = utterances[0][0].shape[1]
    sides: dict[str, Any] = {"C": Ours(folder, num_senones)}
    try:
        sides["kaldi-decoder"] = Kaldi(folder, num_senones)
        import kaldi_decoder  # noqa: F401
    except ImportError:
        del sides["kaldi-decoder"]
    num_frames = np.array([len(scores) for scores, _ in utterances])
    figures = []

    def measure(name: str, of_side: dict[str, Callable[[np.ndarray], Any]]) -> dict[str, list]:
        found: dict[str, list] = {side: [] for side in of_side}
        speeds: dict[str, list[float]] = {side: [] for side in of_side}
        for scores, _ in utterances:
            for side, function in of_side.items():
                began = time.process_time()
                found[side].append(function(scores))
                speeds[side].append(len(scores) / (time.process_time() - began))
        for side, each in speeds.items():
            total = num_frames.sum() / (num_frames / np.array(each)).sum()
            figures.append(Figure(f"{name}, {side}", total, min(each), max(each), "frames/s"))
        if len(speeds) == 2:
            quotients = ratios(*speeds.values())
            figures.append(Figure.of(f"{name}, C / kaldi-decoder", quotients, "of the speed"))
        return found

    for name, beam, max_active in BEST_PATHS:
        found = measure(
            name,
            {
                key: lambda scores, side=side, search=(beam, max_active): side.words(
                    scores, *search
                )
                for key, side in sides.items()
            },
        )
        num_words = sum(len(reference) for _, reference in utterances)
        for side, paths in found.items():
            num_errors = sum(
                word_errors(reference, [names[word] for word in path]).errors
                for (_, reference), path in zip(utterances, paths, strict=True)
            )
            figures.append(Figure.of(f"{name}, {side}: WER", [100 * num_errors / num_words], "%"))
    for max_active in (ALL, 7000):
        title = f"lattice, beam {BEAM:g}/{LATTICE_BEAM:g}, max_active {max_active}"
        some = sides if max_active == ALL else {"C": sides["C"]}
        found = measure(
            title,
            {
                key: lambda scores, side=side, most=max_active: side.num_arcs(scores, most)
                for key, side in some.items()
            },
        )
        for side, sizes in found.items():
            density = [sum(sizes) / float(num_frames.sum())]
            figures.append(Figure.of(f"{title}, {side}", density, "arcs a frame"))
    longest = max((scores for scores, _ in utterances), key=len)
    for key, side in sides.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            memory = pool.submit(private_mb, type(side), folder, longest).result()
        figures.append(Figure.of(f"a worker's own memory, {key}", [memory], "MB"))
    graph = sides["C"].graph.fst
    title = (
        f"{len(utterances)} utterances, {num_frames.sum()} frames, {num_senones} senones; graph of "
        f"{len(graph.states)} states, {len(graph.arcs)} arcs, "
        f"{(folder / 'graph.fst').stat().st_size / 1e6:.0f} MB"
    )
    show(title, figures, arguments.json)


if __name__ == "__main__":
    main()
