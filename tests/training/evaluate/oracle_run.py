"""Write a run whose features name the senones to decode, and models that read them, with errors.

The first energy of each frame is the senone of its speech. A model of some error rate hears other
senones in the frames that the second energy marks.
"""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.engine import StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, BOOTSTRAP_STEP, DEV, HELDOUT
from pipeline.runs.names import model_step as step_of_model
from pipeline.shards import Alignment, FeatureRow, PartitionRow, write_partition
from tests.training.align.labelled_run import write_features_of
from tests.training.decode.toy_language import LEXICON_TXT, senones_of, toy_tree
from training.evaluate import slices
from training.evaluate.graph_building import build_graphs
from training.models.lstm import LstmModel
from training.models.store import TrainedModel
from training.settings.decoding import EvaluationConfig, FirstPassConfig
from training.settings.models import LstmConfig, ModelConfig

TREE = toy_tree()
CONFIG = EvaluationConfig(
    ngram_order=2,
    acoustic_scale=1.0,
    beam=40.0,
    max_active=5000,
    lattice_beam=40.0,
    first_pass=FirstPassConfig(ngram_order=2, pruning=0.0),
)
ORDERS = (1, 2, 3)
"""The n-gram orders by which the run can rescore lattices."""
FORM = LstmConfig(1, 1, bidirectional=False, look_ahead=0, dropout=0.0)
MODELS = dict.fromkeys(("baseline", "teacher", "student"), FORM)
SENTENCES = [["see", "a", "cab"], ["a", "bee"], ["cabs", "see", "see"], ["sake", "a"]]
LISTENS_FROM = {"baseline": 2, "student": 4, "teacher": 9}
"""A model does not hear utterances that are marked as this hard, or harder."""


def row(
    number: int, words: list[str], speaker: str, hardness: int = 0, repeat: int = 9
) -> FeatureRow:
    """Make an utterance in which a senone takes `repeat` frames of 10 ms."""
    senones = np.repeat(senones_of(words, TREE), repeat)
    features = np.zeros((len(senones), NUM_BINS), np.float16)
    features[:, 0], features[:, 1] = senones, hardness
    return FeatureRow(
        utterance_id=f"u-{number:02d}",
        speaker_id=speaker,
        duration_ms=10 * len(senones),
        created_at="2026-01-01T00:00:00+00:00",
        audio_uri=f"audio/{number}.flac",
        audio_etag="",
        text=" ".join(words),
        placement=("DP1", "DP2")[number % 2],
        features=features,
    )


def heldout_rows() -> list[FeatureRow]:
    """Make 24 utterances of four speakers, of which the models hear some."""
    return [
        row(number, SENTENCES[number * 5 % 4], f"s_{number // 6}", hardness=number % 7)
        for number in range(24)
    ]


class Oracle(LstmModel):
    """Oracle reads the senones off the features; what is too hard for it sounds like silence."""

    def __init__(self, name: str, heard: Counter[tuple[str, bytes]]) -> None:
        super().__init__(FORM, TREE.num_senones)
        self.name, self.heard = name, heard

    def utterance_logits(self, utterances: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return logits of 30 for what is heard, and count the frames."""
        found = []
        for frames in utterances:
            self.heard[self.name, frames.numpy().tobytes()] += 1
            senones = frames[:, NUM_BINS].long()
            silence = TREE.senone(0, 0, 0)
            senones[frames[:, NUM_BINS + 1] >= LISTENS_FROM[self.name]] = silence
            found.append(30 * torch.nn.functional.one_hot(senones, TREE.num_senones).float())
        return found


@dataclass
class OracleRun:
    """OracleRun: a run ready to be evaluated, and how often each model heard each utterance."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    heard: Counter[tuple[str, bytes]] = field(default_factory=Counter)

    @property
    def place(self) -> tuple[ObjectStore, str, str]:
        """Return what steps take."""
        return self.store, self.run_uri, self.corpus_uri

    def model(self, store: ObjectStore, run_uri: str, name: str, form: ModelConfig) -> TrainedModel:
        """Make the model, in the place of what a run stores."""
        del store, run_uri, form
        uniform = torch.full((TREE.num_senones,), 1 / TREE.num_senones).log()
        return TrainedModel(Oracle(name, self.heard).eval(), uniform)

    def store_keys(self, folder: str) -> list[str]:
        """List the objects in a folder of the run."""
        return [found.uri for found in self.store.list(f"{self.run_uri}/{folder}")]


def write_oracle_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[FeatureRow], dev: bool = False
) -> OracleRun:
    """Write all that evaluation reads: two shards of features, the tree, a graph, models."""
    run = OracleRun(ObjectStore((str(folder),)), str(folder / "run"), str(folder / "corpus"))
    (folder / "corpus").mkdir(parents=True)
    (folder / "corpus" / "lexicon.txt").write_text(LEXICON_TXT)
    middle = len(rows) // 2
    parts = [some for some in (rows[:middle], rows[middle:]) if some]
    write_features_of(run.store, run.run_uri, HELDOUT, parts)
    if dev:
        developers = [replace(each, speaker_id=f"dev-{each.speaker_id}") for each in rows]
        write_features_of(run.store, run.run_uri, DEV, [developers])
    aligned = [
        PartitionRow(
            f"l{n}", "s", 1, " ".join(words), np.zeros((9, NUM_BINS), np.float16), labels, 0
        )
        for n, words in enumerate(SENTENCES)
        for labels in [Alignment(np.zeros(9, np.uint16))]
    ]

    def align(step: StepRun) -> Manifest:
        tally = Tally(len(aligned), len(aligned))
        output = step.context.put_output("000000", ".parquet", write_partition(aligned), tally)
        return step.lossless(tally, (output,), {"senone_tree": TREE.to_json()})

    run_step(StepSpec(run.store, run.run_uri, ALIGNMENT_STEP, {}), align)
    spec = StepSpec(run.store, run.run_uri, BOOTSTRAP_STEP, {"unknown_words": "row"})
    run_step(spec, lambda step: step.lossless(Tally()))
    for name in MODELS:
        spec = StepSpec(run.store, run.run_uri, step_of_model(name), {})
        run_step(spec, lambda step: step.lossless(Tally()))
    build_graphs(*run.place, CONFIG, ORDERS)
    monkeypatch.setattr(slices, "load_model", run.model)
    return run


def scores_of(run: OracleRun) -> dict[str, Any]:
    """Read the scores of a finished evaluation."""
    outputs = read_manifest(run.store, run.run_uri, "evaluation").outputs
    (scores,) = [output for output in outputs if "/scores-" in output.key]
    return dict(json.loads(read_output(run.store, run.run_uri, scores)))
