"""Run the training loop: sub-epochs on all ranks, with checkpoints, resumed from the newest.

A checkpoint holds the loop's progress beside the whole state of training: the data cursor, the sums
of the sub-epoch, and the learning curve, whose points are a sub-epoch's means over all ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from infra.log_lines import log, progress_bar
from training.algorithms.learning_rates import NewbobState, warm_up_factor
from training.checkpoints.checkpointer import Checkpointer
from training.checkpoints.training_state import load_whole_state, whole_state
from training.data.dataset import Dataset, SubEpochReader, buffers_ahead, device_copies
from training.data.minibatch import Minibatch
from training.data.sub_epochs import DataCursor, Place, SubEpoch, measures_of, measures_text
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.fit.model_specs import Fit
from training.fit.steps import (
    FrameTotals,
    GradientNorms,
    RunningTotals,
    gradients_of,
    take_steps,
    validate,
)
from training.models.acoustic_model import AcousticModel
from training.models.precision import set_float32_products, training_precision
from training.trainers.trainer import Statistics, between, density, make_optimizer, make_trainer


@dataclass(frozen=True, slots=True)
class SubEpochPace:
    """SubEpochPace: the frames of all ranks in a sub-epoch, and the seconds that it took.

    No manifest holds it, as seconds differ from run to run.
    """

    sub_epoch: int
    num_frames: int
    seconds: float


EXCHANGED = ("bytes_sent", "num_elements", "num_elements_sent")
"""What a rank's trainer gave to exchanges, as summed over a sub-epoch."""


@dataclass(slots=True)
class SelectedMinibatch:
    """SelectedMinibatch: the factor of the minibatch size, and all ranks' frames since its trial.

    Frames are nominal, the same on all ranks; `trials` are those of the sub-epoch, for its curve.
    """

    factor: int
    num_frames: int = 0
    trials: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """Progress holds the data cursor, this rank's totals of the sub-epoch, and the curve so far.

    `newbob` is the schedule's state; None if it is not newbob's, or if newbob has stopped.
    """

    cursor: DataCursor = field(default_factory=DataCursor)
    totals: RunningTotals = field(default_factory=RunningTotals)
    exchanged: Statistics = field(default_factory=lambda: dict.fromkeys(EXCHANGED, 0))
    curve: list[dict[str, Any]] = field(default_factory=list)
    newbob: NewbobState | None = None
    minibatch: SelectedMinibatch = field(default_factory=lambda: SelectedMinibatch(1))

    def to_state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the host waits for the totals' device."""
        return {
            "cursor": asdict(self.cursor),
            "totals": asdict(self.totals.read()) | {"exchanged": dict(self.exchanged)},
            "curve": list(self.curve),
            "newbob": None if self.newbob is None else asdict(self.newbob),
            "minibatch": asdict(self.minibatch),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], num_ranks: int) -> "Progress":
        """Resume on `num_ranks` ranks from the values of `to_state`."""
        totals = {name: value for name, value in state["totals"].items() if name != "exchanged"}
        return cls(
            DataCursor(**state["cursor"]).resumed(num_ranks),
            RunningTotals.of(FrameTotals(**totals)),
            state["totals"]["exchanged"],
            state["curve"],
            None if state["newbob"] is None else NewbobState(**state["newbob"]),
            SelectedMinibatch(**state["minibatch"]),
        )


def curve_point(sub_epoch: SubEpoch, result: FrameTotals, group: ProcessGroup) -> dict[str, Any]:
    """Return a point of the learning curve: the sub-epoch's means over all ranks' frames."""
    totals = torch.tensor(
        [result.num_frames, result.cross_entropy, result.num_correct, result.expected_correct],
        dtype=torch.float64,
    )
    collectives.all_reduce_sum(totals, group)
    num_frames, cross_entropy, num_correct, expected_correct = totals.tolist()
    return {
        "labelled": sub_epoch.labelled,
        "learning_rate": sub_epoch.learning_rate,
        "num_ranks": group.size(),
        "num_frames": int(num_frames),
        "cross_entropy": cross_entropy / max(num_frames, 1),
        "frame_accuracy": num_correct / max(num_frames, 1),
        "expected_frame_accuracy": expected_correct / max(num_frames, 1),
    }


