"""Take steps around an untouched optimizer, and validate the model (003 V-D).

On a GPU the gradients of minibatches of chunks are replayed as a CUDA graph, launched as one: five
layers over a chunk's 32 frames are some 160 small products forwards and twice as many backwards,
each of which the host would launch. Whole utterances have ever other shapes; trainers and
optimizers exchange and decide in Python: they remain outside the graph, and so do models that read
the lengths: bidirectional ones, Conformers, and user-supplied ones.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.data.dataset import Dataset, device_copies, moved
from training.data.minibatch import Minibatch, Targets
from training.data.row_order import chunked_shape
from training.data.sub_epochs import SubEpoch
from training.data.targets import SequenceTargets
from training.distributed import collectives
from training.distributed.collectives import Arrival
from training.distributed.process_group import ProcessGroup, is_read_at_once
from training.models.acoustic_model import AcousticModel
from training.models.precision import training_precision, without_tf32
from training.settings.model_training import Precision, TrainingSettings

VALIDATION = SubEpoch(True, 0, 1, 0, False, 0.0, is_validation=True)
"""The speakers left out, always at offset 0, so that losses of epochs are comparable.

In chunks, but for models that are trained on whole utterances alone.
"""

NO_DEVELOPMENT = (
    "no utterance of the development speakers is aligned: need at least one for the validation "
    "loss: list others in dev.speakers"
)


@dataclass(frozen=True, slots=True)
class FrameTotals:
    """FrameTotals: one rank's sums over frames, as numbers.

    `expected_correct` is sMBR's, 0 without lattices.
    """

    num_frames: int = 0
    cross_entropy: float = 0.0
    num_correct: int = 0
    expected_correct: float = 0.0


_ZERO = torch.zeros((), dtype=torch.float64)
"""Shared, as sums are replaced and never changed: made at each step, zeros took 0.2 % of it."""


@dataclass(slots=True)
class RunningTotals:
    """RunningTotals: sums over frames that stay on the model's device until they are read."""

    num_frames: int = 0
    cross_entropy: Float[Tensor, ""] = _ZERO
    num_correct: Num[Tensor, ""] = _ZERO
    expected_correct: Float[Tensor, ""] = _ZERO

    @classmethod
    def of(cls, totals: FrameTotals) -> "RunningTotals":
        """Continue from totals that were read."""
        sums = (totals.cross_entropy, totals.num_correct, totals.expected_correct)
        return cls(totals.num_frames, *(torch.tensor(each, dtype=torch.float64) for each in sums))

    def add(self, other: "RunningTotals") -> None:
        """Add the totals of one minibatch, in float64; the host does not wait for a device."""
        # A CPU's scalar may be added to a device's, so the sums follow the losses to their device.
        self.num_frames += other.num_frames
        self.cross_entropy = self.cross_entropy + other.cross_entropy
        self.num_correct = self.num_correct + other.num_correct
        self.expected_correct = self.expected_correct + other.expected_correct

    def read(self) -> FrameTotals:
        """Return the numbers; the host waits for the device, once."""
        sums = (self.cross_entropy, self.num_correct, self.expected_correct)
        # A sum that a criterion does not have has remained on the CPU, where it began.
        device = next((each.device for each in sums if each.device.type != "cpu"), sums[0].device)
        on_device = torch.stack([each.to(device) for each in sums])
        cross_entropy, num_correct, expected_correct = on_device.tolist()
        return FrameTotals(self.num_frames, cross_entropy, int(num_correct), expected_correct)


class GradientNorms:
    """GradientNorms looks at the norm of each of a rank's gradients, from `num_steps` on.

    A norm that is not finite raises FloatingPointError on this rank alone: at once on a CPU; on a
    device a step later, and before each save, so that the host waits for the device in no step.
    """

    def __init__(self, rank: int, num_steps: int) -> None:
        self._rank = rank
        self._num_steps = num_steps
        self._pending: deque[tuple[int, Arrival]] = deque()

    def examine(self, norm: Float[Tensor, ""]) -> None:
        """Look at the norm of the next step, or let it begin its way to the host."""
        self._num_steps += 1
        if is_read_at_once(norm.device):
            self._require_finite(self._num_steps, float(norm))
        else:
            self._pending.append((self._num_steps, Arrival(norm.detach())))

    def check(self, num_left: int = 0) -> None:
        """Look at the norms that are on their way, except the last `num_left`."""
        while len(self._pending) > num_left:
            step, arrival = self._pending.popleft()
            self._require_finite(step, float(arrival.values()))

    def _require_finite(self, step: int, norm: float) -> None:
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"rank {self._rank}, step {step}: the gradient's norm is {norm}: look at this "
                "rank's last minibatch, or lower the learning rate, and resume from a checkpoint"
            )


