"""Say what must be equal on ranks, and compare it: at once, or while the next step is taken."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.distributed.agreement import Comparison, Replica, TensorDigests, compare
from training.trainers.replica.model_tensors import describe, find_fault
from training.trainers.replica.optimizer_state import (
    hyperparameter_tensors,
    hyperparameters,
    state_tensors,
)
from training.trainers.replica.parameters import FlatParameters
from training.trainers.replica.trained_set import TrainedSet, constant_parameters


class Replicated:
    """Replicated is a training of which each rank of `group` holds a replica.

    A trainer says here by its own rule what must be equal on all ranks, and on those of a `part`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: ProcessGroup) -> None:
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.parameters = FlatParameters(model, optimizer)
        self.num_steps = 0
        self._is_open = False
        self._trained = TrainedSet(model, optimizer)
        self._comparison: Comparison | None = None
        self._last_comparison = 0

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return {"num_steps": self.num_steps, "optimizer": hyperparameters(self.optimizer)}

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return, by name, the trainer's tensors that now are equal on all ranks."""
        return {f"parameter {name}": tensor for name, tensor in self.parameters.named.items()}

    def part_tensors(self) -> Mapping[str, Tensor]:
        """Return, by name, the tensors that now are equal on the ranks of the same `part`."""
        return {}

    @property
    def part(self) -> int:
        """Number this rank's part of the group."""
        return 0

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return, by name, what entering, leaving and saves compare besides: the optimizer's state.

        It follows from gradients, which are summed, and is equal where they are.
        """
        return state_tensors(self.optimizer, self.parameters.named)

    def find_undone(self) -> str:
        """Return the error of changes that leaving now would undo, or nothing."""
        return ""

    def replica(self) -> Replica:
        """Return what must now be equal on ranks, for a checkpoint to compare."""
        of_part = self.part_tensors() if self._is_open else {}
        return self._replica(self.shared_state(), self._digests(of_part))

    def _compare(self) -> None:
        """Compare all that must be equal; raises ValueError, on all ranks, where one differs."""
        problem = (
            self._trained.find_replaced(before_step=False)
            or find_fault(self.model)
            or self.find_undone()
        )
        claims = self.replica().claims(problem)
        if not problem:
            layout = describe(self.model, set(self.parameters.named))
            claims = replace(claims, settings={**layout, **claims.settings})
        compare(claims, self.group, self.parameters.device)

    def _begin_comparison(self, of_part: TensorDigests) -> None:
        """Send this rank's checksum; the next step looks at those of all ranks."""
        self._last_comparison = self.num_steps
        self._comparison = Comparison(self._replica({}, of_part), self.group)

    def _check_last_comparison(self) -> None:
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            comparison.check()

    def _replica(self, more: Mapping[str, Tensor], of_part: TensorDigests) -> Replica:
        settings = {
            "trainer": type(self).__name__,
            "is_open": self._is_open,
            **self.settings(),
            **self.parameters.describe(),
            **self._trained.facts(),
        }
        tensors = {**hyperparameter_tensors(self.optimizer), **more}
        if self._is_open:
            constants = constant_parameters(self.model, self.optimizer)
            tensors |= {**self.shared_tensors(), **constants}
        return Replica(
            {name: str(value) for name, value in settings.items()},
            self._digests(tensors),
            self.part,
            of_part,
        )

    def _digests(self, tensors: Mapping[str, Tensor]) -> TensorDigests:
        return TensorDigests(tensors, self.parameters.device)
