"""The messages between tasks and teachers' servers: raw little-endian arrays, never pickles."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from pipeline.kbest import KBest, select_kbest
from pipeline.splicing import NUM_INPUTS
from pipeline.steps.targets import TeacherInput
from training.models.kbest_selection import select_on_device

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
