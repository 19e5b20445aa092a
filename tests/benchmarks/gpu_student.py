"""Time the student's training step on a device: frames a second, plain and as a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.splicing import NUM_INPUTS
from tests.benchmarks.gpu_graphs import captured, repeated
from tests.benchmarks.measure import Figure, interleaved, ratios
from training.models.acoustic_model import AcousticModel, ModelConfig
from training.models.losses import kbest_cross_entropy


@dataclass(frozen=True)
class Shape:
    """Shape holds a model, and one rank's minibatch of chunks with k-best targets."""

    config: ModelConfig
    num_senones: int
    num_chunks: int
    chunk_frames: int
    num_best: int

    @property
    def num_frames(self) -> int:
        """Count the low-rate frames of a step."""
        return self.num_chunks * self.chunk_frames


STUDENT = Shape(ModelConfig(5, 768, False, 3, 0.0), 3183, 64, 32, 20)
STEPS = 20


def figures(shape: Shape, device: torch.device, num_rounds: int) -> list[Figure]:
    """Return frames a second of each kind of step; fp32 is torch's default, TF32 in cuDNN alone."""
    steps = {
        "fp32, plain": training_step(shape, device, torch.float32),
        "bf16, plain": training_step(shape, device, torch.bfloat16),
        "bf16, CUDA graph": captured(training_step(shape, device, torch.bfloat16), device),
    }
    functions = {name: repeated(step, STEPS, device) for name, step in steps.items()}
    for function in functions.values():
        function()  # cuDNN and the allocator settle
    seconds = interleaved(functions, num_rounds)
    found = [
        Figure.of(
            f"student, {name}", [STEPS * shape.num_frames / each for each in taken], "frames/s"
        )
        for name, taken in seconds.items()
    ]
    for name in ("fp32, plain", "bf16, plain"):
        gains = ratios(seconds[name], seconds["bf16, CUDA graph"])
        found.append(Figure.of(f"student, CUDA graph as a multiple of {name}", gains, "x"))
    return found


def training_step(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a whole step of a fresh student on one minibatch: loss, gradients, Adam.

    Weights and Adam stay in float32; autocast computes in bfloat16. The step returns the loss, and
    does not wait for the device, so that it can be captured.
    """
    torch.manual_seed(0)
    model = AcousticModel(shape.config, shape.num_senones).to(device)
    is_captured = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=is_captured)
    features, senones, probabilities = minibatch(shape, device)

    def step() -> Tensor:
        optimizer.zero_grad()
        with _precision(dtype, device):
            logits = model(features)
        loss = kbest_cross_entropy(logits.float(), senones, probabilities) / shape.num_frames
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def minibatch(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make random features, and k different senones a frame with probabilities that sum to 1."""
    frames = (shape.num_chunks, shape.chunk_frames)
    features = torch.randn(*frames, NUM_INPUTS, device=device)
    logits, senones = torch.randn(*frames, shape.num_senones, device=device).topk(shape.num_best)
    return features, senones, logits.softmax(-1)


def _precision(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    if dtype == torch.float32:
        return nullcontext()
    # No cache: within a captured graph it would hold weights of the capture.
    return torch.autocast(device.type, dtype, cache_enabled=False)
