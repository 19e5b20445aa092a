"""No training step makes the host wait for a device: the job's loop on a CPU that is watched."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fit.host_reads import HostReads, look_late, send_as_on_a_gpu
from tests.training.fit.small_fits import fit, small_fit, steps_saved, write_run
from training.algorithms.learning_rates import MinRateNewbob
from training.data.dataset import SubEpochPlan
from training.data.minibatch import Minibatch
from training.distributed.checks import Comparison
from training.distributed.simulated_group import simulate_ranks
from training.fit import train_model, training_loop
from training.fit.steps import FrameTotals, RunningTotals, take_steps
from training.fit.training_loop import Fitting
from training.settings.recipe import CheckpointConfig
from training.trainers import trainer

pytestmark = pytest.mark.chaos

TRAINERS = ["synchronous", "gtc", "bmuf", "sparse_loco", "one_bit", "htm"]


class Watch:
    """Watch holds the reads of all ranks, by the part of the loop that made them."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self.on_host: dict[int, Tensor] = {}
        self._local = threading.local()

    def reads(self) -> HostReads:
        """Return those of this rank, which is a thread."""
        if not hasattr(self._local, "reads"):
            self._local.reads = HostReads(self.on_host)
        return self._local.reads

    def lengths_on_host(self, minibatches: Iterator[Minibatch]) -> Iterator[Minibatch]:
        """Yield the minibatches, whose lengths remain on the host."""
        for minibatch in minibatches:
            self.on_host[id(minibatch.lengths)] = minibatch.lengths
            yield minibatch

    def over(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, watched."""

        def watched(*args: Any) -> Any:
            with self.reads() as reads:
                result = function(*args)
            self.found[name] += reads.found
            self.counts[name] += 1
            reads.found.clear()
            return result

        return watched


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch the loop: reader, model, loss, clipping, trainer, optimizer, totals."""
    watch = Watch()
    look_late(monkeypatch)
    send_as_on_a_gpu(monkeypatch, watch.reads)

    def steps(model: Any, optimizer: Any, minibatches: Any, *rest: Any) -> Iterator[RunningTotals]:
        yield from take_steps(model, optimizer, watch.lengths_on_host(minibatches), *rest)

    end, save = Fitting.end, Fitting._save

    def save_unwatched(self: Fitting) -> None:
        with watch.reads().not_watching():
            save(self)

    monkeypatch.setattr(training_loop, "take_steps", steps)
    monkeypatch.setattr(Fitting, "_save", save_unwatched)
    monkeypatch.setattr(Fitting, "_train", watch.over("steps", Fitting._train))
    monkeypatch.setattr(Fitting, "end", watch.over("ends", end))
    return watch


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let ranks compare their replicas after every second step; return what grows as they do."""
    comparisons: list[str] = []

    class Noted(Comparison):
        def check(self) -> None:
            comparisons.append("checked")
            super().check()

    monkeypatch.setattr(trainer, "STEPS_BETWEEN_COMPARISONS", 2)
    monkeypatch.setattr(trainer, "Comparison", Noted)
    return comparisons


@pytest.mark.parametrize("name", TRAINERS)
def test_no_step_waits_for_the_device(
    tmp_path: Path, watch: Watch, compared: list[str], name: str
) -> None:
    """Steps on hard and on soft targets read nothing; HTM has two groups of two ranks."""
    write_run(tmp_path)
    num_ranks = 4 if name == "htm" else 2
    what = small_fit(name, student=True, group_size=2, minibatch_frames=32)
    # The last six sub-epochs: chunks and whole utterances, and two blocks of HTM.
    what = replace(what, sub_epochs=what.sub_epochs[-6:])
    simulate_ranks(num_ranks, fit, tmp_path, what)
    assert watch.counts["steps"] == num_ranks * 6
    assert watch.found["steps"] == []
    assert len(compared) >= num_ranks * 2  # blocks of three steps compare at their ends alone
    # The totals, once; and for the learning curve what the trainer counts: GTC's elements and the
    # norm of its residual, the norm of BMUF's update, both of 1-bit SGD's residuals.
    num_reads = {"synchronous": 1, "gtc": 3, "bmuf": 2, "htm": 4}.get(name, 3)
    assert len(watch.found["ends"]) == num_reads * watch.counts["ends"]


def test_validation_reads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """Its sums, at the end, however many minibatches there are; newbob's rate needs them there."""
    monkeypatch.setattr(Fitting, "_validate", watch.over("validations", Fitting._validate))
    minibatches = SubEpochPlan.minibatches

    def on_host(plan: SubEpochPlan, *args: int) -> Iterator[Minibatch]:
        return watch.lengths_on_host(minibatches(plan, *args))

    monkeypatch.setattr(SubEpochPlan, "minibatches", on_host)
    write_run(tmp_path)
    newbob = MinRateNewbob(1e-30, 1e-31)
    what = replace(small_fit(minibatch_frames=32), newbob=newbob, validation_one_in=2)
    simulate_ranks(2, fit, tmp_path, replace(what, sub_epochs=what.sub_epochs[:2]))
    assert watch.counts["validations"] == 4
    assert len(watch.found["validations"]) == 4
    assert all("torch.Tensor.tolist" in each for each in watch.found["validations"])
    assert watch.found["steps"] == []


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("checkpoint_steps", [0, 1])
def test_a_broken_norm_is_found_a_step_later_and_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, checkpoint_steps: int
) -> None:
    """The error names rank and step, of a sum of squares too that overflows where no sum does."""
    look_late(monkeypatch)
    total_norm, taken = nn.utils.get_total_norm, []

    def overflow(gradients: list[Tensor]) -> Tensor:
        taken.append(norm := total_norm(gradients))
        return norm * (torch.inf if len(taken) == 3 else 1)

    monkeypatch.setattr(nn.utils, "get_total_norm", overflow)
    write_run(tmp_path)
    checkpoints = CheckpointConfig(steps=checkpoint_steps, num_kept=100)
    # Sub-epochs of 8 steps, of which the third is at fault.
    what = small_fit(name, checkpoints=checkpoints, minibatch_frames=32)
    with pytest.raises(FloatingPointError, match="rank 0, step 3: the gradient's norm is inf"):
        simulate_ranks(1, fit, tmp_path, what)
    # A save looks at once; without one, a step later.
    assert len(taken) == (3 if checkpoint_steps else 4)
    assert steps_saved(tmp_path, what) == ([1, 2] if checkpoint_steps else [])


