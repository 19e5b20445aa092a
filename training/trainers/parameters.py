"""A model's trained parameters seen as one vector, in the order of their names in the model."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer


class FlatParameters:
    """FlatParameters holds the parameters that `optimizer` trains, by their names in `model`.

    Raises ValueError where the optimizer trains a tensor that the model does not have, or where the
    parameters differ in type or device.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        held = {id(p) for settings in optimizer.param_groups for p in settings["params"]}
        named = dict(model.named_parameters())
        if held - {id(p) for p in named.values()}:
            raise ValueError(
                "the optimizer trains a parameter that the model does not have: its replicas would "
                "drift apart; build both from the same model"
            )
        # Every trained tensor has its place in the vector: none is left out for its size.
        self.named = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
        kinds = {(p.dtype, p.device) for p in self.named.values()}
        if len(kinds) != 1:
            raise ValueError(
                f"trained parameters of {len(kinds)} kinds (dtype, device): need one kind, and at "
                "least one parameter"
            )
        ((self.dtype, self.device),) = kinds
        self.num_elements = sum(p.numel() for p in self.named.values())
        self._gradients: Tensor | None = None

    def describe(self) -> dict[str, str]:
        """Name every parameter's type and shape, to compare ranks."""
        return {
            f"parameter {name}": f"{self.dtype} {tuple(p.shape)}" for name, p in self.named.items()
        }

    def zeros(self) -> Float[Tensor, " elements"]:
        """Make a vector of zeros, one for each parameter."""
        return torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)

    def weights(self) -> Float[Tensor, " elements"]:
        """Copy the parameters to a vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.named.values()])

    def set_weights(self, flat: Float[Tensor, " elements"]) -> None:
        """Overwrite the parameters."""
        for p, values in self._with_views(flat):
            p.detach().copy_(values)

    def gradients(self) -> Float[Tensor, " elements"]:
        """Copy the gradients to a vector, the same one each time; a missing one is zeros."""
        # A new vector's page faults would cost as much as encoding a message.
        if self._gradients is None:
            self._gradients = self.zeros()
        for p, values in self._with_views(self._gradients):
            if p.grad is None:
                values.zero_()
            else:
                values.copy_(p.grad)
        return self._gradients

    def set_gradients(self, flat: Float[Tensor, " elements"]) -> None:
        """Overwrite the gradients; make the missing ones."""
        self.fill_missing_gradients()
        for p, values in self._with_views(flat):
            assert p.grad is not None
            p.grad.copy_(values)

    def fill_missing_gradients(self) -> None:
        """Make missing gradients zeros, so that the optimizer takes the same steps on all ranks."""
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def by_name(self, flat: Float[Tensor, " elements"]) -> dict[str, Tensor]:
        """Copy a vector to tensors keyed and shaped as the parameters, for a checkpoint."""
        # Residuals are keyed by parameter, so their checkpoint outlives another layout of the
        # vector.
        views = self._with_views(flat)
        return {name: view.clone() for name, (_, view) in zip(self.named, views, strict=True)}

    def flatten(self, by_name: Mapping[str, Tensor]) -> Float[Tensor, " elements"]:
        """Invert `by_name`; raise ValueError where names or shapes are not the model's."""
        expected = {name: tuple(p.shape) for name, p in self.named.items()}
        found = {name: tuple(tensor.shape) for name, tensor in by_name.items()}
        if found != expected:
            name = next(n for n in expected | found if expected.get(n) != found.get(n))
            raise ValueError(
                f"the checkpoint has {name}: {found.get(name)}, the model {expected.get(name)}: "
                "need the model and optimizer that the checkpoint was written with"
            )
        flat = self.zeros()
        for name, view in zip(self.named, self._views(flat), strict=True):
            view.copy_(by_name[name])
        return flat

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes([p.numel() for p in self.named.values()])
        return [part.view(p.shape) for part, p in zip(parts, self.named.values(), strict=True)]

    def _with_views(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        return list(zip(self.named.values(), self._views(flat), strict=True))
