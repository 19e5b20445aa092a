"""Define what trainers do with an optimizer: its state, its hyperparameters and its step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

from training.configuration.block_trainers import OptimizerState

SCHEDULE_STATE = ("eta", "mu", "mu_product", "step")
"""Entries of torch's optimizers that follow from the number of steps, and so are equal anyway."""


def is_moment(name: str, value: object) -> bool:
    """Return whether an entry of an optimizer's state is averaged: Adafactor's row means too."""
    return isinstance(value, Tensor) and value.is_floating_point() and name not in SCHEDULE_STATE


def average_moments(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], average: Callable[[Tensor], None]
) -> None:
    """Average the moments of `parameters`, of any shape; step counters are equal anyway."""
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


def treat_moments(
    treatment: OptimizerState,
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    average: Callable[[Tensor], None],
) -> None:
    """Keep, average or reset the moments of `parameters`."""
    if treatment == "reset":
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    elif treatment == "average":
        average_moments(optimizer, parameters, average)


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
    """Return those of each parameter group that the host can read without waiting for a device."""
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
    """Raise ValueError for what is no optimizer, wraps another one, or takes no dense gradients."""
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
    """Make a `GradScaler` call each step, with marks of itself that `check_step` sees.

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
    """Raise ValueError for a step whose gradients are not there yet, or are a `GradScaler`'s."""
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
