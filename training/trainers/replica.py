"""Keep the ranks' replicas equal: their optimizers, what they train, and at which rates.

A step that would let them drift apart is refused, with an error that names the tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from training.distributed.checks import Facts
from training.settings.trainers import OptimizerState
from training.trainers.parameters import named_parameters, plain_name

Held: TypeAlias = tuple[tuple[tuple[int, bool], ...], ...]


class TrainedSet:
    """TrainedSet is what `optimizer` trains while a trainer is entered, and the rates of its steps.

    All of it is local and costs some microseconds a step.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._names = {id(tensor): name for name, tensor in named_parameters(model).items()}
        self._model = model
        self._optimizer = optimizer
        self._held = self._now_held()
        self._note_parameters()
        # Ranks that hold a tensor in other groups would train it at other rates.
        self._places = {
            f"place of parameter {self._names[id(tensor)]}": f"{place} of parameter group {number}"
            for number, settings in enumerate(optimizer.param_groups)
            for place, tensor in enumerate(settings["params"])
            if id(tensor) in self._names
        }
        self._hyperparameters = ""
        self._history = 0

    def check(self) -> None:
        """Raise ValueError, naming a tensor, if the trained tensors have changed since entering."""
        if (held := self._now_held()) == self._held:
            if error := self.find_replaced(before_step=True):
                raise ValueError(error)
            return
        before, now = ({entry for part in parts for entry in part} for parts in (self._held, held))
        changed = [self._names.get(number, "") for number, _ in now ^ before]
        known = min(filter(None, changed), default="")
        name = f"parameter {known}" if known else "a tensor"
        raise ValueError(
            f"{name} was frozen, unfrozen, added to the optimizer or moved within it since the "
            "trainer was entered: leave the with block and enter it again, so that all ranks "
            "train the same tensors"
        )

    def find_replaced(self, *, before_step: bool) -> str:
        """Return the error of a parameter of the model that the optimizer misses, or nothing.

        Before a step also one that was added counts, if it wants a gradient.
        """
        if self._is_model_unchanged():
            return ""
        before, now = self._parameters, self._now_parameters()
        trained = {number for part in self._held for number, is_trained in part if is_trained}
        for name in {**before, **now}:
            old, new = before.get(name), now.get(name)
            is_missed = before_step and new is not None and new.requires_grad
            if old is new or not (id(old) in trained or is_missed):
                continue
            what = "removed from" if new is None else "added to" if old is None else "replaced in"
            return (
                f"parameter {name} was {what} the model since the trainer was entered, as "
                "load_state_dict(assign=True), pruning, weight_norm and adapters do, so the "
                "optimizer would train other tensors than the model uses: leave the with block, "
                "and enter a trainer of an optimizer with the new parameters"
            )
        if before_step:  # modules without parameters changed, or frozen ones
            self._note_parameters()
        return ""

    def note_rates(self, step: int) -> None:
        """Record the hyperparameters of the step about to be taken, if they have changed."""
        if (now := str(hyperparameters(self._optimizer))) != self._hyperparameters:
            self._hyperparameters = now
            self._history = crc32(f"{step}: {now}".encode(), self._history)

    def facts(self) -> Facts:
        """Describe the tensors' places in the optimizer, and the rates since entering."""
        return {
            **self._places,
            "hyperparameters of the last step": self._hyperparameters,
            "hyperparameters of the steps since entering": f"{self._history:08x}",
        }

    def _now_held(self) -> Held:
        return tuple(
            tuple((id(tensor), tensor.requires_grad) for tensor in settings["params"])
            for settings in self._optimizer.param_groups
        )

    def _note_parameters(self) -> None:
        self._parameters = self._now_parameters()
        # Those of a scripted module are no dictionaries, and what they hold stays.
        self._tables = [
            table
            for module in self._model.modules()
            for table in (module._parameters, module._modules)
            if isinstance(table, dict)
        ]
        self._table_sizes = list(map(len, self._tables))
        self._entries = [(table, *entry) for table in self._tables for entry in table.items()]

    def _is_model_unchanged(self) -> bool:
        # 36 us for 300 parameters, where plain SGD takes 2500; named_parameters() takes 700.
        for table, name, value in self._entries:
            if table.get(name) is not value:
                return False
        return list(map(len, self._tables)) == self._table_sizes

    def _now_parameters(self) -> dict[str, nn.Parameter]:
        named = self._model.named_parameters(remove_duplicate=False)
        return {plain_name(name): parameter for name, parameter in named}


