"""Factories of teachers as a user might write them, good ones and bad ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.filterbank import NUM_INPUTS
from training.models.precision import set_float32_products
from training.targets.own_teacher import hears

Label = Callable[[list[Tensor]], Any]


def weights(num_values: int, num_senones: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_values, num_senones, generator=generator) / num_values**0.5


def spliced(device: torch.device, num_senones: int, seed: int = 0, scale: float = 1.0) -> Label:
    """A linear model of the features."""
    matrix = scale * weights(NUM_INPUTS, num_senones, seed).to(device)
    return lambda utterances: [each @ matrix for each in utterances]


def in_bfloat16(device: torch.device, num_senones: int) -> Label:
    """The same in half precision."""
    good = spliced(device, num_senones)
    return lambda utterances: [each.bfloat16() for each in good(utterances)]


def in_tf32(device: torch.device, num_senones: int) -> Label:
    """The same with TF32, which it asks for itself."""
    set_float32_products("tf32")
    return spliced(device, num_senones)


@hears("audio")
def listening(device: torch.device, num_senones: int, seed: int = 0) -> Label:
    """A linear model of the 480 samples of each frame."""
    matrix = weights(480, num_senones, seed).to(device)
    return lambda utterances: [100 * each.view(-1, 480) @ matrix for each in utterances]


@hears("audio")
class Listener:
    """The same as a class."""

    def __init__(self, device: torch.device, num_senones: int) -> None:
        self.label = listening(device, num_senones)

    def __call__(self, utterances: list[Tensor]) -> list[Tensor]:
        return self.label(utterances)


def _refuse(_: Tensor) -> Tensor:
    raise RuntimeError("no such utterance")


SPOILT: dict[int, Callable[[Tensor], Any]] = {
    11: lambda logits: logits[:-1],
    12: lambda logits: torch.cat([logits, logits], dim=1),
    13: lambda logits: logits.long(),
    14: lambda logits: logits.numpy(),
    15: lambda logits: logits * torch.nan,
    18: _refuse,
}
"""Return the failing teacher's answers for utterances of these lengths."""

LEFT_OUT = 17
"""The length of the utterances for which it answers nothing."""


def failing(device: torch.device, num_senones: int) -> Label:
    """Answer wrongly for utterances of some lengths; noise of 16 frames is not among them."""
    good = spliced(device, num_senones)

    def label(utterances: list[Tensor]) -> list[Any]:
        found = [each for each in good(utterances) if len(each) != LEFT_OUT]
        return [SPOILT.get(len(each), lambda logits: logits)(each) for each in found]

    return label


def always_wrong(device: torch.device, num_senones: int) -> Label:
    """Answers with the features of another senone set, whatever it hears."""
    return spliced(device, num_senones + 1)


def broken(device: torch.device, num_senones: int, path: str) -> Label:  # noqa: ARG001
    raise FileNotFoundError(path)


def no_function(device: torch.device, num_senones: int) -> Any:
    return {"device": device, "num_senones": num_senones}


def without_senones(device: torch.device) -> Label:  # noqa: ARG001
    raise AssertionError("its signature is refused before")


def hard_of_hearing(device: torch.device, num_senones: int) -> Label:  # noqa: ARG001
    raise AssertionError("its declaration is refused before")


hard_of_hearing.hears = "lips"  # type: ignore[attr-defined]

not_callable = 3
