"""A fit under way: visit by visit on all ranks, with checkpoints, going on from the newest."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from training.checkpoints.checkpointer import Checkpoints
from training.checkpoints.training_state import load_whole_state, whole_state
from training.data.dataset import Dataset
from training.data.sub_epochs import Visit
from training.distributed import collectives
from training.distributed.collectives import ProcessGroup
from training.fit.dealt_visit import deal_visit
from training.fit.model_specs import Fit
from training.fit.progress import Progress
from training.fit.steps import VisitResult, take_steps
from training.fit.validation import validation_loss
from training.models.acoustic_model import AcousticModel
from training.trainers.registry import make_trainer


class Fitting:
    """One model's training, as one rank of `group` takes part in it."""

    def __init__(
        self,
        fit: Fit,
        model: AcousticModel,
        dataset: Dataset,
        checkpoints: Checkpoints,
        group: ProcessGroup,
    ) -> None:
        self.fit = fit
        self.model = model
        self.dataset = dataset
        self.checkpoints = checkpoints
        self.group = group
        self.optimizer = torch.optim.Adam(model.parameters())
        self.trainer = make_trainer(fit.trainer, model, self.optimizer, group)
        self.progress = Progress(newbob=fit.newbob.begin() if fit.newbob else None)

    def run(self) -> list[dict[str, Any]]:
        """Train to the end, from the newest checkpoint if there is one; the learning curve."""
        if (state := self.checkpoints.restore()) is not None:
            load_whole_state(state, self.model, self.optimizer, self.trainer)
            self.progress = Progress.from_state(state, self.group.size())
        if self.fit.newbob is None:
            with self.trainer:
                for visit in self._visits():
                    self._train(visit)
                    self._end(visit)
        else:
            for visit in self._visits():
                with self.trainer:
                    self._train(visit)
                self._end(visit, self._validate())
        return self.progress.curve

    def _visits(self) -> Iterator[Visit]:
        """The visits from the present one on; newbob decides on rates, and when to stop."""
        num_visits, begun = len(self.fit.visits), self.progress.position.visit
        bar = tqdm(
            total=num_visits,
            initial=begun,
            desc=f"train {self.fit.name}",
            unit="visit",
            disable=self.group.rank() > 0,
        )
        with bar:
            while (index := self.progress.position.visit) < num_visits:
                visit = self.fit.visits[index]
                if self.fit.newbob is not None:
                    if self.progress.newbob is None:
                        return
                    visit = replace(visit, learning_rate=self.progress.newbob.rate)
                yield visit
                mean = self.progress.curve[-1]["cross_entropy"]
                bar.set_postfix_str(f"cross-entropy {mean:.3f}")
                bar.update()

    def _train(self, visit: Visit) -> None:
        """Take the visit's steps, or what is left of them."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = visit.learning_rate
        position, minibatches = deal_visit(visit, self.progress.position, self.dataset, self.group)
        self.progress.position = position
        with closing(minibatches):
            steps = take_steps(
                self.model, self.optimizer, minibatches, position.num_steps_left, self.fit.loop
            )
            for result in steps:
                self.progress.totals.add(result)
                self.progress.position = position = position.stepped()
                # After a visit's last step the visit's end is saved.
                is_due = self.fit.checkpoints.is_due(self.trainer.num_steps)
                if is_due and position.num_steps_left:
                    self._save()

    def _validate(self) -> dict[str, Any]:
        """Tell newbob the loss on what is left out, of the model that leaving the trainer gave."""
        assert self.fit.newbob is not None
        assert self.progress.newbob is not None
        loss = validation_loss(self.model, self.dataset, self.group)
        self.progress.newbob = self.fit.newbob.after_epoch(self.progress.newbob, loss)
        return {"validation_cross_entropy": loss}

    def _end(self, visit: Visit, facts: dict[str, Any] | None = None) -> None:
        """Add the visit to the curve, and save."""
        point = curve_point(visit, self.progress.totals, self.group)
        self.progress.curve.append(point | (facts or {}))
        self.progress.position = self.progress.position.next_visit()
        self.progress.totals = VisitResult()
        self._save()

    def _save(self) -> None:
        state = whole_state(self.model, self.optimizer, self.trainer)
        self.checkpoints.save(self.trainer.num_steps, state | self.progress.to_state())


def curve_point(visit: Visit, result: VisitResult, group: ProcessGroup) -> dict[str, Any]:
    """One point of the learning curve: this visit's means over all ranks' frames."""
    totals = torch.tensor(
        [result.num_frames, result.cross_entropy, result.num_correct], dtype=torch.float64
    )
    collectives.add(totals, group)
    num_frames, cross_entropy, num_correct = totals.tolist()
    return {
        "labelled": visit.labelled,
        "learning_rate": visit.learning_rate,
        "num_ranks": group.size(),
        "num_frames": int(num_frames),
        "cross_entropy": cross_entropy / max(num_frames, 1),
        "frame_accuracy": num_correct / max(num_frames, 1),
    }
