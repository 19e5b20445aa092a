"""Fits that were stopped after any step end as if they had not been, on real ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.fit.small_fits import copy_stopped, fit, small_fit, steps_saved, write_run
from tests.training.trainers.ranks import RankPool
from training.settings.recipe import CheckpointConfig
from training.settings.trainers import OneBitConfig

EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)
CASES = [("gtc", 2, 1), ("one_bit with double buffering", 2, 1), ("htm", 4, 2), ("rand_psgd", 2, 1)]
OTHERS = [
    *((name, 1, 1) for name in ("synchronous", "gtc", "bmuf")),
    *((name, 2, 1) for name in ("synchronous", "bmuf", "sparse_loco", "one_bit")),
    ("htm", 2, 2),
    *((name, 2, 1) for name in ("d_psgd", "d1d_psgd")),
]


@pytest.mark.parametrize(
    ("trainer", "num_ranks", "group_size", "every_step"),
    [
        *((*each, False) for each in CASES),
        *(pytest.param(*each, True, marks=pytest.mark.chaos) for each in (*CASES, *OTHERS)),
    ],
)
def test_stopped_after_any_step_a_fit_ends_in_the_same_bytes(
    rank_pool: RankPool,
    tmp_path: Path,
    trainer: str,
    num_ranks: int,
    group_size: int,
    every_step: bool,
) -> None:
    """Within a sub-epoch and a block, with dropout and Adam; saving each step changes nothing.

    A save takes as long as two steps, so what resumes saves at the ends of sub-epochs alone. A fit
    that is not stopped after every step is stopped after the first and in the middle.
    """
    minibatch_frames = 64 if num_ranks == 1 else 32
    name, _, is_double = trainer.partition(" with ")
    never_saved = small_fit(name, num_ranks < 4, group_size, minibatch_frames=minibatch_frames)
    never_saved = replace(never_saved, sub_epochs=never_saved.sub_epochs[-3:])
    if is_double:
        assert isinstance(never_saved.training.trainer, OneBitConfig)
        buffered = replace(never_saved.training.trainer, double_buffering=True)
        training = replace(never_saved.training, trainer=buffered)
        never_saved = replace(never_saved, training=training)
    whole, saved = tmp_path / "whole", tmp_path / "saved"
    for folder in (whole, saved):
        write_run(folder)
    expected = rank_pool.run(num_ranks, fit, whole, never_saved)
    what = replace(never_saved, checkpoints=EVERY_STEP)
    assert rank_pool.run(num_ranks, fit, saved, what) == expected
    steps = steps_saved(saved, what)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len(what.sub_epochs)  # and so within sub-epochs too
    for step in steps if every_step else (steps[0], steps[len(steps) // 2]):
        stopped = tmp_path / f"stopped-{step}"
        copy_stopped(saved, what, step, stopped)
        assert rank_pool.run(num_ranks, fit, stopped, never_saved) == expected
