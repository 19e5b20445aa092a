"""Record a CPU's work as a CUDA graph would be captured: the same operations on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.fit.steps import WARM_UP_STEPS

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
