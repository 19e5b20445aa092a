"""Make gradients whose messages stay equally dense step after step, to time the encoders."""

from dataclasses import dataclass

import torch
from torch import Tensor

DENSITIES = (1e-4, 1e-3, 1e-2, 0.06, 0.3)


@dataclass(frozen=True)
class GtcTask:
    """GtcTask holds a residual as it is after many steps of the same normal gradients."""

    residual: Tensor
    gradients: Tensor
    gradient_threshold: float

    @classmethod
    def of(cls, num_elements: int, density: float, device: torch.device) -> "GtcTask":
        """Make a task; an element crosses every tau / |g| steps, so mean |g| / tau are sent."""
        generator = torch.Generator(device).manual_seed(0)
        gradients = torch.randn(num_elements, generator=generator, device=device)
        tau = float(gradients.abs().mean()) / density
        residual = torch.rand(num_elements, generator=generator, device=device)
        return cls(residual.mul_(tau).copysign_(gradients), gradients, tau)
