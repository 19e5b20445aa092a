"""The values that several sections of a recipe have, each with its range."""

from typing import Annotated

from infra.ranges import Range, Text
from training.decoding.language_model.arpa import MAX_ORDER

Uri = Annotated[str, Text(0, 4096)]
LearningRate = Annotated[float, Range(1e-12, 100)]
MinibatchFrames = Annotated[int, Range(1, 10_000_000)]
GradientNorm = Annotated[float, Range(1e-9, 1e9)]
WarmUpSteps = Annotated[int, Range(1, 1_000_000_000, zero="none")]
NgramOrder = Annotated[int, Range(1, MAX_ORDER)]
AcousticScale = Annotated[float, Range(1e-6, 1000)]
Beam = Annotated[float, Range(1e-3, 1e6)]
Count = Annotated[int, Range(1, 10_000)]
