"""The values that several sections of a recipe have, each with its range."""

from typing import Annotated, Literal

from infra.ranges import Range, Text

Uri = Annotated[str, Text(0, 4096)]
LearningRate = Annotated[float, Range(1e-12, 100)]
MinibatchFrames = Annotated[int, Range(1, 10_000_000)]
GradientNorm = Annotated[float, Range(1e-9, 1e9)]
WarmUpSteps = Annotated[int, Range(1, 1_000_000_000, zero="none")]
Beam = Annotated[float, Range(1e-3, 1e6)]
Count = Annotated[int, Range(1, 10_000)]
WarmStart = Literal["none", "aligner", "baseline"]
"""The models of a run from whose weights another one may begin."""
