"""Ranges of the values that several sections of a recipe share."""

from typing import Annotated, Literal, TypeAlias

from infra.settings import Range, Text

Uri = Annotated[str, Text(0, 4096)]
LearningRate = Annotated[float, Range(1e-12, 100)]
MinibatchFrames = Annotated[int, Range(1, 10_000_000)]
GradientNorm = Annotated[float, Range(1e-9, 1e9)]
WarmUpSteps = Annotated[int, Range(1, 1_000_000_000, zero="none")]
Beam = Annotated[float, Range(1e-3, 1e6)]
Count = Annotated[int, Range(1, 10_000)]
WarmStart = Literal["none", "aligner", "baseline"]
"""The models of a run from whose weights another one may begin."""

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""tf32: a GPU's products of float32 numbers keep 10 bits of each; a CPU knows no such thing."""


SoftTargetsForm: TypeAlias = Literal["renormalized", "ghost"]
"""Whether the k best sum to one, or one class of all other senones has what they do not hold."""


MAX_ORDER = 10


AcousticScale = Annotated[float, Range(1e-6, 1000)]


NgramOrder = Annotated[int, Range(1, MAX_ORDER)]
