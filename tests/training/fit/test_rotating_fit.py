"""A student whose passes read other offsets: the same frames and bits when it is resumed."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.kbest import select_kbest
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import KBestAtAllOffsets, read_partition, write_partition
from tests.training.fit.small_fits import (
    DECAY,
    NUM_SENONES,
    copy_stopped,
    fit,
    partition,
    small_fit,
    speech,
    steps_saved,
    write_run,
    write_step,
)
from training.data.sub_epochs import scheduled_learning_sub_epochs
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import Fit
from training.settings.recipe import CheckpointConfig


def student(rotates: bool) -> Fit:
    """Four passes of one sub-epoch each, saved at every other step."""
    saves = CheckpointConfig(steps=2, num_kept=1000)
    made = small_fit("synchronous", True, checkpoints=saves, minibatch_frames=128)
    return replace(
        made, sub_epochs=scheduled_learning_sub_epochs(DECAY, 1, 1, 1.2, 2, rotates=rotates)
    )


def write_rotating_run(folder: Path) -> None:
    """The small run, with targets at all offsets: those at one offset are among them."""
    store, run_uri = write_run(folder)
    (folder / PARTITIONS_STEP / "manifest.json").unlink()
    rows = []
    for number, row in enumerate(read_partition(partition(soft=True))):
        _, senones = speech(number + 8)
        logits = 4 * np.eye(NUM_SENONES, dtype=np.float32)[senones[1:-1]]
        rows.append(replace(row, targets=KBestAtAllOffsets(select_kbest(logits, 3))))
    write_step(store, run_uri, PARTITIONS_STEP, write_partition(rows), offsets="all")


def test_a_rotating_student_resumes_in_any_pass(tmp_path: Path) -> None:
    """Bitwise; each pass counts the frames of its offset, and pass 0 is that of one offset.

    Where no pass rotates, targets at all offsets make the model of those at one, to the byte.
    """
    what, still = student(rotates=True), student(rotates=False)
    write_rotating_run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "still")
    expected = simulate_ranks(1, fit, tmp_path / "whole", what)
    curve = expected[0][0].statistics["curve"]
    assert [point["num_frames"] for point in curve[::2]] == [8 * 30, 8 * 29, 8 * 29, 8 * 30]
    write_run(tmp_path / "one")
    ((one, model),) = simulate_ranks(1, fit, tmp_path / "one", still)
    assert curve[0] == one.statistics["curve"][0]
    assert curve[2] != one.statistics["curve"][2]
    assert simulate_ranks(1, fit, tmp_path / "still", still)[0][1] == model
    steps = steps_saved(tmp_path / "whole", what)
    copy_stopped(tmp_path / "whole", what, steps[len(steps) // 2], tmp_path / "stopped")
    assert simulate_ranks(1, fit, tmp_path / "stopped", what) == expected


def test_targets_at_one_offset_do_not_rotate(tmp_path: Path) -> None:
    """Refused before the first step, and not after the hours of the first pass."""
    write_run(tmp_path)
    with pytest.raises(ValueError, match="partitions/unlabelled: its targets are at one offset"):
        simulate_ranks(1, fit, tmp_path, student(rotates=True))
    assert not list((tmp_path / "models").rglob("*.npz"))
