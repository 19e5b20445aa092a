"""The rows of paper 004's Table 3 that select their minibatch size, on a small task."""

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.trainer_tables.__main__ import make_optimizer, straggling, trained
from tests.benchmarks.trainer_tables.chunks import CHUNK_FRAMES, CONTEXT, Chunks, ChunkTask
from tests.benchmarks.trainer_tables.rows import TABLE_3
from tests.benchmarks.trainer_tables.selecting import Selection, train_selecting
from training.distributed.simulated_group import simulate_ranks

pytestmark = pytest.mark.chaos

NUM_SENONES = 4


def small_task() -> ChunkTask:
    """Return chunks whose energies tell their senones."""
    torch.manual_seed(0)
    labels = torch.randint(NUM_SENONES, (64, CHUNK_FRAMES))
    energies = torch.randn(64, CHUNK_FRAMES + 2 * CONTEXT, 64)
    energies[:, CONTEXT:-CONTEXT, :NUM_SENONES] += 3 * torch.eye(NUM_SENONES)[labels]
    chunks = Chunks(energies, labels)
    return ChunkTask(chunks, chunks, NUM_SENONES)


def test_the_rows_that_select_train() -> None:
    """Table 3 has two, without and with double buffering; each learns, and repeats to the bit."""
    task = small_task()
    rows = [row for row in TABLE_3.rows if row.selection is not None]
    assert [row.is_half for row in rows] == [False, True]
    selection = Selection(factors=(1, 2), every=2, trial=2)
    for row in rows:
        training = task.training_from(
            task.new_model("sigmoid", 1),
            lambda model: make_optimizer(0.0, model),
            1,
            (0.01,) * 3,
            8,
            8,
            lambda rank, step: straggling(1, rank, step),
        )
        model, evaluations = trained(training, replace(row, selection=selection))
        assert len(evaluations) == 3
        assert evaluations[-1] > 100 / NUM_SENONES
        arguments = training, row.make_trainer, selection
        again, _, factor = simulate_ranks(row.num_ranks, train_selecting, *arguments)[0]
        assert factor in selection.factors
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)
