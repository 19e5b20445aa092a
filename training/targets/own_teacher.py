"""Teachers of a user's own: functions that the recipe names make them, "module:function".

A teacher maps what it hears, spliced features or audio, to logits over the student's outputs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Float32
from torch import Tensor

from infra.settings import ConfigurationError, read_record
from pipeline.filterbank import NUM_INPUTS
from pipeline.steps.targets import SAMPLES_PER_FRAME
from training.entry_point import EntryPoint
from training.models.precision import set_float32_products
from training.settings.decoding import OwnTeacherConfig
from training.targets.teacher import (
    Encode,
    TeacherFunction,
    encode_logits,
    kbest_encoder,
    on_host,
    torch_device,
)

F = TypeVar("F", bound=Callable[..., Any])

Heard = Literal["features", "audio"]
"""An input of a teacher: spliced features (frames, 192), or samples at 16 kHz."""

_HEARD = "hears"


def hears(heard: Heard) -> Callable[[F], F]:
    """Declare what the teachers of a factory hear; without a declaration it is features."""

    def declare(factory: F) -> F:
        setattr(factory, _HEARD, heard)
        return factory

    return declare


def check_untrained(config: OwnTeacherConfig) -> Heard:
    """Import all factories and compare their settings; return what their teachers hear.

    ConfigurationError if one cannot be imported, does not take its settings, or hears other input.
    """
    declared: dict[str, str] = {}
    for member in config.members:
        entry_point = member.entry_point
        factory = entry_point.imported()
        entry_point.arguments(factory)
        heard = getattr(factory, _HEARD, "features")
        if heard not in get_args(Heard):
            need = " or ".join(map(repr, get_args(Heard)))
            raise entry_point.error(f"hears {heard!r}: need {need}")
        declared.setdefault(heard, member.factory)
    if len(declared) > 1:
        found = " and ".join(f"{name!r} {heard}" for heard, name in declared.items())
        raise ConfigurationError(f"{found}: need one input for all teachers of an ensemble")
    return "audio" if "audio" in declared else "features"


@dataclass(frozen=True, slots=True, eq=False)
class OwnMember:
    """OwnMember calls one teacher, and refuses answers that are not its utterances' logits."""

    entry_point: EntryPoint
    label: Callable[[list[Tensor]], Any]
    heard: Heard
    device: torch.device
    num_senones: int

    @torch.inference_mode()
    def __call__(
        self, utterances: list[Float32[Tensor, "_frames _values"]]
    ) -> list[Float32[Tensor, "_frames senones"]]:
        """Return the utterances' logits; ConfigurationError if a number or a shape is wrong."""
        is_audio = self.heard == "audio"
        answers = self.label([each.flatten() if is_audio else each for each in utterances])
        if not isinstance(answers, list | tuple) or len(answers) != len(utterances):
            found = f"{len(answers)} answers" if isinstance(answers, list | tuple) else "no list"
            raise self.entry_point.error(f"{found}: need {len(utterances)}, one an utterance")
        pairs = zip(answers, utterances, strict=True)
        return [self._logits(answer, len(utterance)) for answer, utterance in pairs]

    def _logits(self, answer: object, num_frames: int) -> Float32[Tensor, "_frames senones"]:
        need = num_frames, self.num_senones
        if not isinstance(answer, Tensor) or not answer.is_floating_point():
            kind = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            raise self.entry_point.error(f"logits of type {kind}: need a tensor of floats {need}")
        if tuple(answer.shape) != need:
            raise self.entry_point.error(
                f"logits of shape {tuple(answer.shape)}: need {need}, the utterance's low-rate "
                "frames and the senones of the run"
            )
        return answer.to(self.device, torch.float32)


def serve_own_teacher(
    device: str, teacher: str, num_senones: str, k: str, tail_samples: str = "0"
) -> TeacherFunction:
    """Make the teachers of a recipe's settings, as JSON; answers are k best.

    A device pool's servers call this once each.
    """
    place = torch_device(device)
    return _serve(place, teacher, num_senones, kbest_encoder(place, k, tail_samples))


def serve_own_logits(device: str, teacher: str, num_senones: str) -> TeacherFunction:
    """Make the teachers of a recipe's settings, as JSON; answers are all logits."""
    return _serve(torch_device(device), teacher, num_senones, on_host(encode_logits))


def _serve(place: torch.device, teacher: str, num_senones: str, encode: Encode) -> TeacherFunction:
    config = read_record(OwnTeacherConfig, json.loads(teacher), "targets.teacher")
    heard, members = load_own_members(config, place, int(num_senones))
    num_values = SAMPLES_PER_FRAME if heard == "audio" else NUM_INPUTS
    return TeacherFunction(members, place, encode, num_values)


def load_own_members(
    config: OwnTeacherConfig, device: torch.device, num_senones: int
) -> tuple[Heard, list[OwnMember]]:
    """Make all teachers of the recipe on a device; return what they hear, too."""
    heard = check_untrained(config)
    # Whatever the run's own teachers compute in: a factory may choose another precision.
    set_float32_products("float32")
    members = []
    for entry_point in (each.entry_point for each in config.members):
        label = entry_point.call(device=device, num_senones=num_senones)
        if not callable(label):
            found = type(label).__name__
            raise entry_point.error(f"returns a {found}: need a function of utterances")
        members.append(OwnMember(entry_point, label, heard, device, num_senones))
    return heard, members
