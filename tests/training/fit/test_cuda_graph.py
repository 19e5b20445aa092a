"""Steps by a recorded graph, on a CPU, are those without one; weights keep their memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.splicing import NUM_INPUTS
from tests.training.fit.host_reads import look_late
from tests.training.fit.small_fits import copy_stopped, fit, small_fit, write_run
from tests.training.training_settings import training_settings
from training.data.minibatch import Minibatch, Targets
from training.data.targets import GhostTargets, HardTargets, SoftTargets
from training.distributed.simulated_group import simulate_ranks
from training.fit import steps, train_model
from training.fit.steps import (
    WARM_UP_STEPS,
    GradientGraphs,
    GradientNorms,
    RunningTotals,
    compute_gradients,
    take_steps,
)
from training.fit.training_loop import Fitting
from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig
from training.settings.values import Precision

REFUSED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Operations that need a number on the host, for which a capture cannot wait."""


class Recording(TorchDispatchMode):
    """Recording lists operations, with their tensors, and does them again without any Python.

    Memory at the addresses in `on_host`, and what is made from it alone, may be read.
    """

    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.num_replays = 0
        self._on_host = on_host

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        is_of_host = bool(given) and all(each.data_ptr() in self._on_host for each in given)
        if func in REFUSED and not is_of_host:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, _tensors(result)))
        if is_of_host:
            self._on_host.update(each.data_ptr() for each in _tensors(result))
        return result

    def replay(self) -> None:
        """Compute again what was recorded, and write it where it was written then."""
        self.num_replays += 1
        # oneDNN's LSTM keeps what its gradient needs only where gradients are enabled.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, places in self.operations:
                for place, values in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                    # A view, and an operation in place, return the memory itself.
                    if place.data_ptr() != values.data_ptr():
                        place.copy_(values)


def _tensors(result: object) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


class Recorder:
    """Recorder replaces `training.fit.steps.capture` on a CPU, and keeps the recordings."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.on_host: set[int] = set()

    def capture(self, work: Callable[[], object], device: torch.device) -> Callable[[], object]:
        """Do `work` as often as on a GPU, and record it."""
        assert device.type == "cpu"
        for _ in range(WARM_UP_STEPS):
            work()
        with Recording(self.on_host) as recording:
            work()
        self.recordings.append(recording)
        return recording.replay


pytestmark = pytest.mark.chaos

NUM_SENONES, NUM_CHUNKS, FRAMES = 7, 3, 5
CONFIG = training_settings(minibatch_frames=NUM_CHUNKS * FRAMES, max_gradient_norm=0.01)
SHAPES = [(3, 5), (3, 5), (2, 5), (3, 5), (3, 4), (3, 5)]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    look_late(monkeypatch)
    recorder = Recorder()
    monkeypatch.setattr(steps, "capture", recorder.capture)
    return recorder


def model(dropout: float = 0.0) -> AcousticModel:
    torch.manual_seed(1)
    return LstmModel(LstmConfig(2, 6, False, 1, dropout), NUM_SENONES)


def minibatch(
    number: int, shape: tuple[int, int], soft: bool, kind: type[SoftTargets] = SoftTargets
) -> Minibatch:
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(*shape, NUM_SENONES, generator=generator)
    best = logits.topk(3)
    targets: Targets = HardTargets(logits.argmax(-1))
    if soft:
        targets = kind(best.indices, 0.9 * best.values.softmax(-1))
    lengths = torch.full((shape[0],), shape[1])
    lengths[0] -= number % 2
    return Minibatch(torch.randn(*shape, NUM_INPUTS, generator=generator), lengths, targets)


def trained(
    minibatches: list[Minibatch], has_graphs: bool, precision: Precision
) -> tuple[list[tuple[int, float, float]], list[Tensor]]:
    """Each step's totals, read after the last step, and the weights."""
    trainee, config = model(), replace(CONFIG, precision=precision)
    compute = partial(compute_gradients, trainee, config)
    if has_graphs:
        compute = GradientGraphs(trainee, compute, (NUM_CHUNKS, FRAMES))
    optimizer = torch.optim.SGD(trainee.parameters(), lr=0.5, momentum=0.9)
    norms = GradientNorms(0, 0)
    steps = take_steps(
        trainee, optimizer, iter(minibatches), len(minibatches) + 1, config, norms, compute
    )
    # Read last, so that no later step may change them.
    totals = [
        (each.num_frames, float(each.cross_entropy), float(each.num_correct))
        for each in list(steps)
    ]
    return totals, [parameter.detach() for parameter in trainee.parameters()]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [SoftTargets, GhostTargets])
def test_steps_by_graphs_are_those_without(
    recorder: Recorder, precision: Precision, kind: type[SoftTargets]
) -> None:
    """Bitwise, with minibatches of other shapes between, both kinds of target, an empty step."""
    minibatches = [
        minibatch(n, shape, soft=n % 4 == 3, kind=kind) for n, shape in enumerate(2 * SHAPES)
    ]
    recorder.on_host.update(each.lengths.data_ptr() for each in minibatches)
    expected, weights = trained(minibatches, False, precision)
    found, found_weights = trained(minibatches, True, precision)
    assert found == expected
    assert all(map(torch.equal, found_weights, weights))
    assert len(set(expected)) == len(minibatches) + 1
    # One graph for each kind of target.
    assert [each.num_replays for each in recorder.recordings] == [5, 3]


def test_a_step_that_waits_for_the_device_is_not_captured(recorder: Recorder) -> None:
    """As on a GPU: what would be read once and for all ends training instead."""
    trainee = model()

    def compute(each: Minibatch) -> tuple[RunningTotals, Tensor]:
        totals, norm = compute_gradients(trainee, CONFIG, each)
        return totals, norm / float(norm)

    given = minibatch(0, (NUM_CHUNKS, FRAMES), soft=False)
    recorder.on_host.add(given.lengths.data_ptr())
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        GradientGraphs(trainee, compute, (NUM_CHUNKS, FRAMES))(given)


class FlatFitting(Fitting):
    """FlatFitting lays an LSTM's weights out in one piece, as cuDNN wants them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        weights = self.model.lstm._flat_weights
        flat = torch.cat([each.detach().reshape(-1) for each in weights])
        places = flat.split([each.numel() for each in weights])
        for weight, place in zip(weights, places, strict=True):
            weight.data = place.view(weight.shape)

    def run(self) -> list[dict[str, Any]]:
        """Train, and look where the weights then are."""
        before = [each.data_ptr() for each in self.model.parameters()]
        curve = super().run()
        assert [each.data_ptr() for each in self.model.parameters()] == before
        assert [each.data_ptr() for each in self.model.lstm._flat_weights] == before[:-2]
        return curve


@pytest.mark.parametrize("name", ["synchronous", "htm"])
def test_weights_keep_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From first to last step, and on resuming: graphs read there, and cuDNN need not copy."""
    monkeypatch.setattr(train_model, "Fitting", FlatFitting)
    write_run(tmp_path / "run")
    what = small_fit(name, group_size=2, checkpoints=CheckpointConfig(steps=3, num_kept=100))
    simulate_ranks(4, fit, tmp_path / "run", what)
    copy_stopped(tmp_path / "run", what, 3, tmp_path / "stopped")
    simulate_ranks(4, fit, tmp_path / "stopped", what)
