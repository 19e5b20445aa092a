"""Replay the gradients of minibatches of chunks as a CUDA graph, launched as one.

Five layers over a chunk's 32 frames are some 160 small products forwards and twice as many
backwards, each of which the host would launch. Whole utterances have ever other shapes; trainers
and optimizers exchange and decide in Python: they remain outside, and so do models that read the
lengths: bidirectional ones, Conformers, and a user's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.data.minibatch import Minibatch, Targets
from training.data.row_order import chunked_shape
from training.data.targets import SequenceTargets
from training.fit.steps import ComputeGradients, RunningTotals, compute_gradients
from training.models.acoustic_model import AcousticModel
from training.settings.model_training import TrainingSettings

WARM_UP_STEPS = 3


def gradients_of(model: AcousticModel, config: TrainingSettings) -> ComputeGradients:
    """Return what computes the gradients of the model's minibatches, by graphs on a GPU."""
    compute = partial(compute_gradients, model, config)
    # A graph repeats its first minibatch's computations, whatever lengths another one has.
    if not model.config.ignores_lengths or not is_captured_on(model.device):
        return compute
    return GradientGraphs(model, compute, chunked_shape(config.minibatch_frames))


def is_captured_on(device: torch.device) -> bool:
    """Return whether work on `device` can be captured."""
    return device.type == "cuda"


def capture(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Do `work` a few times, and return what does it again on a GPU, in the same memory.

    `work` must not wait for the device; the caller keeps its tensors.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # a capture wants kernels compiled, and libraries started
        for _ in range(WARM_UP_STEPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, which only captures of one thread allow.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


@dataclass(frozen=True, slots=True)
class _Captured:
    """_Captured holds the memory that a graph reads, its minibatch, and writes, all others."""

    minibatch: Minibatch
    gradients: dict[nn.Parameter, Tensor]
    totals: RunningTotals
    norm: Float[Tensor, ""]
    replay: Callable[[], object]


class GradientGraphs:
    """GradientGraphs computes as `compute` does; minibatches of `shape` by a graph.

    `shape` is (chunks, frames); each kind of target has a graph of its own. The parameters must
    keep their memory, as trainers, checkpoints and optimizers let them.
    """

    def __init__(self, model: nn.Module, compute: ComputeGradients, shape: tuple[int, int]) -> None:
        self._parameters = list(model.parameters())
        self._compute = compute
        self._shape = shape
        self._captured: dict[type[Targets], _Captured] = {}

    def __call__(self, minibatch: Minibatch) -> tuple[RunningTotals, Float[Tensor, ""]]:
        """Leave clipped gradients in the parameters; return the totals, and the norm before."""
        # Lattices are the host's, and those of another minibatch are others.
        is_sequence = isinstance(minibatch.targets, SequenceTargets)
        if is_sequence or minibatch.features.shape[:2] != self._shape:
            return self._compute(minibatch)
        kind = type(minibatch.targets)
        if kind not in self._captured:
            self._captured[kind] = self._capture(minibatch)
        return self._replay(self._captured[kind], minibatch)

    def _capture(self, minibatch: Minibatch) -> _Captured:
        own = replace(minibatch, features=minibatch.features.clone(), targets=_clone(minibatch))
        results: list[tuple[RunningTotals, Tensor]] = []

        def work() -> None:
            # Without gradients, backward() makes them, in the graph's own memory.
            for parameter in self._parameters:
                parameter.grad = None
            results[:] = [self._compute(own)]

        replay = capture(work, minibatch.features.device)
        ((totals, norm),) = results
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        return _Captured(own, gradients, totals, norm, replay)

    def _replay(
        self, captured: _Captured, minibatch: Minibatch
    ) -> tuple[RunningTotals, Float[Tensor, ""]]:
        for own, given in zip(_tensors(captured.minibatch), _tensors(minibatch), strict=True):
            own.copy_(given)
        captured.replay()
        # zero_grad() and steps without a graph leave others.
        for parameter, gradient in captured.gradients.items():
            parameter.grad = gradient
        # The next replay overwrites these sums, which the loop may not have added yet.
        cross_entropy = captured.totals.cross_entropy.clone()
        num_correct = captured.totals.num_correct.clone()
        totals = RunningTotals(minibatch.num_frames, cross_entropy, num_correct)
        return totals, captured.norm


def _tensors(minibatch: Minibatch) -> list[Tensor]:
    targets = minibatch.targets
    return [minibatch.features, *(getattr(targets, field.name) for field in fields(targets))]


def _clone(minibatch: Minibatch) -> Targets:
    targets = minibatch.targets
    return type(targets)(*(getattr(targets, field.name).clone() for field in fields(targets)))