class UncheckedNorms(GradientNorms):
    """UncheckedNorms looks at none: in a trial the trainer finds a NaN, on all ranks together."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def examine(self, norm: Float[Tensor, ""]) -> None:
        """Do nothing."""


ComputeGradients: TypeAlias = Callable[..., tuple[RunningTotals, Float[Tensor, ""]]]
"""ComputeGradients leaves clipped gradients in a model; it returns totals and the norm before."""


def take_steps(
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    minibatches: Iterator[Minibatch],
    num_steps: int,
    config: TrainingSettings,
    norms: GradientNorms,
    compute: ComputeGradients | None = None,
    factor: int = 1,
) -> Generator[RunningTotals, None, None]:
    """Take one step after the other, and yield each one's totals when it is taken.

    A step sums the gradients of `factor` minibatches. A rank whose data ends first continues with
    empty steps, so that no rank waits. Raises FloatingPointError for a gradient that is not finite:
    on a CPU before another rank receives it, on a device a step later. No step waits for the
    device: the caller lets the trainer look at the last step's gradient, which all ranks do
    together, and then calls `norms.check()`. `compute` replaces `compute_gradients` of one.
    """
    model.train()
    if compute is None or factor > 1:  # graphs are of single minibatches
        compute = partial(compute_gradients, model, config, factor=factor)
    for _ in range(num_steps):
        optimizer.zero_grad()
        result = RunningTotals()
        if taken := list(islice(minibatches, factor)):
            result, norm = compute(*taken)
            norms.examine(norm)
        # Out of data, a rank still sends what GTC's residual holds.
        optimizer.step()
        # The trainer looked first, within step(): where it finds a NaN, all ranks raise together.
        norms.check(num_left=1)
        yield result


def compute_gradients(
    model: AcousticModel, config: TrainingSettings, *minibatches: Minibatch, factor: int = 1
) -> tuple[RunningTotals, Float[Tensor, ""]]:
    """Add the gradients of minibatches, and clip them as those of one that is `factor` as large.

    Return the totals, and the norm before.
    """
    totals = RunningTotals()
    for minibatch in minibatches:
        loss, own = minibatch_loss(model, minibatch, config.precision)
        loss.backward()  # type: ignore[no-untyped-call]
        totals.add(own)
    # The gradient is a sum over frames, so its bound grows with the minibatch.
    bound = config.max_gradient_norm * config.minibatch_frames * factor
    return totals, clip_gradients(list(model.parameters()), bound, model.whole_norm)


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    bound: float,
    whole_norm: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> Float[Tensor, ""]:
    """Scale the gradients down to a norm of `bound`, where theirs is above; return theirs.

    `whole_norm` makes the whole model's norm of that of the parameters, where these are a part.
    """
    norm = whole_norm(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    # A factor of 1 would cost a small model 1 % of its step. A GPU's host does not look.
    if not is_read_at_once(norm.device) or not float(norm) < 0.99 * bound:
        nn.utils.clip_grads_with_norm_(parameters, bound, norm)
    return norm


def minibatch_loss(
    model: AcousticModel, minibatch: Minibatch, precision: Precision = "float32"
) -> tuple[Tensor, RunningTotals]:
    """Return a minibatch's loss, a sum to differentiate, and its totals."""
    # Lengths remain on the host, where the model needs them, so nothing here waits for a device.
    precision = training_precision(precision, model.device)
    logits = model(minibatch.features, minibatch.lengths, precision)
    cross_entropy = minibatch.targets.cross_entropy(logits)
    correct = minibatch.targets.num_correct(logits)
    totals = RunningTotals(minibatch.num_frames, cross_entropy.detach(), correct)
    if not isinstance(minibatch.targets, SequenceTargets):
        return cross_entropy, totals
    loss = minibatch.targets.loss(logits)
    return loss, replace(totals, expected_correct=-loss.detach())


def validate(model: AcousticModel, dataset: Dataset, group: ProcessGroup) -> dict[str, float]:
    """Return cross-entropy and frame accuracy on utterances that no training reads.

    Means over all ranks' frames, the same on each, named as a learning curve names them. Computes
    in float32, whatever the precision of training. Draws no random number. Raises ValueError if no
    utterance is left out, or the development speakers have none.
    """
    model.eval()
    running = RunningTotals()
    # Lattices are of the labelled partitions alone, and neither measure needs one.
    sub_epoch = replace(VALIDATION, whole_utterances=model.config.whole_utterances)
    plan = replace(dataset, lattices=None).plan(sub_epoch, 0)
    minibatches = device_copies(plan.minibatches(), model.device)
    with torch.no_grad(), without_tf32(), closing(minibatches):
        for minibatch in minibatches:
            running.add(minibatch_loss(model, minibatch)[1])
    total = running.read()
    counts = [total.num_frames, total.cross_entropy, total.num_correct]
    sums = torch.tensor(counts, dtype=torch.float64)
    collectives.all_reduce_sum(sums, group)
    num_frames, cross_entropy, num_correct = sums.tolist()
    if num_frames == 0:
        if dataset.development:
            raise ValueError(NO_DEVELOPMENT)
        raise ValueError(
            f"validation_one_in = {dataset.validation_one_in}: leaves no utterance out of "
            "training: need at least one for the validation loss"
        )
    return {
        "validation_cross_entropy": cross_entropy / num_frames,
        "validation_frame_accuracy": num_correct / num_frames,
    }


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
        own = moved(minibatch, Tensor.clone)
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
