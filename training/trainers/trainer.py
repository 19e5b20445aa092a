"""Share what all trainers do: enter, wrap the optimizer's step, leave, and keep state."""

import json
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from training.distributed import collectives, process_group
from training.distributed.gather import gather_text
from training.trainers.parameters import FlatParameters
from training.trainers.resharding import ReshardingPlan, State


class Trainer:
    """Trainer is a context manager that makes `optimizer.step()` a step of all the group's ranks.

    Entering checks that the ranks agree, and starts all of them from rank 0's model. Every rank
    must then take the same number of steps. Leaving gives all ranks the same model, the one to
    evaluate. Entering again resumes with the residuals and the block momentum that leaving kept.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup) -> None:
        process_group.check_member(group)
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.parameters = FlatParameters(model, optimizer)
        self.num_steps = 0
        self._hooks: list[RemovableHandle] = []
        self._is_open = False

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        hyperparameters = [
            {name: value for name, value in settings.items() if name != "params"}
            for settings in self.optimizer.param_groups
        ]
        return {"num_steps": self.num_steps, "optimizer": hyperparameters}

    def exchange_gradients(self) -> None:
        """Turn this rank's gradients into those that its optimizer applies."""
        raise NotImplementedError

    def connect(self) -> None:
        """Make the groups of ranks that the trainer needs besides its own."""

    def begin(self) -> None:
        """Start from the model that all ranks now share."""

    def end_step(self) -> None:
        """Do what is due after a step of the optimizer."""

    def conclude(self) -> None:
        """Leave in the model what is to be evaluated."""

    @torch.no_grad()
    def __enter__(self) -> "Trainer":
        if self._hooks:
            raise RuntimeError("this trainer is entered already: leave it first")
        # A rank with another learning rate would train without any error, and spoil every average.
        self._check_agreement()
        self.connect()
        if not self._is_open:  # else a checkpoint from within: each rank has its own model
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                collectives.broadcast(tensor.detach(), self.group)
            self.begin()
        self._is_open = True
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # After an error the other ranks are elsewhere: an exchange would wait for them.
            if error is None and self._is_open:
                self.finish()
        finally:
            self._is_open = False
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    @torch.no_grad()
    def finish(self) -> None:
        """Synchronize what a partial block left; the model becomes the one to evaluate."""
        if not (self._is_open and self._hooks):
            raise RuntimeError("finish() twice, or outside of the trainer's with block")
        self._check_agreement()
        self.conclude()
        # No equation averages buffers, so rank 0's replace all, as at the start.
        for buffer in self.model.buffers():
            collectives.broadcast(buffer, self.group)
        self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Copy the whole state, without the model's and the optimizer's own.

        Mid-block, the models of the ranks differ: each rank must save all three.
        """
        name = type(self).__name__
        return {"trainer": name, "num_steps": self.num_steps, "is_open": self._is_open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; load the model and the optimizer too, then enter the trainer."""
        if self._hooks:
            raise RuntimeError("load_state_dict() within the with block: load before entering")
        self.check_own_state(state)
        self.num_steps = state["num_steps"]
        self._is_open = state["is_open"]

    @classmethod
    def check_own_state(cls, state: dict[str, Any]) -> None:
        """Raise ValueError where `state` is another trainer's `state_dict()`."""
        if state["trainer"] != cls.__name__:
            raise ValueError(
                f"the checkpoint is of {state['trainer']}, this trainer is {cls.__name__}: "
                "load model and optimizer alone to begin with another trainer"
            )

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Return how other ranks take over the trainer's entries of rank 0's whole `state`."""
        del state
        return ReshardingPlan()

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Close the trainer in a resharded whole state, as leaving it would; then it is entered."""
        return {**state, "trainer": {**state["trainer"], "is_open": False}}

    @torch.no_grad()
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del optimizer
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise ValueError(
                "step(closure) computes gradients after they were exchanged: call backward() "
                "first, then step()"
            )
        if not self._is_open:
            raise RuntimeError("a step after finish(): leave the with block and enter it again")
        # Every trainer hands the optimizer summed gradients, so the papers' thresholds hold.
        self.exchange_gradients()

    @torch.no_grad()
    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del optimizer, args, kwargs
        self.num_steps += 1
        self.end_step()

    def _check_agreement(self) -> None:
        """Raise ValueError, on all ranks, where one differs from rank 0."""
        facts = {
            "trainer": type(self).__name__,
            "is_open": self._is_open,
            **self.settings(),
            **self.parameters.describe(),
        }
        text = json.dumps({name: str(value) for name, value in facts.items()})
        texts = gather_text(text, self.group, "settings", self.parameters.device)
        first = json.loads(texts[0])
        for rank, other in ((rank, json.loads(t)) for rank, t in enumerate(texts) if t != texts[0]):
            for name in first | other:
                if first.get(name) != other.get(name):
                    raise ValueError(
                        f"{name}: {other.get(name)} on rank {rank}, {first.get(name)} on rank 0: "
                        "need the same on all ranks of the group"
                    )
