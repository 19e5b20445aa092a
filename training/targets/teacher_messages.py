"""Encode what tasks and teachers' servers send: raw little-endian arrays, never pickles.

A server selects each frame's k best logits on its device (003 V-C), as `pipeline.kbest` does on a
host: one core selects 30,000 frames of 3,183 senones a second, which keeps no GPU busy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float16, Float32, Int64
from torch import Tensor

from pipeline.kbest import MAX_SENONES, KBest, select_kbest
from pipeline.splicing import NUM_INPUTS
from pipeline.steps.targets import TeacherInput

_SENONE_BITS = 16
_ROWS = 16_384
"""Frames that are selected from at a time: their keys are 0.4 GB at 3,183 senones."""

_LOWEST = float(np.finfo(np.float16).min)


@dataclass(frozen=True, slots=True, eq=False)
class SelectedBatch:
    """SelectedBatch: the k best of a batch's utterances, in one piece, still on the device."""

    senones: Int64[Tensor, "frames k"]
    logits: Float16[Tensor, "frames k"]
    log_z: Float16[Tensor, " frames"]
    is_finite: Bool[Tensor, " frames"]
    lengths: tuple[int, ...]

    def on_host(self) -> Iterator[KBest | ValueError]:
        """Wait for the device; yield each utterance's targets, or that its logits diverged."""
        columns = [each.cpu().numpy() for each in (self.senones, self.logits, self.log_z)]
        finite = self.is_finite.cpu().numpy()
        first = 0
        for length in self.lengths:
            part = slice(first, first := first + length)
            if finite[part].all():
                senones, logits, log_z = (each[part] for each in columns)
                yield KBest(senones.astype(np.uint16), logits, log_z)
            else:
                yield ValueError("logits hold NaN or infinity: the teacher has diverged")


def select_on_device(
    utterances: Sequence[Float32[Tensor, "_frames senones"]], k: int
) -> SelectedBatch:
    """Select k of each frame's senones, best first, ties by lower senone, and log Z of all.

    A GPU may still be at it when this returns. ValueError if k, or the number of senones, is out
    of range.
    """
    lengths = tuple(len(each) for each in utterances)
    num_senones = utterances[0].shape[1]
    if not 1 <= k <= num_senones <= MAX_SENONES:
        raise ValueError(f"k = {k} of {num_senones} senones: need 1 <= k <= senones <= 65536")
    parts = [_select(rows, k) for rows in torch.split(torch.cat(list(utterances)), _ROWS)]
    senones, logits, log_z, is_finite = map(torch.cat, zip(*parts, strict=True))
    return SelectedBatch(senones, logits, log_z, is_finite, lengths)


def _select(
    logits: Float32[Tensor, "frames senones"], k: int
) -> tuple[
    Int64[Tensor, "frames k"],
    Float16[Tensor, "frames k"],
    Float16[Tensor, " frames"],
    Bool[Tensor, " frames"],
]:
    best = MAX_SENONES - 1 - (_keys(logits).topk(k).values & (MAX_SENONES - 1))
    kept = logits.gather(1, best)
    largest = kept[:, :1]
    log_z = (logits - largest).exp_().sum(dim=1).log_().half()
    relative = (kept - largest).clamp_(min=_LOWEST).half()
    return best, relative, log_z, logits.isfinite().all(dim=1)


