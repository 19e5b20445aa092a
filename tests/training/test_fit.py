"""Fitting a model on a small run: every trainer, resumed and not, bitwise."""

from pathlib import Path

import numpy as np
import pytest

from infra.object_store import ObjectStore, join_uri
from pipeline.kbest import select_kbest
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.shards import PartitionRow, write_partition
from pipeline.steps.commit import step_context, write_manifest
from pipeline.steps.manifest import Manifest, read_manifest, read_output
from training import collectives
from training.acoustic_model import ModelConfig
from training.checkpoint import Checkpoints
from training.fit import Fit, fit_model
from training.fits import ALIGNED, UNLABELLED
from training.loop import LoopConfig
from training.recipes import TrainerConfig, TrainerName
from training.schedule import ExponentialDecay, scheduled_learning_visits, supervised_visits

NUM_SENONES = 6
DECAY = ExponentialDecay(0.05, 0.03, 4)
SUPERVISED = supervised_visits(DECAY, 3, 4)
SCHEDULED = scheduled_learning_visits(DECAY, 2, 2, 1, 1.2, 2)


def speech(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames that tell their senone by which bins are raised, and the senones, 90 frames long."""
    generator = np.random.default_rng(number)
    senones = np.repeat(generator.integers(0, NUM_SENONES, 10), 9)
    frames = generator.normal(size=(90, 64)) + 2 * np.eye(64)[senones * 10]
    return frames.astype(np.float16), senones.astype(np.uint16)


def partition(soft: bool) -> bytes:
    """Eight utterances with hard senones, or with the logits of a teacher that is mostly right."""
    rows = []
    for number in range(8):
        features, senones = speech(number + 8 * soft)
        logits = 4 * np.eye(NUM_SENONES, dtype=np.float32)[senones[1::3]]
        rows.append(
            PartitionRow(
                utterance_id=f"utterance-{number}",
                speaker_id="speaker",
                duration_ms=900,
                text=None,
                features=features,
                alignment=None if soft else senones,
                offset=0,
                kbest=select_kbest(logits, 3) if soft else None,
            )
        )
    return write_partition(rows)


def write_step(
    store: ObjectStore, run_uri: str, step: str, data: bytes | None, **statistics
) -> None:
    """A finished step with at most one object."""
    context = step_context(store, run_uri, step, {}, {})
    tally = Tally(8, 7200)
    outputs = (context.put_output("0", ".parquet", data, tally),) if data else ()
    empty = tally if data else Tally()
    manifest = Manifest(
        step, {}, {}, outputs, tally_in=empty, tally_out=empty, statistics=statistics
    )
    write_manifest(context, manifest)


def write_run(folder: Path) -> tuple[ObjectStore, str]:
    """All that fitting reads."""
    run_uri = str(folder)
    store = ObjectStore((run_uri,))
    moments = Moments.of(np.concatenate([speech(number)[0] for number in range(8)])).to_dict()
    for subset in ("labelled", "unlabelled"):
        write_step(store, run_uri, f"features/{subset}", None, moments=moments)
    counts = [120] * NUM_SENONES
    write_step(store, run_uri, ALIGNED, partition(soft=False), senone_counts=counts)
    write_step(store, run_uri, UNLABELLED, partition(soft=True))
    return store, run_uri


def small_fit(trainer: TrainerName = "synchronous", student: bool = False) -> Fit:
    """An eight-unit LSTM."""
    return Fit(
        name="student" if student else "baseline",
        model=ModelConfig(1, 8, bidirectional=False, look_ahead=1, dropout=0.1),
        labelled=ALIGNED,
        unlabelled=UNLABELLED if student else None,
        visits=SCHEDULED if student else SUPERVISED,
        loop=LoopConfig(64, 1.0),
        trainer=TrainerConfig(trainer, 0.0, 2, 1.0, 1.0, 1),
        seed=1,
    )


def fit(folder: Path, what: Fit) -> tuple[Manifest, bytes]:
    """Fit in this process alone; the manifest and the model's bytes."""
    store, run_uri = ObjectStore((str(folder),)), str(folder)
    with collectives.open_world() as group:
        manifest, _ = fit_model(what, store, run_uri, group)
    return manifest, read_output(store, run_uri, manifest.outputs[0])


@pytest.mark.parametrize("trainer", ["synchronous", "gtc", "bmuf", "htm"])
@pytest.mark.parametrize("student", [False, True])
def test_every_trainer_learns(tmp_path: Path, trainer: TrainerName, student: bool) -> None:
    """Cross-entropy falls from the first to the last visit to labelled data."""
    write_run(tmp_path)
    manifest, _ = fit(tmp_path, small_fit(trainer, student))
    labelled = [point for point in manifest.statistics["curve"] if point["labelled"]]
    assert labelled[-1]["cross_entropy"] < labelled[0]["cross_entropy"]
    assert manifest.tally_out.utterances == (16 if student else 8)


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    """Weights, curve and manifest repeat to the bit, at another place too."""
    results = []
    for name in ("first", "second"):
        write_run(tmp_path / name)
        manifest, model = fit(tmp_path / name, small_fit(student=True))
        results.append((manifest.to_bytes(), model))
    assert results[0] == results[1]


@pytest.mark.parametrize("trainer", ["synchronous", "gtc", "bmuf", "htm"])
def test_a_resumed_fit_is_the_uninterrupted_one(
    tmp_path: Path, trainer: TrainerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the third visit's checkpoint, mid-block for BMUF, it ends in the same bytes."""
    for name in ("whole", "broken"):
        write_run(tmp_path / name)
    expected = fit(tmp_path / "whole", small_fit(trainer, student=True))[1]
    save = Checkpoints.save

    def save_then_die(self: Checkpoints, visit: int, state: dict) -> None:
        save(self, visit, state)
        if visit == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_then_die)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "broken", small_fit(trainer, student=True))
    assert fit(tmp_path / "broken", small_fit(trainer, student=True))[1] == expected


def test_a_fitted_model_is_not_fitted_again(tmp_path: Path) -> None:
    """The second call finds the manifest; another recipe is refused."""
    store, run_uri = write_run(tmp_path)
    fit(tmp_path, small_fit())
    with collectives.open_world() as group:
        assert fit_model(small_fit(), store, run_uri, group)[1]
        with pytest.raises(ValueError, match="another recipe"):
            fit_model(small_fit("bmuf"), store, run_uri, group)
    assert store.exists(join_uri(run_uri, "models/baseline/manifest.json"))
    assert read_manifest(store, run_uri, "models/baseline").statistics["curve"]
