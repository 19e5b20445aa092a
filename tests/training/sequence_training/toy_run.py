"""Write a run of toy sentences, aligned and ready for lattices: two partitions, one bad row."""

from pathlib import Path

import numpy as np
import torch

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS, NUM_INPUTS
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import StepRun, write_manifest
from pipeline.runs.manifest import Manifest, sha256
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    BOOTSTRAP_STEP,
    LABELLED,
    LEXICON_FILE,
    UNLABELLED,
    features_step,
    lattices_step,
    model_step,
    sequence_trained,
)
from pipeline.shards import Alignment, PartitionRow, write_partition
from tests.training.decode.toy_language import LEXICON_TXT, senones_of, toy_tree
from tests.training.training_settings import trainer_of, training_settings
from training.data.sub_epochs import sequence_sub_epochs
from training.fit.model_specs import MOMENTS, Fit, SequenceCriterion
from training.models.acoustic_model import AcousticModel
from training.models.store import TrainedModel, log_priors, make_model, store_model
from training.settings.models import LstmConfig, ModelConfig
from training.settings.recipe import CheckpointConfig
from training.settings.trainers import AdamConfig, SgdConfig

TREE = toy_tree()
SENTENCES = (["see", "a", "cab"], ["a", "bee"], ["cabs", "see"], ["sake", "a"], ["cab", "see"])
NUM_ROWS = (5, 3)
UNREADABLE = "utterance-0-2"
"""Its alignment is no sequence of words."""

SCALE = 0.5
CONFIG = LstmConfig(1, 12, bidirectional=False, look_ahead=1, dropout=0.0)


def sentence_row(partition: int, number: int) -> PartitionRow:
    """A sentence whose frames show their senones dimly."""
    generator = np.random.default_rng([partition, number])
    words = list(SENTENCES[(partition + number) % len(SENTENCES)])
    low_rate = [s for s in senones_of(words, TREE) for _ in range(generator.integers(1, 4))]
    senones = np.repeat(low_rate, 3)
    frames = generator.normal(size=(len(senones), NUM_BINS)) + 1.5 * np.eye(NUM_BINS)[senones]
    name = f"utterance-{partition}-{number}"
    if name == UNREADABLE:
        senones = senones[::-1].copy()
    return PartitionRow(
        utterance_id=name,
        speaker_id="speaker",
        duration_ms=10 * len(senones),
        text=" ".join(words),
        features=frames.astype(np.float16),
        targets=Alignment(senones.astype(np.uint16)),
        offset=0,
        placement=("clean", "DP1")[number % 2],
    )


def rows_of(partition: int) -> list[PartitionRow]:
    return [sentence_row(partition, number) for number in range(NUM_ROWS[partition])]


def write_toy_run(
    folder: Path, name: str = BASELINE, config: ModelConfig = CONFIG
) -> tuple[ObjectStore, str, str]:
    """All that lattices and training on them read; the store, the run and the corpus."""
    run_uri, corpus_uri = str(folder / "run"), str(folder / "corpus")
    store = ObjectStore((run_uri, corpus_uri))
    store.put(f"{corpus_uri}/{LEXICON_FILE}", LEXICON_TXT.encode())
    moments = Moments.of(np.concatenate([row.features for row in rows_of(0)])).to_dict()
    for subset in (LABELLED, UNLABELLED):
        finish(store, run_uri, features_step(subset), Tally(), (), moments=moments)
    finish(store, run_uri, BOOTSTRAP_STEP, Tally(), ())
    context = step_context(store, run_uri, ALIGNMENT_STEP, {}, {})
    outputs, counts = [], np.zeros(TREE.num_senones, int)
    for partition in range(len(NUM_ROWS)):
        rows = rows_of(partition)
        tally = Tally(len(rows), sum(row.duration_ms for row in rows))
        outputs.append(
            context.put_output(f"{partition:06d}", ".parquet", write_partition(rows), tally)
        )
        for row in rows:
            counts += np.bincount(row.targets.senones, minlength=len(counts))
    total = sum((output.tally for output in outputs), Tally())
    statistics = {"senone_counts": counts.tolist(), "senone_tree": TREE.to_json()}
    finish(*(store, run_uri, ALIGNMENT_STEP, total, tuple(outputs)), **statistics)
    torch.manual_seed(7)
    model = make_model(config, TREE.num_senones)
    put_model(store, run_uri, name, model, counts.tolist(), moments)
    return store, run_uri, corpus_uri


def put_model(
    store: ObjectStore,
    run_uri: str,
    name: str,
    model: AcousticModel,
    counts: list[int],
    moments: dict,
) -> None:
    """Let a model learn a little from the aligned frames, by cross-entropy, and store it."""
    model.freeze_normalization(Moments.from_dict(moments))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    rows = [row for row in rows_of(0) if row.utterance_id != UNREADABLE]
    for _ in range(12):
        optimizer.zero_grad()
        for row in rows:
            features = torch.from_numpy(row.features.astype(np.float32)).reshape(1, -1, NUM_INPUTS)
            labels = torch.from_numpy(row.targets.senones[1::3].astype(np.int64))
            logits = model(features)[0, model.config.delay :]
            torch.nn.functional.cross_entropy(logits, labels[: len(logits)]).backward()
        optimizer.step()
    context = step_context(store, run_uri, model_step(name), {}, {})
    step = StepRun(context, {}, {}, base=None)
    made = store_model(step, TrainedModel(model.eval(), log_priors(counts)), Tally(), {}, Tally())
    finish(store, run_uri, model_step(name), Tally(), made.outputs)


def finish(
    store: ObjectStore, run_uri: str, step: str, tally: Tally, outputs: tuple, **statistics
) -> None:
    context = step_context(store, run_uri, step, {}, {})
    is_bootstrap = step == BOOTSTRAP_STEP
    config = {"unknown_words": "row"} if is_bootstrap else {}
    inputs = {LEXICON_FILE: sha256(LEXICON_TXT.encode())} if is_bootstrap else {}
    manifest = Manifest(
        step, config, inputs, outputs, tally_in=tally, tally_out=tally, statistics=statistics
    )
    write_manifest(context, manifest)


def smbr_fit(
    trainer: str = "synchronous",
    num_epochs: int = 4,
    steps: int = 0,
    name: str = BASELINE,
    config: ModelConfig = CONFIG,
) -> Fit:
    """Train a model on by sMBR, in minibatches of two or three sentences."""
    settings = {"gradient_threshold": 0.02, "block_size": 2, "group_size": 1}
    return Fit(
        name=sequence_trained(name),
        model=config,
        labelled=ALIGNMENT_STEP,
        unlabelled=None,
        sub_epochs=sequence_sub_epochs([0.01] * num_epochs),
        training=training_settings(
            64,
            trainer=trainer_of(trainer, **settings),
            # 1-bit SGD has the momentum itself.
            optimizer=SgdConfig(momentum=0.0) if trainer == "one_bit" else AdamConfig(),
        ),
        moments=MOMENTS["all"],
        warm_start=name,
        criterion=SequenceCriterion(lattices_step(name), SCALE, 0.0),
        checkpoints=CheckpointConfig(steps=steps, num_kept=100),
    )