def trainer_point(
    exchanged: Statistics, statistics: Statistics, group: ProcessGroup
) -> dict[str, Any]:
    """Return what the trainer exchanged in a sub-epoch, and its numbers at the sub-epoch's end.

    Bytes are the sum over the ranks, norms of residuals their root mean square, staleness the mean
    and the largest of all ranks.
    """
    norms = [name for name in statistics if name.endswith("residual_norm")]
    squares = [statistics[name] ** 2 for name in norms]
    counts = [exchanged[name] for name in EXCHANGED]
    totals = torch.tensor([*counts, *squares], dtype=torch.float64)
    collectives.all_reduce_sum(totals, group)
    bytes_sent, num_elements, num_elements_sent = totals[:3].tolist()
    point: dict[str, Any] = {"bytes_sent": int(bytes_sent)}
    if "density" in statistics:
        point["density"] = density(num_elements_sent, num_elements)
    means = (totals[3:] / group.size()).sqrt().tolist()
    point |= dict(zip(norms, means, strict=True))
    if "block_update_norm" in statistics:
        point["block_update_norm"] = statistics["block_update_norm"]
    if "mean_staleness" in statistics:
        mean = torch.tensor([statistics["mean_staleness"]], dtype=torch.float64)
        collectives.all_reduce_mean(mean, group)
        point["mean_staleness"] = mean.item()
        largest = int(statistics["max_staleness"])
        point["max_staleness"] = collectives.maximum(largest, group)
    return point


