"""Settings of optimizers and trainers.

Papers: 003 VI (GTC, BMUF, HTM), 000 2 (BMUF), 004 (1-bit SGD), 001 (decentralized trainers).
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

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

Density = Annotated[float, Range(1e-5, 1)]
Bits = Annotated[int, Range(2, 8)]
ErrorDecay = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """TopK: a chunk's largest elements, with error feedback (SparseLoCo, arXiv 2508.15706).

    The residual becomes error_decay residual + change, less what is sent of it.
    """

    name: Literal["top_k"] = "top_k"
    density: Density = 0.03
    bits: Bits = 2
    error_decay: ErrorDecay = 0.95

    __post_init__ = check_ranges

    @property
    def num_cells(self) -> int:
        """Return the number of cells of magnitudes."""
        return 1 << self.bits - 1

    def num_kept(self, num_elements: int) -> int:
        """Return the number of elements that a chunk of so many sends, at least 1."""
        return math.ceil(self.density * num_elements)


GradientThreshold = Annotated[float, Range(1e-12, 1e9, zero="unquantized gradients")]
BlockSize = Annotated[int, Range(1, 1_000_000)]
BlockLearningRate = Annotated[float, Range(1e-6, 1000)]
RanksOfTier = Annotated[int, Range(1, 1_000_000, zero="a host's ranks")]
MixingSeed = Annotated[int, Range(0, 2**63 - 1)]
"""A seed of what all ranks draw alike: permutations, partners."""

Form = Literal["nesterov", "as_printed"]
OptimizerState = Literal["keep", "average", "reset"]
"""Treatments of the optimizer's moments at a block's end."""


Sum: TypeAlias = Literal[
    "sum",
    "sum as printed",
    "mean over ranks",
    "mean over groups",
    "normalized",
    "sum of normalized",
]


@dataclass(frozen=True, slots=True)
class RateUnit:
    """RateUnit: how far a gradient moves the model by plain SGD, as steps add up, a unit of rate.

    Each rank's gradient is a sum over frames. It moves the model by `factor` where the ranks'
    gradients are summed, and by `factor` / N where models of N ranks, or groups, are averaged. A
    "sum as printed" moves it 1 + eta times as far, where eta follows from the number of models.
    Elements of a "normalized" gradient are about 1, and move it by `factor`, whatever they were.
    """

    factor: float
    over: Sum


def block_response(block_learning_rate: float, block_momentum: float, form: Form) -> float:
    """Return how far a block's mean change moves the model in all: zeta / (1 - eta).

    As printed it is 1 + eta times as far (training.algorithms.block_filter).
    """
    response = block_learning_rate / (1 - block_momentum)
    return response * (1 + block_momentum) if form == "as_printed" else response


def num_groups(num_ranks: int, group_size: int, setting: str = "group_size") -> int:
    """Count the groups of so many ranks; ValueError if one would have fewer than the others."""
    if not (group_size >= 1 and num_ranks % group_size == 0):
        raise ValueError(
            f"{setting} = {group_size}: need a divisor of {num_ranks}, the number of ranks"
        )
    return num_ranks // group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """The settings of a trainer: the keys of a recipe, and the trainer's keyword arguments.

    The first line of a record's docstring is the trainer's description in a job's help.
    """

    trainer: ClassVar[str]
    """The class that trains by these settings, as "module:Class"."""

    __post_init__ = check_ranges

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if the trainer cannot work on so many ranks."""

    @property
    def rate_unit(self) -> RateUnit:
        """Return what the learning rate applies to: the sum (003 VI-C, 004 eqs. 1, 2)."""
        return RateUnit(1.0, "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousConfig(_Trainer):
    """Synchronous SGD: every step applies the sum of all ranks' gradients."""

    name: Literal["synchronous"] = "synchronous"

    trainer = "training.trainers.synchronous:Synchronous"
    num_state_vectors: ClassVar[int] = 0
    """Vectors of the model's size in the trainer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GtcConfig(_Trainer):
    """GTC: each rank sends +-gradient_threshold, for gradients summed over a minibatch.

    The default is that of both papers, for minibatches of 2048 frames (003 VI-C, 000 3.2).
    """

    name: Literal["gtc"] = "gtc"
    gradient_threshold: GradientThreshold = 8.0

    trainer = "training.trainers.gtc:Gtc"
    num_state_vectors: ClassVar[int] = 1
    """The residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(_Trainer):
    """BlockConfig: zeta, and C of eq. (5); the defaults are those of paper 000 3.2.

    A `block_momentum` takes the place of eq. (5) and its C; 0 is model averaging.
    `optimizer_state` is what becomes of the optimizer's moments at a block's end. Changes are sent
    by `block_exchange`, or else exactly, in float32, as both papers send models.
    """

    block_size: BlockSize = 50
    block_learning_rate: BlockLearningRate = 1.0
    momentum_constant: Annotated[float, Range(1e-6, 1000)] = 1.0
    block_momentum: Annotated[float, Range(0, 1, below=True)] | None = None
    form: Form = "nesterov"
    optimizer_state: OptimizerState = "keep"
    block_exchange: TopK | None = None

    _averaged: ClassVar[Sum] = "mean over ranks"

    @property
    def num_state_vectors(self) -> int:
        """Count both models of a block, the filtered update, and top-k's residual."""
        return 3 + (self.block_exchange is not None)

    @property
    def rate_unit(self) -> RateUnit:
        """Return C of eq. (5): a block's mean change counts zeta / (1 - eta) = C N times in all."""
        if self.block_momentum is None:
            over: Sum = "sum as printed" if self.form == "as_printed" else "sum"
            return RateUnit(self.momentum_constant, over)
        response = block_response(self.block_learning_rate, self.block_momentum, self.form)
        return RateUnit(response, self._averaged)

    def block_momentum_of(self, num_models: int) -> float:
        """Return eta of zeta / (N (1 - eta)) = C (000 eq. 5), where N models are averaged.

        A `block_momentum` takes its place. ValueError where eta would be below 0.
        """
        if self.block_momentum is not None:
            return self.block_momentum
        zeta, constant = self.block_learning_rate, self.momentum_constant
        if constant * num_models < zeta:
            raise ValueError(
                f"momentum_constant = {constant}: need at least block_learning_rate / N = "
                f"{zeta} / {num_models}, or the block momentum is negative"
            )
        return 1 - zeta / (num_models * constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class BmufConfig(BlockConfig):
    """BMUF: the models of all ranks are averaged after every block of steps, and filtered.

    Of each `ranks_per_leader` ranks one leader sends the mean of their models, so that fewer bytes
    cross a slow link.
    """

    name: Literal["bmuf"] = "bmuf"
    ranks_per_leader: RanksOfTier = 1

    trainer = "training.trainers.bmuf:Bmuf"

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks have no leaders, or a block momentum below 0."""
        num_groups(num_ranks, self.ranks_per_leader or ranks_per_host, "ranks_per_leader")
        self.block_momentum_of(num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmConfig(BlockConfig):
    """HTM: GTC within groups of ranks, BMUF across the groups; `group_size` 0: a host's ranks.

    The default threshold is for gradients summed over minibatches of 2048 frames (000 3.2).
    """

    name: Literal["htm"] = "htm"
    # Groups of 8 ranks and tau = 2 are the paper's; GTC alone has tau = 8.
    gradient_threshold: GradientThreshold = 2.0
    group_size: RanksOfTier = 0

    trainer = "training.trainers.htm:Htm"
    _averaged: ClassVar[Sum] = "mean over groups"

    @property
    def num_state_vectors(self) -> int:
        """Count BMUF's vectors of the model's size, and GTC's residual."""
        return 4 + (self.block_exchange is not None)

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks make no equal groups, or a block momentum below 0."""
        self.block_momentum_of(num_groups(num_ranks, self.group_size or ranks_per_host))


class AdaGradPlace(StrEnum):
    """AdaGradPlace is a row of Table 3, or no AdaGrad, as in Table 2.

    `AGGREGATE`, the paper's choice, normalizes the sum of the quantized gradients before momentum,
    `SMOOTHED` the sum after it: both act on a rank's stripe. `PARTIAL` normalizes each rank's own
    gradients before they are quantized. `RAW` does so on a single rank, which quantizes nothing.
    """

    AGGREGATE = "aggregate"
    SMOOTHED = "smoothed"
    PARTIAL = "partial"
    RAW = "raw"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGrad:
    """AdaGrad divides gradients by their standard deviation about 0 (004 4).

    With `decay` 1 it is that "over time": sqrt(t) times Duchi's AdaGrad, whose 1 / sqrt(t) is left
    to the learning rate's schedule. With a smaller decay it is that of "recent samples".
    """

    place: AdaGradPlace = AdaGradPlace.AGGREGATE
    decay: Annotated[float, Range(1e-3, 1)] = 1.0
    epsilon: Annotated[float, Range(1e-30, 1)] = 1e-10

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitConfig(_Trainer):
    """1-bit SGD: each rank sends one bit an element; its optimizer is SGD without momentum.

    `momentum` and `adagrad` are the trainer's. With `double_buffering` a minibatch is half of one.
    """

    name: Literal["one_bit"] = "one_bit"
    momentum: Annotated[float, Range(0, 1, below=True)] = 0.9
    adagrad: AdaGrad = AdaGrad()  # the paper's choice, of the aggregate (004 5.3)
    num_unquantized_steps: Annotated[int, Range(0, 1_000_000_000)] = 0
    double_buffering: bool = False

    trainer = "training.trainers.one_bit:OneBit"
    num_state_vectors: ClassVar[int] = 5
    """On one rank: both residuals, momentum, squares and an update that waits."""

    @property
    def rate_unit(self) -> RateUnit:
        """Return 1 of the sum; of what AdaGrad normalizes before it, what momentum adds up to."""
        place, added_up = self.adagrad.place, 1 / (1 - self.momentum)
        if place is AdaGradPlace.NOWHERE:
            return RateUnit(1.0, "sum")
        if place is AdaGradPlace.PARTIAL:
            return RateUnit(added_up, "sum of normalized")
        return RateUnit(1.0 if place is AdaGradPlace.SMOOTHED else added_up, "normalized")

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError for AdaGrad of the raw gradient on several ranks."""
        del ranks_per_host
        if self.adagrad.place is AdaGradPlace.RAW and num_ranks > 1:
            raise ValueError(
                f"adagrad.place = 'raw' on {num_ranks} ranks: need 1 rank, or 'partial' or "
                "'aggregate'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLocoConfig(_Trainer):
    """SparseLoCo: after a block of steps, ranks average the largest parts of their changes."""

    name: Literal["sparse_loco"] = "sparse_loco"
    block_size: BlockSize = 50
    density: Density = 0.03
    bits: Bits = 2
    error_decay: ErrorDecay = 0.95
    outer_learning_rate: BlockLearningRate = 1.0
    ranks_per_leader: RanksOfTier = 1

    trainer = "training.trainers.bmuf:SparseLoco"
    num_state_vectors: ClassVar[int] = 4
    """BMUF's three, and the residual."""

    def check_ranks(self, num_ranks: int, ranks_per_host: int) -> None:
        """Raise ValueError if so many ranks have no leaders."""
        self.as_bmuf().check_ranks(num_ranks, ranks_per_host)

    @property
    def rate_unit(self) -> RateUnit:
        """Return the outer rate, of the mean of the ranks' changes."""
        return self.as_bmuf().rate_unit

    def as_bmuf(self) -> BmufConfig:
        """Return the equivalent BMUF: top-k's error feedback takes block momentum's place."""
        return BmufConfig(
            block_size=self.block_size,
            block_learning_rate=self.outer_learning_rate,
            block_momentum=0.0,
            block_exchange=TopK(density=self.density, bits=self.bits, error_decay=self.error_decay),
            ranks_per_leader=self.ranks_per_leader,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decentralized(_Trainer):
    """The settings of a trainer that averages models at each step (001)."""

    @property
    def rate_unit(self) -> RateUnit:
        """Return 1: each rank applies its own gradient, and models are averaged (001 eq. 2)."""
        return RateUnit(1.0, "mean over ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class DPsgdConfig(_Decentralized):
    """D-PSGD: each rank averages its model with its two neighbours' on a ring in every step."""

    name: Literal["d_psgd"] = "d_psgd"

    trainer = "training.trainers.decentralized:DPsgd"
    num_state_vectors: ClassVar[int] = 3
    """The message, and both neighbours' models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandPsgdConfig(_Decentralized):
    """RAND-PSGD: D-PSGD on a ring whose order is drawn in every step, from `mixing_seed`."""

    name: Literal["rand_psgd"] = "rand_psgd"
    mixing_seed: MixingSeed = 0

    trainer = "training.trainers.decentralized:RandPsgd"
    num_state_vectors: ClassVar[int] = 3
    """What is sent, and both neighbours' models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdPsgdConfig(_Decentralized):
    """AD-PSGD: pairs of ranks average their models whenever they can, and no rank waits."""

    name: Literal["ad_psgd"] = "ad_psgd"
    mixing_seed: MixingSeed = 0
    max_staleness: Annotated[int, Range(1, 1_000_000)] = 16

    trainer = "training.trainers.decentralized:AdPsgd"
    num_state_vectors: ClassVar[int] = 6
    """The model, its own steps, the weights that were read, and the messages of an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class D1dPsgdConfig(_Decentralized):
    """D1D-PSGD: an all-reduce of the models runs while gradients of the last mean are computed."""

    name: Literal["d1d_psgd"] = "d1d_psgd"

    trainer = "training.trainers.decentralized:D1dPsgd"
    num_state_vectors: ClassVar[int] = 3
    """The rank's own model, its sum, and the mean before."""


TrainerConfig: TypeAlias = (
    SynchronousConfig
    | GtcConfig
    | BmufConfig
    | HtmConfig
    | OneBitConfig
    | SparseLocoConfig
    | DPsgdConfig
    | AdPsgdConfig
    | RandPsgdConfig
    | D1dPsgdConfig
)

TRAINERS: Mapping[str, type[TrainerConfig]] = {
    config().name: config for config in get_args(TrainerConfig)
}
"""The settings of each trainer, by the name that recipes give it: a new trainer is a line above."""


def check_optimizer(trainer: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError where a recipe gives a trainer an optimizer that it cannot work with."""
    if isinstance(trainer, OneBitConfig) and optimizer != SgdConfig(momentum=0.0):
        raise ValueError(
            f"optimizer = {optimizer}: the trainer one_bit has momentum and AdaGrad itself: need "
            'optimizer = { name = "sgd", momentum = 0 }, and trainer.momentum for the momentum'
        )


def describe_trainers() -> str:
    """Describe each trainer in one sentence, for a job's help."""
    summaries = ((inspect.getdoc(config) or "").splitlines()[0] for config in TRAINERS.values())
    return " ".join(summaries)