def _keys(logits: Float32[Tensor, "frames senones"]) -> Int64[Tensor, "frames senones"]:
    """Return keys that rise with the logits, and among equal ones fall with the senone.

    Without a tie of keys there is one order, whatever the device's selection does.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    senones = torch.arange(logits.shape[1], device=logits.device)
    return (rising.long() << _SENONE_BITS) | (MAX_SENONES - 1 - senones)


SEED_BYTES = 8

Encode = Callable[
    [list[Float32[Tensor, "_frames senones"]], Sequence[int]],
    Callable[[], Iterator[bytes | Exception]],
]
"""A batch's logits on the device, and the seeds of the tails' draws, to its answers."""


def kbest_encoder(device: torch.device, k: str, tail_samples: str) -> Encode:
    """Return the function that selects and encodes the k best, of a server's arguments.

    A GPU selects where the logits are, unless a tail is drawn.
    """
    columns = int(k), int(tail_samples)
    if device.type == "cuda" and not columns[1]:
        return kbest_on_device(columns[0])
    return on_host(lambda logits, seed: encode_targets(select_kbest(logits, *columns, seed)))


def kbest_on_device(k: int) -> Encode:
    """Return the function that selects the k best on the device, and copies these alone."""

    def begin(
        logits: list[Float32[Tensor, "_frames senones"]],
        seeds: Sequence[int],  # noqa: ARG001 - nothing is drawn
    ) -> Callable[[], Iterator[bytes | Exception]]:
        selected = select_on_device(logits, k)
        return lambda: (
            encode_targets(each) if isinstance(each, KBest) else each for each in selected.on_host()
        )

    return begin


def on_host(encode: Callable[[Float32[np.ndarray, "_frames senones"], int], bytes]) -> Encode:
    """Return the function that copies each utterance's logits, and encodes them with its seed."""

    def begin(
        logits: list[Float32[Tensor, "_frames senones"]], seeds: Sequence[int]
    ) -> Callable[[], Iterator[bytes | Exception]]:
        def answers() -> Iterator[bytes | Exception]:
            for each, seed in zip(logits, seeds, strict=True):
                try:
                    yield encode(each.cpu().numpy(), seed)
                except ValueError as error:
                    yield error

        return answers

    return begin


def encode_input(given: TeacherInput) -> bytes:
    """Encode the seed, then the frames."""
    return given.seed.to_bytes(SEED_BYTES, "little") + given.frames.astype("<f4").tobytes()


def decode_seed(payload: bytes | memoryview) -> int:
    """Return the seed that `encode_input` wrote."""
    return int.from_bytes(payload[:SEED_BYTES], "little")


def decode_frames(
    payload: bytes | memoryview, num_values: int = NUM_INPUTS
) -> Float32[np.ndarray, "frames values"]:
    """View the frames that `encode_input` wrote, of so many values each."""
    return np.frombuffer(payload, "<f4", offset=SEED_BYTES).reshape(-1, num_values)


def encode_targets(targets: KBest) -> bytes:
    """Encode senones, logits and log Z."""
    columns = targets.senones.astype("<u2"), targets.logits.astype("<f2")
    return b"".join([*(column.tobytes() for column in columns), targets.log_z.tobytes()])


def decode_targets(payload: bytes, k: int, tail_samples: int = 0) -> KBest:
    """Invert `encode_targets`; the last `tail_samples` of the k columns were drawn."""
    num_frames = len(payload) // (4 * k + 2)
    count = num_frames * k
    return KBest(
        np.frombuffer(payload, "<u2", count).reshape(num_frames, k),
        np.frombuffer(payload, "<f2", count, 2 * count).reshape(num_frames, k),
        np.frombuffer(payload, "<f2", num_frames, 4 * count),
        tail_samples=tail_samples,
    )


def encode_logits(logits: Float32[np.ndarray, "frames senones"], seed: int = 0) -> bytes:  # noqa: ARG001
    """Encode the number of senones, then the logits; ValueError if not all are finite."""
    if not np.isfinite(logits).all():
        raise ValueError("logits hold NaN or infinity: the teacher has diverged")
    return np.uint32(logits.shape[1]).tobytes() + logits.astype("<f4").tobytes()


def decode_logits(payload: bytes) -> Float32[np.ndarray, "frames senones"]:
    """Invert `encode_logits`; the array is a read-only view."""
    (num_senones,) = np.frombuffer(payload, "<u4", 1)
    return np.frombuffer(payload, "<f4", offset=4).reshape(-1, int(num_senones))