class Fitting:
    """Fitting runs one model's training, as one rank of `group` takes part in it."""

    def __init__(
        self,
        fit: Fit,
        model: AcousticModel,
        dataset: Dataset,
        checkpoints: Checkpointer,
        group: ProcessGroup,
    ) -> None:
        self.fit = fit
        self.model = model
        self.dataset = dataset
        self.checkpoints = checkpoints
        self.group = group
        self.optimizer = make_optimizer(fit.training.optimizer, model.parameters())
        self.trainer = make_trainer(fit.training.trainer, model, self.optimizer, group)
        self.progress = Progress(
            newbob=fit.newbob.begin() if fit.newbob else None,
            minibatch=SelectedMinibatch(fit.training.minibatch_selection.factors[0]),
        )
        self.pace: list[SubEpochPace] = []
        self.norms = GradientNorms(group.rank(), self.trainer.num_steps)
        self.statistics = self.trainer.statistics()
        self.frames_of_all = fit.training.minibatch_frames * group.size()
        """Nominal frames of one minibatch of each rank that has data."""
        # A graph could not hold the exchanges of a model that ranks divide.
        is_whole = fit.training.model_parallel_ranks == 1
        self.compute = gradients_of(model, fit.training) if is_whole else None
        ahead = buffers_ahead(model.device)
        self._reader = SubEpochReader(dataset, fit.sub_epochs, group, ahead)

    def run(self) -> list[dict[str, Any]]:
        """Train to the end, from the newest checkpoint if any; return the learning curve."""
        if (state := self.checkpoints.restore(type(self.trainer))) is not None:
            load_whole_state(state, self.model, self.optimizer, self.trainer)
            self.progress = Progress.from_state(state, self.group.size())
            if self.group.rank() == 0:
                index, step = self.progress.cursor.sub_epoch, self.trainer.num_steps
                place = f"step {step}, in sub-epoch {index} of {len(self.fit.sub_epochs)}"
                log(f"train {self.fit.name}: resume after {place}")
        self._choose_precision()
        # Entered once, the trainer lets BMUF's blocks run across sub-epochs.
        if self.fit.newbob is None:
            with self.trainer:
                for sub_epoch in self._sub_epochs():
                    self._train(sub_epoch)
                    self.end(sub_epoch, self._validate())
        else:
            for sub_epoch in self._sub_epochs():
                # Newbob needs one model for all ranks, so each of its epochs ends BMUF's block.
                with self.trainer:
                    self._train(sub_epoch)
                # Leaving, ranks have looked at the last gradient together; each its norm here.
                self.norms.check()
                facts = self._validate()
                assert self.progress.newbob is not None
                loss = facts["validation_cross_entropy"]
                self.progress.newbob = self.fit.newbob.after_epoch(self.progress.newbob, loss)
                self.end(sub_epoch, facts)
        return self.progress.curve

    def _choose_precision(self) -> None:
        """Set which numbers this process multiplies, and say where they are not those asked for."""
        asked = self.fit.training.precision
        set_float32_products(asked)
        if self.group.rank() == 0 and training_precision(asked, self.model.device) != asked:
            log(
                f"train {self.fit.name}: precision = {asked!r}: computes in float32, as this "
                "device does not multiply bfloat16 (CPUs: AVX-512 BF16)"
            )

    def _sub_epochs(self) -> Iterator[SubEpoch]:
        """Yield the sub-epochs from the present one on; newbob sets rates, and when to stop."""
        num_sub_epochs, begun = len(self.fit.sub_epochs), self.progress.cursor.sub_epoch
        bar = progress_bar(
            total=num_sub_epochs,
            initial=begun,
            description=f"train {self.fit.name}",
            unit="sub-epoch",
            disable=self.group.rank() > 0,
        )
        with bar:
            while (index := self.progress.cursor.sub_epoch) < num_sub_epochs:
                sub_epoch = self.fit.sub_epochs[index]
                if self.fit.newbob is not None:
                    if self.progress.newbob is None:
                        return
                    sub_epoch = replace(sub_epoch, learning_rate=self.progress.newbob.rate)
                cursor, started = self.progress.cursor, time.monotonic()
                yield sub_epoch
                if not (cursor.num_steps or cursor.done):  # not resumed within the sub-epoch
                    num_frames = self.progress.curve[-1]["num_frames"]
                    seconds = time.monotonic() - started
                    self.pace.append(SubEpochPace(index, num_frames, seconds))
                measured = measures_text(measures_of(self.progress.curve[-1]))
                bar.set_postfix_str(measured, refresh=False)
                bar.update()

    def _train(self, sub_epoch: SubEpoch) -> None:
        """Take the steps that are left of the sub-epoch."""
        # Rates decay by sub-epoch, and are slightly higher on labelled data (003 V-D).
        self.set_rate(sub_epoch.learning_rate)
        self.trainer.is_cold = sub_epoch.on_one_rank
        num_ranks = 1 if sub_epoch.on_one_rank else self.group.size()
        self.frames_of_all = self.fit.training.minibatch_frames * num_ranks
        self.progress.cursor, minibatches = self._reader.begin(self.progress.cursor)
        self.norms = GradientNorms(self.group.rank(), self.trainer.num_steps)
        minibatches = device_copies(minibatches, self.model.device)
        with closing(minibatches):
            self.train_on(minibatches, sub_epoch)

    def train_on(self, minibatches: Iterator[Minibatch], sub_epoch: SubEpoch) -> None:
        """Train on the minibatches that are left of the sub-epoch."""
        self.advance(minibatches, sub_epoch)

    def advance(
        self,
        minibatches: Iterator[Minibatch],
        sub_epoch: SubEpoch,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take steps of one minibatch size, until it is enough or the sub-epoch ends."""
        factor = self.progress.minibatch.factor
        steps = take_steps(
            self.model,
            self.optimizer,
            minibatches,
            -(-self.progress.cursor.num_steps_left // factor),
            self.fit.training,
            self.norms,
            self.compute,
            factor,
        )
        with closing(steps):
            for result in steps:
                self.progress.totals.add(result)
                self.progress.cursor = cursor = self.progress.cursor.stepped(factor)
                self.progress.minibatch.num_frames += factor * self.frames_of_all
                self.set_rate(sub_epoch.learning_rate)
                # After a sub-epoch's last step the sub-epoch's end is saved.
                is_due = self.fit.checkpoints.is_due(self.trainer.num_steps)
                if is_due and cursor.num_steps_left:
                    self._save()
                if is_enough():
                    return

    def set_rate(self, learning_rate: float) -> None:
        """Set the next step's rate, which rises over the warm-up, counted from the first step."""
        factor = warm_up_factor(self.trainer.num_steps, self.fit.training.warm_up_steps)
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate * factor

    def _validate(self) -> dict[str, float]:
        """Validate the model that leaving the trainer now would leave; training is as without."""
        if not self.dataset.is_validated:
            return {}
        with self.trainer.evaluated_model():
            return validate(self.model, self.dataset, self.group)

    def end(self, sub_epoch: SubEpoch, facts: dict[str, Any]) -> None:
        """Add the sub-epoch and its `facts` to the curve, and save."""
        point = curve_point(sub_epoch, self.progress.totals.read(), self.group)
        if self.fit.criterion == "cross_entropy":
            del point["expected_frame_accuracy"]
        self.count_exchanges()
        point["trainer"] = trainer_point(self.progress.exchanged, self.statistics, self.group)
        self.progress.curve.append(point | facts)
        self.progress.cursor = self.progress.cursor.next_sub_epoch()
        self.progress.totals = RunningTotals()
        self.progress.exchanged = dict.fromkeys(EXCHANGED, 0)
        self._save()

    def count_exchanges(self) -> None:
        """Add to the sub-epoch's what the trainer has exchanged since the last call."""
        before, self.statistics = self.statistics, self.trainer.statistics()
        counted = between(before, self.statistics)
        for name in EXCHANGED:
            self.progress.exchanged[name] += counted.get(name, 0)

    def _save(self) -> None:
        self.count_exchanges()
        # On a device the last step was not looked at: nothing broken is saved. The trainer's state
        # comes first: there all ranks find a NaN together, where one's norm would end it alone.
        state = whole_state(self.model, self.optimizer, self.trainer)
        self.norms.check()
        cursor = self.progress.cursor
        measured = measures_of(self.progress.curve[-1]) if self.progress.curve else {}
        place = Place(cursor.sub_epoch, cursor.share, measured)
        self.checkpoints.save(self.trainer.num_steps, state | self.progress.to_state(), place)
