"""Describe a model's parameters and buffers by name, and give all ranks those of rank 0."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from training.distributed import collectives
from training.distributed.agreement import Facts

DISTRIBUTED_WRAPPERS = {
    "DistributedDataParallel": "sums the gradients itself",
    "FullyShardedDataParallel": "divides the parameters among ranks",
    "FSDPModule": "divides the parameters among ranks",
    "ReplicateModule": "sums the gradients itself",
}
"""Classes of torch that are recognized by name, as importing some takes seconds."""


def plain_name(name: str) -> str:
    """Return a tensor's name without what `torch.compile` puts in it."""
    return name.replace("_orig_mod.", "")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return each parameter once, by the first of its names in the model."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that exchanges by itself, or where new tensors hold nothing."""
    for module in model.modules():
        for each in type(module).__mro__:
            if each.__name__ in DISTRIBUTED_WRAPPERS:
                raise ValueError(
                    f"the model is or contains a {each.__name__}, which "
                    f"{DISTRIBUTED_WRAPPERS[each.__name__]}: give the trainer and the optimizer "
                    "the plain model"
                )
    if torch.empty(0).is_meta:
        raise ValueError(
            "the default device is meta, whose tensors hold no values: call "
            'torch.set_default_device("cpu"), or leave the context, before making a trainer'
        )


def holds_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor is a shape alone."""
    return tensor.is_meta


def fault_of(tensor: Tensor) -> str:
    """Say why a tensor cannot be overwritten by rank 0's values; nothing if it can."""
    if is_lazy(tensor):
        return "has no shape yet: run the lazy model on one input first"
    if holds_no_values(tensor):
        return "lies on the meta device and holds no values: call to_empty() and initialize it"
    is_plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    if not is_plain or tensor.is_nested or tensor.is_quantized:
        kind = f"{type(tensor).__name__} of {tensor.layout}"
        return f"is a {kind}, not a plain dense tensor: keep a dense one, which nothing shards"
    if tensor.is_inference():
        return "was made in torch.inference_mode(), so nothing may overwrite it: make it outside"
    if any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "is expanded, several elements in the same memory: store its clone()"
    return ""


def find_fault(model: nn.Module) -> str:
    """Return the error of the first tensor that rank 0's values cannot overwrite, or nothing."""
    for kind, name, tensor in _named_tensors(model):
        if fault := fault_of(tensor):
            return f"{kind} {name} {fault}"
    return ""


def describe(model: nn.Module, trained: set[str]) -> Facts:
    """Describe all parameters and buffers, for ranks to compare before they exchange them."""
    facts: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for kind, name, tensor in _named_tensors(model):
        first = first_names.setdefault(id(tensor), name)
        # Frozen on one rank alone, a parameter has another key there.
        prefix = "" if kind == "buffer" or first in trained else "untrained "
        place = f" on {tensor.device.type}" if kind == "buffer" else ""
        shape = f"{tensor.dtype} {tuple(tensor.shape)}{place}"
        facts[f"{prefix}{kind} {name}"] = shape if first == name else f"the same tensor as {first}"
    # The vectors that ranks exchange follow the model's order.
    places = enumerate(name for name in named_parameters(model) if name in trained)
    return {**facts, **{f"trained parameter number {number}": name for number, name in places}}


def broadcast_parameters(model: nn.Module, group: ProcessGroup) -> None:
    """Give all ranks rank 0's parameters; `describe` is equal on all of them."""
    for _, parameter in sorted(named_parameters(model).items()):
        collectives.broadcast(parameter.detach(), group)


def broadcast_buffers(model: nn.Module, group: ProcessGroup) -> None:
    """Give all ranks rank 0's buffers, each by its name; `describe` is equal on all of them."""
    for _, buffer in sorted((plain_name(name), each) for name, each in model.named_buffers()):
        collectives.broadcast(buffer.detach(), group)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor; a tensor that is registered twice has both names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", plain_name(name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", plain_name(name), buffer
