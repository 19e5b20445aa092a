"""The optimizers that a recipe can name, which apply the gradients that a trainer gives them.

All are torch's fused ones: one pass over the weights, 4 to 10 % of a small model's step. A
checkpoint says of itself whether its optimizer was fused, so older ones resume bitwise.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from infra.ranges import Range, check_ranges

Decay = Annotated[float, Range(0, 1, below=True)]
Epsilon = Annotated[float, Range(1e-30, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdConfig:
    """SGD with momentum, as in both papers (000 3.2, 003 VI-B), which name no momentum.

    Gradients are sums over frames, so a rate of 1e-4 at 2,048 frames is 0.2 for their mean.
    """

    name: Literal["sgd"] = "sgd"
    momentum: Decay = 0.9

    num_state_vectors: ClassVar[int] = 1
    """Vectors of the model's size in the optimizer's state, at most."""

    __post_init__ = check_ranges

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer; the training loop sets its learning rate."""
        return SGD(parameters, momentum=self.momentum, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig:
    """Adam, whose step does not depend on the gradients' scale."""

    name: Literal["adam"] = "adam"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8

    num_state_vectors: ClassVar[int] = 2
    """Both moments."""

    __post_init__ = check_ranges

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer; the training loop sets its learning rate."""
        return Adam(parameters, betas=(self.beta1, self.beta2), eps=self.epsilon, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamwConfig:
    """AdamW: Adam, and weights that shrink by the learning rate times `weight_decay` each step."""

    name: Literal["adamw"] = "adamw"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8
    weight_decay: Annotated[float, Range(0, 1)] = 0.01

    num_state_vectors: ClassVar[int] = 2
    """Both moments."""

    __post_init__ = check_ranges

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer; the training loop sets its learning rate."""
        return AdamW(
            parameters,
            betas=(self.beta1, self.beta2),
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            fused=True,
        )


OptimizerConfig: TypeAlias = SgdConfig | AdamConfig | AdamwConfig