@dataclass(frozen=True, slots=True)
class _Watch:
    """_Watch says that a trainer is entered whose model has the parameter `name`."""

    name: str
    optimizer: Optimizer
    is_trained: bool


_watches: dict[int, list[_Watch]] = {}
_hook: list[RemovableHandle] = []


@contextmanager
def refusing_other_optimizers(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Refuse steps of optimizers for which no entered trainer exchanges gradients.

    ValueError before the step, where it would change a parameter of `model`.
    """
    trained = {id(tensor) for settings in optimizer.param_groups for tensor in settings["params"]}
    watches = {
        id(tensor): _Watch(name, optimizer, tensor.requires_grad and id(tensor) in trained)
        for name, tensor in named_parameters(model).items()
    }
    for number, watch in watches.items():
        _watches.setdefault(number, []).append(watch)
    if not _hook:
        check = torch.compiler.disable(_check_optimizer)  # type: ignore[no-untyped-call]
        _hook.append(register_optimizer_step_pre_hook(check))
    try:
        yield
    finally:
        for number, watch in watches.items():
            _watches[number].remove(watch)
            if not _watches[number]:
                del _watches[number]
        if not _watches:
            _hook.pop().remove()


def check_only_trainer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError where an entered trainer trains a parameter of `optimizer` already."""
    trained = {id(tensor) for settings in optimizer.param_groups for tensor in settings["params"]}
    for name, tensor in named_parameters(model).items():
        is_mine = tensor.requires_grad and id(tensor) in trained
        if is_mine and any(watch.is_trained for watch in _watches.get(id(tensor), [])):
            raise ValueError(
                f"parameter {name} is trained by a trainer that is entered already, and two would "
                "exchange each gradient twice: leave the other's with block first"
            )


def constant_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters that no entered trainer trains: rank 0's since entering."""
    trained = {id(tensor) for settings in optimizer.param_groups for tensor in settings["params"]}
    return {
        f"parameter {name}": parameter
        for name, parameter in named_parameters(model).items()
        if not (id(parameter) in trained and parameter.requires_grad)
        and not any(watch.is_trained for watch in _watches.get(id(parameter), []))
    }


def _check_optimizer(optimizer: Optimizer, *_: object) -> None:
    for settings in optimizer.param_groups:
        for tensor in settings["params"]:
            watches = _watches.get(id(tensor))
            if not watches or tensor.grad is None:
                continue
            if not any(watch.optimizer is optimizer for watch in watches):
                raise ValueError(
                    f"parameter {watches[0].name}: a step of another {type(optimizer).__name__}, "
                    "whose gradients no trainer exchanges, would drift apart or be undone: train "
                    "it in a parameter group of the trainer's optimizer, or by a trainer of its own"
                )


SCHEDULE_STATE = ("eta", "mu", "mu_product", "step")
"""Entries of torch's optimizers that follow from the number of steps, and so are equal anyway."""


def is_moment(name: str, value: object) -> bool:
    """Return whether an entry of an optimizer's state is averaged: Adafactor's row means too."""
    return isinstance(value, Tensor) and value.is_floating_point() and name not in SCHEDULE_STATE


def treat_moments(
    treatment: OptimizerState,
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    average: Callable[[Tensor], None],
) -> None:
    """Keep, average or reset the moments of `parameters`, of any shape.

    Step counters are equal anyway.
    """
    if treatment == "reset":
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    if treatment != "average":
        return
    moments = [
        value
        for parameter in parameters
        for name, value in sorted(optimizer.state[parameter].items())
        if is_moment(name, value)
    ]
    if moments:
        flat = torch.cat([moment.reshape(-1) for moment in moments])
        # A sum of bfloat16 rounds to 1/256 at every rank.
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        average(flat)
        means = flat.split_with_sizes([moment.numel() for moment in moments])
        for moment, mean in zip(moments, means, strict=True):
            moment.copy_(mean.view(moment.shape))


def state_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state's tensors, keyed by entry and parameter."""
    return {
        f"{key} of parameter {name}": value
        for name, parameter in parameters.items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's hyperparameters that the host can read without waiting for a device."""
    return [
        {
            name: value
            for name, value in settings.items()
            if name != "params" and not (isinstance(value, Tensor) and value.is_cuda)
        }
        for settings in optimizer.param_groups
    ]


def hyperparameter_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the hyperparameters that are tensors, such as a learning rate on a GPU."""
    return {
        f"{name} of parameter group {number}": value
        for number, settings in enumerate(optimizer.param_groups)
        for name, value in settings.items()
        if isinstance(value, Tensor)
    }


def check_optimizer(optimizer: object) -> None:
    """Raise ValueError unless this is a plain optimizer of torch that takes dense gradients."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is a {name}: need a torch.optim.Optimizer, not a schedule or a wrapper "
            "around it"
        )
    for attribute, value in vars(optimizer).items():
        members = value if isinstance(value, list | tuple) else [value]
        inner = next((type(each).__name__ for each in members if isinstance(each, Optimizer)), "")
        if inner:
            raise ValueError(
                f"{name} wraps another optimizer, the {inner} in its attribute {attribute}, whose "
                "steps would go past the trainer: build model and trainer around that optimizer"
            )
    if isinstance(optimizer, SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients alone, and ranks exchange dense ones: use Adam or "
            "SGD, to which a trainer gives an embedding's sparse gradient as a dense one"
        )


def check_plain_sgd(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that does more than subtract rate times gradient."""
    remedy = (
        "need a plain torch.optim.SGD, as momentum and normalization are the trainer's own: give "
        'the trainer momentum=..., and in a recipe optimizer = { name = "sgd", momentum = 0 }'
    )
    if type(optimizer) is not SGD:
        raise ValueError(f"an optimizer of type {type(optimizer).__name__}: {remedy}")
    for number, settings in enumerate(optimizer.param_groups):
        for name in ("momentum", "weight_decay", "dampening", "nesterov", "maximize"):
            if settings[name]:
                raise ValueError(
                    f"{name} = {settings[name]} in parameter group {number}, not 0: {remedy}"
                )


@contextmanager
def seeing_scalers(optimizer: Optimizer) -> Iterator[None]:
    """Make a `GradScaler` call each step and mark it, so that `check_step` sees it.

    It otherwise skips the steps of overflowing gradients, unseen, on one rank and not on others.
    """
    mark = "_step_supports_amp_scaling"
    before = vars(optimizer).get(mark)
    setattr(optimizer, mark, True)
    try:
        yield
    finally:
        if before is None:
            delattr(optimizer, mark)
        else:
            setattr(optimizer, mark, before)


def check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a step with a closure, or under a `GradScaler`."""
    if len(args) > 1 or kwargs.get("closure") is not None:
        raise ValueError(
            "step(closure) computes gradients after they were exchanged: call backward() first, "
            "then step()"
        )
    marks = [
        name for name in ("grad_scale", "found_inf") if getattr(optimizer, name, None) is not None
    ]
    if marks or "grad_scaler" in kwargs:
        for name in marks:  # which the scaler removes after a step that raises nothing
            delattr(optimizer, name)
        raise ValueError(
            "GradScaler: each rank's would skip the steps of its own overflows, and ranks would "
            "sum gradients of different minibatches: use torch.autocast with bfloat16, which needs "
            "no scaler, or GradScaler(enabled=False)"
        )
