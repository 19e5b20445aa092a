"""The training loop: sub-epochs on all ranks, with checkpoints, resumed from the newest."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import torch
from tqdm import tqdm

from training.algorithms.learning_rates import warm_up_factor
from training.algorithms.optimizers import make_optimizer
from training.checkpoints.checkpointer import Checkpointer
from training.checkpoints.training_state import load_whole_state, whole_state
from training.data.dataset import Dataset
from training.data.device_copies import buffers_ahead, device_copies
from training.data.sub_epoch_reader import SubEpochReader
from training.data.sub_epochs import SubEpoch
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.fit.cuda_graph import gradients_of
from training.fit.model_specs import Fit
from training.fit.progress import ExchangeTotals, Progress
from training.fit.steps import (
    FrameTotals,
    GradientNorms,
    RunningTotals,
    take_steps,
    validation_loss,
)
from training.models.acoustic_model import AcousticModel
from training.models.precision import set_float32_products
from training.trainers.registry import make_trainer
from training.trainers.statistics import (
    BmufStatistics,
    GtcStatistics,
    HtmStatistics,
    OneBitStatistics,
    Statistics,
    between,
    density,
)


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
        self.optimizer = make_optimizer(fit.optimizer, model.parameters())
        self.trainer = make_trainer(fit.trainer, model, self.optimizer, group)
        self.progress = Progress(newbob=fit.newbob.begin() if fit.newbob else None)
        self._norms = GradientNorms(group.rank(), self.trainer.num_steps)
        self._statistics = self.trainer.statistics()
        self._compute = gradients_of(model, fit.loop)
        ahead = buffers_ahead(model.device)
        self._reader = SubEpochReader(dataset, fit.sub_epochs, group, ahead)

    def run(self) -> list[dict[str, Any]]:
        """Train to the end, from the newest checkpoint if any; return the learning curve."""
        if (state := self.checkpoints.restore(type(self.trainer))) is not None:
            load_whole_state(state, self.model, self.optimizer, self.trainer)
            self.progress = Progress.from_state(state, self.group.size())
        set_float32_products(self.fit.loop.precision)
        # Entered once, the trainer lets BMUF's blocks run across sub-epochs.
        if self.fit.newbob is None:
            with self.trainer:
                for sub_epoch in self._sub_epochs():
                    self._train(sub_epoch)
                    self._end(sub_epoch)
        else:
            for sub_epoch in self._sub_epochs():
                with self.trainer:
                    self._train(sub_epoch)
                # Leaving, ranks have looked at the last gradient together; each its norm here.
                self._norms.check()
                self._end(sub_epoch, self._validate())
        return self.progress.curve

    def _sub_epochs(self) -> Iterator[SubEpoch]:
        """Yield the sub-epochs from the present one on; newbob sets rates, and when to stop."""
        num_sub_epochs, begun = len(self.fit.sub_epochs), self.progress.cursor.sub_epoch
        bar = tqdm(
            total=num_sub_epochs,
            initial=begun,
            desc=f"train {self.fit.name}",
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
                yield sub_epoch
                mean = self.progress.curve[-1]["cross_entropy"]
                bar.set_postfix_str(f"cross-entropy {mean:.3f}")
                bar.update()

    def _train(self, sub_epoch: SubEpoch) -> None:
        """Take the steps that are left of the sub-epoch."""
        # Rates decay by sub-epoch, and are slightly higher on labelled data (003 V-D).
        self._set_rate(sub_epoch.learning_rate)
        cursor, minibatches = self._reader.begin(self.progress.cursor)
        self.progress.cursor = cursor
        self._norms = GradientNorms(self.group.rank(), self.trainer.num_steps)
        minibatches = device_copies(minibatches, self.model.device)
        with closing(minibatches):
            steps = take_steps(
                self.model,
                self.optimizer,
                minibatches,
                cursor.num_steps_left,
                self.fit.loop,
                self._norms,
                self._compute,
            )
            for result in steps:
                self.progress.totals.add(result)
                self.progress.cursor = cursor = cursor.stepped()
                self._set_rate(sub_epoch.learning_rate)
                # After a sub-epoch's last step the sub-epoch's end is saved.
                is_due = self.fit.checkpoints.is_due(self.trainer.num_steps)
                if is_due and cursor.num_steps_left:
                    self._save()

    def _set_rate(self, learning_rate: float) -> None:
        """Set the next step's rate, which rises over the warm-up, counted from the first step."""
        factor = warm_up_factor(self.trainer.num_steps, self.fit.loop.warm_up_steps)
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate * factor

    def _validate(self) -> dict[str, Any]:
        """Give newbob the validation loss of the model that leaving the trainer left."""
        assert self.fit.newbob is not None
        assert self.progress.newbob is not None
        # Newbob needs one model for all ranks, so each of its epochs has ended BMUF's block.
        loss = validation_loss(self.model, self.dataset, self.group)
        self.progress.newbob = self.fit.newbob.after_epoch(self.progress.newbob, loss)
        return {"validation_cross_entropy": loss}

    def _end(self, sub_epoch: SubEpoch, facts: dict[str, Any] | None = None) -> None:
        """Add the sub-epoch to the curve, and save."""
        point = curve_point(sub_epoch, self.progress.totals.read(), self.group)
        if self.fit.criterion == "cross_entropy":
            del point["expected_frame_accuracy"]
        self._count_exchanges()
        point["trainer"] = trainer_point(self.progress.exchanged, self._statistics, self.group)
        self.progress.curve.append(point | (facts or {}))
        self.progress.cursor = self.progress.cursor.next_sub_epoch()
        self.progress.totals = RunningTotals()
        self.progress.exchanged = ExchangeTotals()
        self._save()

    def _count_exchanges(self) -> None:
        before, self._statistics = self._statistics, self.trainer.statistics()
        self.progress.exchanged.add(between(before, self._statistics))

    def _save(self) -> None:
        self._count_exchanges()
        # On a device the last step was not looked at: nothing broken is saved. The trainer's state
        # comes first: there all ranks find a NaN together, where one's norm would end it alone.
        state = whole_state(self.model, self.optimizer, self.trainer)
        self._norms.check()
        self.checkpoints.save(self.trainer.num_steps, state | self.progress.to_state())


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
    exchanged: ExchangeTotals, statistics: Statistics, group: ProcessGroup
) -> dict[str, Any]:
    """Return what the trainer exchanged in a sub-epoch, and its norms at the sub-epoch's end.

    Bytes are the sum over the ranks, the residual's norm is the root mean square.
    """
    residual_norm = getattr(statistics, "residual_norm", 0.0)
    totals = torch.tensor([*asdict(exchanged).values(), residual_norm**2], dtype=torch.float64)
    collectives.all_reduce_sum(totals, group)
    bytes_sent, num_elements, num_elements_sent, squares = totals.tolist()
    point: dict[str, Any] = {"bytes_sent": int(bytes_sent)}
    if isinstance(statistics, GtcStatistics | HtmStatistics):
        point["density"] = density(int(num_elements_sent), int(num_elements))
    if isinstance(statistics, GtcStatistics | HtmStatistics | OneBitStatistics):
        point["residual_norm"] = (squares / group.size()) ** 0.5
    if isinstance(statistics, BmufStatistics | HtmStatistics):
        point["block_update_norm"] = statistics.block_update_norm
    return point
