"""A run whose labelled features lie in three shards, to bootstrap and to realign in a second."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import BOOTSTRAP_STEP, LABELLED, LEXICON_FILE, features_step, model_step
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, write_features
from tests.small_corpus import local_store, serially
from tests.training.decode.toy_language import LEXICON_TXT
from training.align.bootstrap import bootstrap
from training.align.labelled import read_tree
from training.models.store import TrainedModel, make_model, store_model
from training.settings.decoding import BootstrapConfig, TreeConfig, UnknownWordsRule
from training.settings.models import LstmConfig, ModelConfig

SMALL_TREE = TreeConfig(20, 30)
NUM_SHARDS, NUM_EACH = 3, 8
SENTENCES = ("see a cab", "sake", "be cabs", "a bee see sake")
FEATURES = features_step(LABELLED)

Place = tuple[ObjectStore, str, str]


def row(name: str, speaker: str, frames: np.ndarray, text: str = "see a cab") -> FeatureRow:
    """Return an utterance's features as extraction writes them."""
    return FeatureRow(
        utterance_id=name,
        speaker_id=speaker,
        duration_ms=10 * len(frames),
        created_at="2020-01-01T00:00:00.000+00:00",
        audio_uri=f"audio/{name}.flac",
        audio_etag="",
        text=text,
        placement=None,
        features=frames,
    )


def shards(longest: int = 160) -> list[list[FeatureRow]]:
    """Make shards of two speakers each, of noise that is louder in the middle."""
    generator = np.random.default_rng(5)
    made = []
    for number in range(NUM_SHARDS * NUM_EACH):
        frames = generator.normal(size=(int(generator.integers(110, longest)), NUM_BINS))
        frames[20:-20] += 3
        speaker = f"speaker-{number // NUM_EACH}-{number % 2}"
        text = SENTENCES[number % len(SENTENCES)]
        made.append(row(f"utterance-{number:02d}", speaker, frames.astype(np.float16), text))
    return [made[start : start + NUM_EACH] for start in range(0, len(made), NUM_EACH)]


def write_labelled(folder: Path, parts: list[list[FeatureRow]]) -> Place:
    """Store the lexicon and the feature shards."""
    store, run_uri, corpus_uri = local_store(folder)
    store.put(join_uri(corpus_uri, LEXICON_FILE), LEXICON_TXT.encode())

    write_features_of(store, run_uri, LABELLED, parts)
    return store, run_uri, corpus_uri


def write_features_of(
    store: ObjectStore, run_uri: str, subset: str, parts: list[list[FeatureRow]]
) -> None:
    """Store the feature shards of a subset."""

    def write(step):
        tallies = [Tally(len(part), sum(each.duration_ms for each in part)) for part in parts]
        outputs = [
            step.context.put_output(f"{number:06d}-000", ".parquet", write_features(part), tally)
            for number, (part, tally) in enumerate(zip(parts, tallies, strict=True))
        ]
        return step.lossless(sum(tallies, Tally()), tuple(outputs))

    run_step(StepSpec(store, run_uri, features_step(subset), {}), write)


def bootstrapped(
    place: Place,
    loss_budget: float = 0.0,
    versions: Versions = "own",
    unknown_words: UnknownWordsRule = "row",
    tree: TreeConfig = SMALL_TREE,
    **settings: float,
):
    """Bootstrap the run, with few iterations and senones."""
    config = replace(BootstrapConfig(num_iterations=2, max_gaussians=1), **settings)
    return bootstrap(*place, config, tree, loss_budget, serially, versions, unknown_words)


NETWORK = LstmConfig(1, 16, bidirectional=False, look_ahead=3, dropout=0.0)


def store_network(place: Place, name: str, form: ModelConfig = NETWORK) -> None:
    """Store an untrained network as one of the run's aligners."""
    store, run_uri, _ = place
    torch.manual_seed(3)
    num_senones = read_tree(store, run_uri, BOOTSTRAP_STEP).num_senones
    trained = TrainedModel(make_model(form, num_senones).eval(), torch.zeros(num_senones))
    spec = StepSpec(store, run_uri, model_step(name), {}, [BOOTSTRAP_STEP])
    run_step(spec, lambda step: store_model(step, trained, Tally(), {}, Tally()))
