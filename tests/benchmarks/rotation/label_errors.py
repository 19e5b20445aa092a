"""Count the word errors that teachers make on the unlabelled speakers of a fold.

python -m tests.benchmarks.rotation.label_errors --fold 1 --seed 18 --kaldi-dir DIR --out DIR

Decodes the clearest version of each unlabelled utterance, which the teachers label, by each teacher
of the rotation's own run of this fold and seed, at the acoustic scale that the development
speakers chose for it. The second teacher has learned the first one's labels of the same speech:
the table has the held-out speakers' errors in clean beside these. The transcripts of the
unlabelled speakers are read here, and by the oracle, alone.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.names import TEACHER, sequence_trained
from tests.benchmarks.rotation.ablations import REFERENCE
from tests.benchmarks.rotation.folds import Corpus
from tests.benchmarks.rotation.lanes import NUM_LANES
from tests.benchmarks.rotation.scores import (
    CLEAN,
    RECIPE,
    SECOND_TEACHER,
    Scoring,
    errors_at,
    graph_of,
)
from tests.benchmarks.rotation.transcribed_teacher import is_transcribed, transcribed_rows
from training.decode.decoder import DecoderConfig
from training.models.store import load_model
from training.settings.recipe import read_recipe


@dataclass(frozen=True, slots=True)
class LabelErrors:
    """LabelErrors: a teacher's WER, percent, of the speech that it labels, and of held-out speech.

    `of_half` is that of all labels where half of the speakers are transcribed.
    """

    model: str
    labelled: float
    of_half: float
    heldout: float


def label_errors(folder: Path, corpus: Corpus, name: str) -> LabelErrors:
    """Decode all that the teacher labels."""
    torch.set_num_threads(1)
    run, scored = folder / "run", folder / "scores" / f"{name}.json"
    store, recipe, found = (
        ObjectStore((str(run),)),
        read_recipe(str(RECIPE)),
        json.loads(scored.read_text()),
    )
    config, scale = recipe.evaluation, found["facts"]["acoustic_scale"]
    model = load_model(store, str(run), name, recipe.models.of(name))
    graph = graph_of(store, Scoring(name, name, run, run, recipe, scored))
    decoder = DecoderConfig(config.beam, config.max_active)
    counts = [
        (
            *errors_at(row, model, graph, decoder, [scale]),
            len((row.text or "").split()),
            row.speaker_id,
        )
        for row in transcribed_rows(store, str(run), corpus)
    ]
    words = sum(each[1] for each in counts)
    clean = [each for each in found["utterances"] if each["placement"] == CLEAN]
    return LabelErrors(
        name,
        100 * sum(each[0] for each in counts) / words,
        100 * sum(each[0] for each in counts if not is_transcribed(each[2], 0.5)) / words,
        100 * sum(each["errors"] for each in clean) / sum(each["words"] for each in clean),
    )


def main() -> None:
    """Print a line for each teacher."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.rotation.label_errors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fold", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--kaldi-dir", type=Path, required=True, help="AN4's Kaldi data directory")
    parser.add_argument("--out", type=Path, required=True, help="the rotation's folder")
    given = parser.parse_args()
    folder = given.out / REFERENCE / f"multi-fold{given.fold}-seed{given.seed}"
    names = [
        change(name) for name in (TEACHER, SECOND_TEACHER) for change in (str, sequence_trained)
    ]
    with ProcessPoolExecutor(NUM_LANES, get_context("spawn")) as pool:
        found = [pool.submit(label_errors, folder, Corpus(given.kaldi_dir), name) for name in names]
        print(f"{'WER, clean':24}{'what it labels':>16}{'half of it true':>16}{'held out':>16}")
        for each in found:
            row = each.result()
            print(f"{row.model:24}{row.labelled:16.1f}{row.of_half:16.1f}{row.heldout:16.1f}")


if __name__ == "__main__":
    main()
