"""The optimizers that a recipe can name, and their learning rates."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from infra.settings import Range, check_ranges

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


OptimizerConfig: TypeAlias = SgdConfig | AdamConfig | AdamwConfig


def check_decay(initial: float, final: float, num_epochs: int) -> None:
    """Raise ValueError for rates that rise or are not positive, and for no epoch."""
    if not 0 < final <= initial:
        raise ValueError(f"learning rates {initial} -> {final}: need 0 < final <= initial")
    if num_epochs < 1:
        raise ValueError(f"num_epochs = {num_epochs}: need at least 1")


def check_newbob_rates(initial: float, minimum: float) -> None:
    """Raise ValueError unless the initial rate is above a positive minimum."""
    if not 0 < minimum < initial:
        raise ValueError(f"learning rates {initial} -> {minimum}: need 0 < minimum < initial")