def test_totals_are_those_of_adding_numbers() -> None:
    """Bitwise: float32 losses are added in float64, also after totals were read and restored."""
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0)) * 1000
    expected, running = 0.0, RunningTotals()
    for number, loss in enumerate(losses):
        expected += float(loss)
        running.add(RunningTotals(7, loss, torch.tensor(number)))
        running = RunningTotals.of(running.read())
    assert running.read() == FrameTotals(350, expected, sum(range(50)))


class Breaking(Fitting):
    """Breaking has a NaN in the gradient of rank 1 at the last step of the first sub-epoch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unbroken, self.compute = self.compute, self._break

    def _break(self, minibatch: Minibatch) -> tuple[RunningTotals, Tensor]:
        totals, norm = self._unbroken(minibatch)
        if self.group.rank() == 1 and self.progress.cursor.num_steps_left == 1:
            self.model.output.bias.grad[0] = torch.nan
            norm = norm * torch.nan
        return totals, norm


@pytest.mark.parametrize("has_newbob", [False, True])
def test_ranks_find_a_nan_of_the_last_step_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_newbob: bool
) -> None:
    """The trainer's look, which all ranks take part in, comes before a rank's own at its norm."""
    look_late(monkeypatch)
    monkeypatch.setattr(train_model, "Fitting", Breaking)
    write_run(tmp_path)
    what = small_fit(minibatch_frames=32)
    if has_newbob:
        what = replace(what, newbob=MinRateNewbob(1e-30, 1e-31), validation_one_in=4)
    with pytest.raises(FloatingPointError, match="the gradient of rank 1 holds a NaN"):
        simulate_ranks(2, fit, tmp_path, what)
    assert steps_saved(tmp_path, what) == []
