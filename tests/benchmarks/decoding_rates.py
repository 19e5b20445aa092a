"""Time alignment, lattices and decoding of a finished run's speech on one core, for plans.

python -m tests.benchmarks.decoding_rates --run DIR [--set KEY=VALUE ...] [--utterances N] [--json]

DIR is a run with a baseline. Each figure is seconds of speech a second of CPU time, the network's
time left out, at the settings of the recipe `recorded`, with what --set replaces.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.job import recipe_path
from pipeline.runs.names import BASELINE, BOOTSTRAP_STEP, CORPUS_FOLDER, LABELLED
from tests.benchmarks.measure import Figure, interleaved, show
from tests.benchmarks.rotation.scores import rows_of
from training.align.labelled import read_lexicon, transcribed
from training.align.monophone_hmm import bootstrap_alignment
from training.align.network_alignment import align_row, log_likelihoods, read_tree
from training.decode.decoder import DecoderConfig, decode
from training.decode.graph import decoding_graph
from training.decode.ngrams import witten_bell_arpa
from training.models.store import load_model
from training.sequence_training.lattice_decoder import LatticeBeams, decode_lattice
from training.settings.recipe import read_recipe

NUM_ROUNDS = 3


def works(arguments: argparse.Namespace) -> tuple[float, dict[str, Callable[[], Any]]]:
    """Return the seconds of speech, and what each kind of work does with them."""
    run_uri: str = arguments.run
    store, corpus_uri = ObjectStore((run_uri,)), join_uri(run_uri, CORPUS_FOLDER)
    recipe = read_recipe(recipe_path("recorded"), arguments.set)
    rows = rows_of(store, run_uri, LABELLED)[: arguments.utterances]
    lexicon = read_lexicon(store, run_uri, corpus_uri, [BOOTSTRAP_STEP]).parse()
    form = recipe.models.of(BASELINE)
    tree, model = read_tree(store, run_uri), load_model(store, run_uri, BASELINE, form)
    evaluation, lattices = recipe.evaluation, recipe.sequence_training.lattices
    scores = log_likelihoods(rows, model, evaluation.acoustic_scale)
    sentences = [(row.text or "").split() for row in rows]

    def graph(order: int):
        arpa = witten_bell_arpa(sentences, lexicon.pronunciations, order)
        return decoding_graph(lexicon, tree, arpa)

    weak, usual = graph(lattices.ngram_order), graph(evaluation.ngram_order)
    beams = LatticeBeams(lattices.beam, lattices.lattice_beam)
    decoder = DecoderConfig(evaluation.beam, evaluation.max_active)
    seconds = sum(row.duration_ms for row in rows) / 1000
    return seconds, {
        "bootstrap": lambda: bootstrap_alignment(
            [transcribed(row) for row in rows], lexicon, recipe.bootstrap
        ),
        "alignment": lambda: [
            align_row(row, each, lexicon, tree) for row, each in zip(rows, scores, strict=True)
        ],
        "lattices": lambda: [decode_lattice(weak, each, beams) for each in scores],
        "decoding": lambda: [decode(usual, each, decoder) for each in scores],
    }


def parsed(description: str) -> argparse.Namespace:
    """Parse the arguments of a benchmark on a finished run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--utterances", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    torch.set_num_threads(1)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parsed(__doc__.splitlines()[0])
    speech_s, functions = works(arguments)
    spent = interleaved(functions, NUM_ROUNDS, time.process_time)
    figures = [
        Figure.of(name, [speech_s / each for each in some], "x real time")
        for name, some in spent.items()
    ]
    show(f"{speech_s:.0f} s of speech, one core", figures, arguments.json)


if __name__ == "__main__":
    main()
