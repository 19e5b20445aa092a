"""Count where the host would wait for a device, on a CPU whose tensors pass for a device's."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from tests.training.algorithms.gtc.interpreted import cuda_encoding
from training.trainers import gtc
from training.trainers.gtc import FixedMessages

READS = {
    "torch.Tensor.item",
    "torch.Tensor.tolist",
    "torch.Tensor.numpy",
    "torch.Tensor.cpu",
    "torch.Tensor.__array__",
    "torch.Tensor.__bool__",
    "torch.Tensor.__float__",
    "torch.Tensor.__int__",
    "torch.Tensor.__index__",
    "torch.Tensor.nonzero",  # its length must be known
    "torch.nonzero",
    "torch.equal",
}


class HostReads(TorchFunctionMode):
    """HostReads lists, in `found`, the reads of what lies on the device.

    All tensors do, except those in `on_host`, by id: the ones that are made from no other tensor
    without a `torch.device`, or from such ones alone. A copy to the host that does not wait is
    none.
    """

    def __init__(self, on_host: dict[int, Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._on_host = on_host
        self._is_watching = True

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_of_host = all(id(each) in self._on_host for each in given)
        name = resolve_name(func) or ""
        if not is_of_host and (name in READS or self._is_waiting_copy(name, args, kwargs)):
            self.found.append(f"{name} at {''.join(traceback.format_stack(limit=3)[:1])}")
        result = func(*args, **kwargs)
        if is_of_host and not isinstance(kwargs.get("device"), torch.device):
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self._on_host.update({id(each): each for each in made})
        return result

    def _is_waiting_copy(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "torch.Tensor.to":
            return "cpu" in [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
        is_to_host = name == "torch.Tensor.copy_" and id(args[0]) in self._on_host
        return is_to_host and not kwargs.get("non_blocking")

    @contextmanager
    def not_watching(self) -> Iterator[None]:
        """Let everything be read, within."""
        before, self._is_watching = self._is_watching, False
        try:
            yield
        finally:
            self._is_watching = before


def look_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers and loop look at a CPU's results as late as at a GPU's."""
    for module in ("distributed.collectives", "distributed.checks", "fit.steps"):
        monkeypatch.setattr(f"training.{module}.is_read_at_once", lambda _: False)


def send_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, reads_of_this_rank: Callable[[], HostReads]
) -> None:
    """Let GTC send messages of a fixed length; what interprets the kernels may read."""
    monkeypatch.setattr(gtc, "ExactMessages", FixedMessages)

    def unwatched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            with reads_of_this_rank().not_watching():
                return kernel(*args)

        return launch

    for name in ("take_message", "add_messages"):
        monkeypatch.setattr(cuda_encoding, name, unwatched(getattr(cuda_encoding, name)))
