"""A run of two partitions, small enough to fit models on it again and again."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.kbest import select_kbest
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, PARTITIONS_STEP
from pipeline.shards import Alignment, PartitionRow, write_partition
from tests.training.training_settings import trainer_of, training_settings
from training.algorithms.learning_rates import exponential_decay
from training.data.sub_epochs import scheduled_learning_sub_epochs, supervised_sub_epochs
from training.distributed.process_group import ProcessGroup
from training.fit.model_specs import MOMENTS, Fit
from training.fit.train_model import fit_model
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig
from training.settings.trainers import AdamConfig, SgdConfig

NUM_SENONES = 6
AT_THE_ENDS = CheckpointConfig(steps=0)
DECAY = exponential_decay(0.05, 0.03, 4)
NO_PLACEMENT: Mapping[int, str] = MappingProxyType({})
SUPERVISED = supervised_sub_epochs(DECAY, 3)
SCHEDULED = scheduled_learning_sub_epochs(DECAY, 2, 1, 1.2, 2)


def speech(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames that tell their senone by which bins are raised, and the senones, 90 frames long."""
    generator = np.random.default_rng(number)
    senones = np.repeat(generator.integers(0, NUM_SENONES, 10), 9)
    frames = generator.normal(size=(90, NUM_BINS)) + 2 * np.eye(NUM_BINS)[senones * 10]
    return frames.astype(np.float16), senones.astype(np.uint16)


def partition(
    soft: bool, placed: Mapping[int, str] = NO_PLACEMENT, numbers: Sequence[int] = range(8)
) -> bytes:
    """Utterances with hard senones, or with the logits of a teacher that is mostly right.

    Number n has the placement `placed[n]`, if any, where soft ones are counted from 8 on.
    """
    rows = []
    for number in numbers:
        features, senones = speech(number + 8 * soft)
        logits = 4 * np.eye(NUM_SENONES, dtype=np.float32)[senones[1::3]]
        rows.append(
            PartitionRow(
                utterance_id=f"utterance-{number}",
                speaker_id="speaker",
                duration_ms=900,
                text=None,
                features=features,
                targets=select_kbest(logits, 3) if soft else Alignment(senones),
                offset=0,
                placement=placed.get(number + 8 * soft),
            )
        )
    return write_partition(rows)


def write_step(
    store: ObjectStore, run_uri: str, step: str, data: bytes | None, num_rows: int = 8, **statistics
) -> None:
    """A finished step with at most one object."""
    context = step_context(store, run_uri, step, {}, {})
    tally = Tally(num_rows, 900 * num_rows)
    outputs = (context.put_output("0", ".parquet", data, tally),) if data else ()
    empty = tally if data else Tally()
    manifest = Manifest(
        step, {}, {}, outputs, tally_in=empty, tally_out=empty, statistics=statistics
    )
    write_manifest(context, manifest)


def write_run(
    folder: Path, placed: Mapping[int, str] = NO_PLACEMENT, at: Collection[str] = ()
) -> tuple[ObjectStore, str]:
    """All that fitting reads: eight rows of each kind, or those `at` some placements alone."""
    run_uri = str(folder)
    store = ObjectStore((run_uri,))
    moments = Moments.of(np.concatenate([speech(number)[0] for number in range(8)])).to_dict()
    for subset in ("labelled", "unlabelled"):
        write_step(store, run_uri, f"features/{subset}", None, moments=moments)
    of_alignments, of_partitions = {"senone_counts": [120] * NUM_SENONES}, {"offsets": "one"}
    for soft, step, statistics in (
        (False, ALIGNMENT_STEP, of_alignments),
        (True, PARTITIONS_STEP, of_partitions),
    ):
        numbers = [n for n in range(8) if not at or placed[n + 8 * soft] in at]
        data = partition(soft, placed, numbers)
        write_step(store, run_uri, step, data, len(numbers), **statistics)
    return store, run_uri


def small_fit(
    trainer: str = "synchronous",
    student: bool = False,
    group_size: int = 1,
    checkpoints: CheckpointConfig = AT_THE_ENDS,
    minibatch_frames: int = 64,
) -> Fit:
    """An LSTM of two layers of eight units, with dropout between them."""
    settings = {"gradient_threshold": 0.25, "block_size": 3, "group_size": group_size}
    return Fit(
        name="student" if student else "baseline",
        model=LstmConfig(2, 8, bidirectional=False, look_ahead=1, dropout=0.1),
        labelled=ALIGNMENT_STEP,
        unlabelled=PARTITIONS_STEP if student else None,
        sub_epochs=SCHEDULED if student else SUPERVISED,
        training=training_settings(
            minibatch_frames,
            trainer=trainer_of(trainer, **settings),
            # 1-bit SGD has the momentum itself.
            optimizer=SgdConfig(momentum=0.0) if trainer == "one_bit" else AdamConfig(),
        ),
        moments=MOMENTS["all"],
        checkpoints=checkpoints,
    )


def fit(group: ProcessGroup, folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    """Fit as one rank of `group`; the manifest and the model's bytes."""
    store, run_uri = ObjectStore((str(folder),)), str(folder)
    manifest = fit_model(what, store, run_uri, group).manifest
    return manifest, read_output(store, run_uri, manifest.outputs[0])


def steps_saved(folder: Path, what: Fit) -> list[int]:
    """The steps after which there is a checkpoint, in order."""
    records = (folder / "models" / what.name / "checkpoints").glob("*.json")
    return sorted(int(path.stem) for path in records)


def copy_stopped(folder: Path, what: Fit, step: int, stopped: Path) -> None:
    """Copy a run as it would be if it had been killed just after the checkpoint of `step`."""
    shutil.copytree(folder, stopped)
    shutil.rmtree(stopped / "models" / what.name)
    saved = folder / "models" / what.name / "checkpoints"
    (stopped / "models" / what.name / "checkpoints").mkdir(parents=True)
    for path in saved.iterdir():
        if int(path.name[:12]) <= step:
            shutil.copy(path, stopped / path.relative_to(folder))
