"""Name a model's parameters and buffers, and see the trained parameters as one vector.

The vector has the order of the names in the model. Parameters and buffers of all ranks become those
of rank 0 where ranks hold the same names, types and shapes.
"""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from training.distributed import collectives
from training.distributed.checks import Facts


class FlatParameters:
    """FlatParameters holds the parameters that `optimizer` trains, by their names in `model`.

    The vector is float32, whatever types of the parameters it holds side by side (float64, where
    one is). Raises ValueError where the optimizer trains a tensor that the model does not have, or
    that ranks cannot exchange, and where it trains none, or some on several devices.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        held = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
        named = named_parameters(model)
        if held - {id(p) for p in named.values()}:
            raise ValueError(
                "the optimizer trains a parameter that the model does not have: its replicas would "
                "drift apart; build both from the same model"
            )
        # Every trained tensor has its place in the vector: none is left out for its size.
        self.named = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
        # model.to() changes a parameter's type and device within the same object.
        self._kinds = [(name, p.dtype, p.device) for name, p in self.named.items()]
        devices = {p.device for p in self.named.values()}
        if len(devices) != 1:
            raise ValueError(
                f"trained parameters on {len(devices)} devices: need one device, and at least one "
                "parameter"
            )
        (self.device,) = devices
        for name, p in self.named.items():
            if fault := fault_of(p):
                raise ValueError(f"parameter {name} {fault}")
            if p.is_complex():
                raise ValueError(
                    f"parameter {name} is {p.dtype}, and trainers compare and round real numbers: "
                    "keep torch.view_as_real() of it, and make it complex in the forward pass"
                )
        # A vector of bfloat16 forgets what is below 1/256 of an element: BMUF's models drifted in
        # it by up to 1.7 % in 30 blocks at a rate of 0. So vectors are float32 at least.
        self.vector_dtype = torch.float32
        for p in self.named.values():
            self.vector_dtype = torch.promote_types(self.vector_dtype, p.dtype)
        self._is_exact = all(dtype == self.vector_dtype for _, dtype, _ in self._kinds)
        self.num_elements = sum(p.numel() for p in self.named.values())
        self._gradients: Tensor | None = None
        self._gradient_views: list[Tensor] = []

    def is_same(self, other: "FlatParameters") -> bool:
        """Return whether `other` holds the same tensors by the same names, of the same kind."""
        tensors = zip(self.named.values(), other.named.values(), strict=False)
        return self._kinds == other._kinds and all(p is q for p, q in tensors)

    def describe(self) -> dict[str, str]:
        """Name every parameter's type and shape, to compare ranks."""
        return {
            f"parameter {name}": f"{p.dtype} {tuple(p.shape)}" for name, p in self.named.items()
        }

    def zeros(self) -> Float[Tensor, " elements"]:
        """Make a vector of zeros, one for each parameter, in float32 at least."""
        return torch.zeros(self.num_elements, dtype=self.vector_dtype, device=self.device)

    def weights(self) -> Float[Tensor, " elements"]:
        """Copy the parameters to a vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.named.values()]).to(
            self.vector_dtype
        )

    def set_weights(self, flat: Float[Tensor, " elements"]) -> None:
        """Overwrite the parameters, which round to their own type."""
        for name, values in self.views(flat).items():
            self.named[name].detach().copy_(values)

    def rounded(self, flat: Float[Tensor, " elements"]) -> Float[Tensor, " elements"]:
        """Return a vector rounded to the parameters' types; itself if all are the vector's type."""
        if self._is_exact:
            return flat
        views = zip(self.named.values(), self._views(flat), strict=True)
        return torch.cat([view.to(p.dtype).to(flat.dtype).reshape(-1) for p, view in views])

    def refined(self, flat: Float[Tensor, " elements"]) -> Float[Tensor, " elements"]:
        """Return the parameters as a vector, taking `flat` where it rounds to them."""
        weights = self.weights()
        if self._is_exact:
            return weights
        return torch.where(self.rounded(flat) == weights, flat, weights)

    def first_difference(self, flat: Float[Tensor, " elements"]) -> str:
        """Return the name of the first parameter that is not as in `flat`, or nothing."""
        for name, view in self.views(flat).items():
            if not torch.equal(self.named[name].detach(), view.to(self.named[name].dtype)):
                return name
        return ""

    def gradients(self) -> Float[Tensor, " elements"]:
        """Copy the gradients to a vector, the same one each time; a missing one is zeros."""
        # A new vector's page faults would cost as much as encoding a message.
        if self._gradients is None:
            self._gradients = self.zeros()
            self._gradient_views = self._views(self._gradients)
        self.fill_missing_gradients()
        torch._foreach_copy_(self._gradient_views, self.present_gradients())
        return self._gradients

    def present_gradients(self) -> list[Tensor]:
        """Return the gradients that are not missing, uncopied."""
        return [p.grad for p in self.named.values() if p.grad is not None]

    def set_gradients(self, flat: Float[Tensor, " elements"]) -> None:
        """Overwrite the gradients; make the missing ones."""
        self.fill_missing_gradients()
        views = self._gradient_views if flat is self._gradients else self._views(flat)
        torch._foreach_copy_(self.present_gradients(), views)

    def fill_missing_gradients(self) -> None:
        """Make missing gradients zeros and sparse ones dense, so that ranks take equal steps."""
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                p.grad = p.grad.to_dense()

    def by_name(self, flat: Float[Tensor, " elements"]) -> dict[str, Tensor]:
        """Copy a vector to tensors keyed and shaped as the parameters, for a checkpoint."""
        # Residuals are keyed by parameter, so their checkpoint outlives another layout of the
        # vector.
        return {name: view.clone() for name, view in self.views(flat).items()}

    def views(self, flat: Float[Tensor, " elements"]) -> dict[str, Tensor]:
        """Return the parts of a vector, keyed and shaped as the parameters, without copying."""
        return dict(zip(self.named, self._views(flat), strict=True))

    def flatten(self, by_name: Mapping[str, Tensor]) -> Float[Tensor, " elements"]:
        """Invert `by_name`; raise ValueError where names or shapes are not the model's."""
        tensors = {plain_name(name): tensor for name, tensor in by_name.items()}
        expected = {name: tuple(p.shape) for name, p in self.named.items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            name = next(n for n in expected | found if expected.get(n) != found.get(n))
            raise ValueError(
                f"the checkpoint has {name}: {found.get(name)}, the model {expected.get(name)}: "
                "need the model and optimizer that the checkpoint was written with"
            )
        flat = self.zeros()
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat

    def carry_over(
        self, flat: Float[Tensor, " old_elements"], old: "FlatParameters"
    ) -> Float[Tensor, " elements"]:
        """Rearrange a vector of the `old` parameters for these; new ones get zeros."""
        by_name = old.by_name(flat)
        carried = self.zeros()
        for name, view in self.views(carried).items():
            if name in by_name and by_name[name].shape == view.shape:
                view.copy_(by_name[name])
        return carried

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes([p.numel() for p in self.named.values()])
        return [part.view(p.shape) for part, p in zip(parts, self.named.values(), strict=True)]


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
    """Raise ValueError for a model that exchanges by itself, or if the default device is meta."""
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
    """Return whether a tensor has a shape but no values."""
    return tensor.is_meta


def fault_of(tensor: Tensor) -> str:
    """Return why rank 0's values cannot overwrite a tensor; an empty string if they can."""
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
    """Return the error of the first tensor that rank 0's values cannot overwrite, if any."""
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
