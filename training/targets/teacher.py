"""Serve the run's teachers on a host's devices: utterances in, k best out (003 IV-B3).

An ensemble's posteriors are averaged over its members. Long utterances come in overlapping windows,
so that a device's memory bounds no utterance. Tasks and servers send raw little-endian arrays,
never pickles. A server selects each frame's k best logits on its device (003 V-C), as
`pipeline.kbest` does on a host: one core selects 30,000 frames of 3,183 senones a second, which
keeps no GPU busy.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float16, Float32, Float64, Int64
from torch import Tensor

from infra.devices.device_client import PoolAnswer, RequestFailure, RequestStream
from infra.devices.device_pool import DevicePool
from infra.devices.messages import PoolRequest
from infra.store.object_store import ObjectStore, join_uri
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import LOWEST, KBest, TeacherFailure, select_kbest
from pipeline.runs.increment import read_bases
from pipeline.runs.names import MODELS_FOLDER, STEP_RECORDS_FOLDER, TEACHER
from pipeline.settings import MAX_SENONES, TargetsConfig
from pipeline.steps.targets import TeacherInput
from training.models.precision import fastest_precision, set_float32_products
from training.models.store import load_model
from training.settings.decoding import WindowsConfig
from training.settings.models import read_form

_SENONE_BITS = 16
_ROWS = 16_384
"""Frames that are selected from at a time: their keys are 0.4 GB at 3,183 senones."""


def select_on_device(
    utterances: Sequence[Float32[Tensor, "_frames senones"]], k: int
) -> Iterator[KBest | ValueError]:
    """Select k of each frame's senones, best first, ties by lower senone, and log Z of all.

    A GPU may still be at it when this returns: the iterator waits for it, and yields each
    utterance's targets, or that its logits diverged. ValueError if k, or the number of senones, is
    out of range.
    """
    num_senones = utterances[0].shape[1]
    if not 1 <= k <= num_senones <= MAX_SENONES:
        raise ValueError(f"k = {k} of {num_senones} senones: need 1 <= k <= senones <= 65536")
    parts = [_select(rows, k) for rows in torch.split(torch.cat(list(utterances)), _ROWS)]
    columns = [torch.cat(each) for each in zip(*parts, strict=True)]
    return _on_host(columns, [len(each) for each in utterances])


def _on_host(columns: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[KBest | ValueError]:
    senones, logits, log_z, is_finite = (each.cpu().numpy() for each in columns)
    first = 0
    for length in lengths:
        part = slice(first, first := first + length)
        if is_finite[part].all():
            yield KBest(senones[part].astype(np.uint16), logits[part], log_z[part])
        else:
            yield ValueError("logits hold NaN or infinity: the teacher has diverged")


def _select(
    logits: Float32[Tensor, "frames senones"], k: int
) -> tuple[
    Int64[Tensor, "frames k"],
    Float16[Tensor, "frames k"],
    Float16[Tensor, " frames"],
    Bool[Tensor, " frames"],
]:
    # Keys rise with the logits, and among equal ones fall with the senone: without a tie there is
    # one order, whatever the device's selection does.
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    senones = torch.arange(logits.shape[1], device=logits.device)
    keys = (rising.long() << _SENONE_BITS) | (MAX_SENONES - 1 - senones)
    best = MAX_SENONES - 1 - (keys.topk(k).values & (MAX_SENONES - 1))
    kept = logits.gather(1, best)
    largest = kept[:, :1]
    log_z = (logits - largest).exp_().sum(dim=1).log_().half()
    relative = (kept - largest).clamp_(min=LOWEST).half()
    return best, relative, log_z, logits.isfinite().all(dim=1)


SEED_BYTES = 8

Answers: TypeAlias = Iterator[bytes | Exception]
"""Each utterance's answer, or its error; the first waits for the batch's logits."""

Encode = Callable[[list[Float32[Tensor, "_frames senones"]], Sequence[int]], Answers]
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

    def encode(
        logits: list[Float32[Tensor, "_frames senones"]],
        seeds: Sequence[int],  # noqa: ARG001 - nothing is drawn
    ) -> Answers:
        selected = select_on_device(logits, k)
        return (encode_targets(each) if isinstance(each, KBest) else each for each in selected)

    return encode


def on_host(encode: Callable[[Float32[np.ndarray, "_frames senones"], int], bytes]) -> Encode:
    """Return the function that copies each utterance's logits, and encodes them with its seed."""

    def encode_all(
        logits: list[Float32[Tensor, "_frames senones"]], seeds: Sequence[int]
    ) -> Answers:
        for each, seed in zip(logits, seeds, strict=True):
            try:
                yield encode(each.cpu().numpy(), seed)
            except ValueError as error:
                yield error

    return encode_all


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


@dataclass(frozen=True, slots=True)
class Window:
    """Window: the frames that the teacher hears, and those among them that it labels."""

    heard: range
    labelled: range

    @property
    def kept(self) -> slice:
        """Return the labelled frames by their places in the window."""
        first = self.labelled.start - self.heard.start
        return slice(first, first + len(self.labelled))


def windows(num_frames: int, config: WindowsConfig) -> Sequence[Window]:
    """Cut an utterance into the fewest windows of like length; one if it is short enough."""
    if num_frames <= config.window_frames:
        return [Window(range(num_frames), range(num_frames))]
    stride = config.window_frames - 2 * config.overlap_frames
    number = -(-num_frames // stride)
    edges = [num_frames * each // number for each in range(number + 1)]
    return [
        Window(
            range(
                max(0, first - config.overlap_frames), min(num_frames, last + config.overlap_frames)
            ),
            range(first, last),
        )
        for first, last in pairwise(edges)
    ]


Member: TypeAlias = Callable[
    [list[Float32[Tensor, "_frames _values"]]], list[Float32[Tensor, "_frames senones"]]
]
"""Utterances on a device to their logits, such as a model's `utterance_logits`."""


def log_mean_posteriors(
    members: Sequence[Float[Tensor, "frames senones"]],
) -> Float64[Tensor, "frames senones"]:
    """Return log of (1 / M) sum_m softmax(logits_m), frame by frame, from M members' logits."""
    total = torch.log_softmax(members[0].double(), dim=-1)
    for logits in members[1:]:
        # Sums of float64 differ by 1e-15 between orders of members.
        total = torch.logaddexp(total, torch.log_softmax(logits.double(), dim=-1))
    return total - math.log(len(members))


def relative_logits(
    log_posteriors: Float64[Tensor, "frames senones"],
) -> Float32[Tensor, "frames senones"]:
    """Subtract each frame's largest, so that float32 is fine where the probability is."""
    # The k best of float64 take a core 4 times as long, which one core does for a whole GPU.
    return (log_posteriors - log_posteriors.amax(dim=-1, keepdim=True)).float()


def ensemble_logits(
    members: Sequence[Member], utterances: list[Float32[Tensor, "_frames _values"]]
) -> list[Float32[Tensor, "_frames senones"]]:
    """Return the logits of one member, or log of the mean posteriors of several, by utterance.

    The members compute one after another; beside their weights, the float32 logits of all of them
    are in memory, and of one utterance at a time some float64 copies.
    """
    by_member = [label(utterances) for label in members]
    # Alone, a member's logits keep their bits.
    if len(members) == 1:
        return by_member[0]
    means = (log_mean_posteriors(each) for each in zip(*by_member, strict=True))
    return [relative_logits(mean) for mean in means]


T = TypeVar("T")

CHECK_FRAMES = 16
"""The frames of noise that a device must label to be in use."""


@dataclass(frozen=True, slots=True, eq=False)
class TeacherBatch:
    """TeacherBatch: utterances on the device, and the seeds of their tails' draws."""

    utterances: list[Float32[Tensor, "_frames _values"]]
    seeds: Sequence[int]


class TeacherFunction:
    """TeacherFunction computes a batch's logits on a device, and answers what `encode` makes.

    Several members are an ensemble: log of their mean posteriors. A frame that they hear has
    `num_values`: 192 features, or the samples of its audio.
    """

    def __init__(
        self,
        members: Sequence[Member],
        device: torch.device,
        encode: Encode,
        num_values: int = NUM_INPUTS,
    ) -> None:
        self._members = members
        self._device = device
        self._encode = encode
        self._num_values = num_values

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> TeacherBatch:
        """Copy the batch's frames to the device at once, from pinned memory to a GPU."""
        frames = [decode_frames(payload, self._num_values) for payload in payloads]
        num_frames, is_gpu = sum(map(len, frames)), self._device.type == "cuda"
        joined = torch.empty(num_frames, self._num_values, pin_memory=is_gpu)
        np.concatenate(frames, out=joined.numpy())
        on_device = joined.to(self._device, non_blocking=True)
        parts = torch.split(on_device, [len(each) for each in frames])
        return TeacherBatch(list(parts), [decode_seed(payload) for payload in payloads])

    def compute(self, prepared: TeacherBatch) -> Answers:
        """Compute the logits of all utterances as one padded batch; a GPU may still be at it."""
        logits = ensemble_logits(self._members, prepared.utterances)
        return self._encode(logits, prepared.seeds)

    def finish(self, computed: Answers) -> Sequence[bytes | Exception]:
        """Copy the answers back; an error concerns one utterance only."""
        return list(computed)

    def check(self) -> None:
        """Free cached memory, and label a moment of noise."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        # Below full scale, as audio is.
        generator = torch.Generator().manual_seed(0)
        noise = 2 * torch.rand(CHECK_FRAMES, self._num_values, generator=generator) - 1
        for logits in ensemble_logits(self._members, [noise.to(self._device)]):
            logits.cpu()


def load_members(device: torch.device, run_uri: str, form: str, models: str) -> Sequence[Member]:
    """Load `models` of a run, between commas, onto a device; `form` is their settings as JSON.

    A GPU computes in bfloat16 if it can.
    """
    records = join_uri(run_uri, STEP_RECORDS_FOLDER)
    # The teacher may be the one of the run's base.
    runs = (run_uri, *read_bases(ObjectStore((records,)), run_uri).runs)
    store = ObjectStore(tuple(join_uri(run, MODELS_FOLDER) for run in runs))
    trained = [load_model(store, run_uri, name, read_form(form)) for name in models.split(",")]
    loaded = [each.to(device).model for each in trained]
    precision = fastest_precision(device)
    # TF32 holds exactly the factors that bfloat16's products have.
    set_float32_products("tf32" if precision == "bfloat16" else "float32")
    return [partial(model.utterance_logits, precision=precision) for model in loaded]


def torch_device(device: str) -> torch.device:
    """Return torch's device of a pool's, whose computations take one thread: cpu#1 is a core."""
    torch.set_num_threads(1)
    return torch.device(device.partition("#")[0])


def serve_teacher(
    device: str, run_uri: str, k: str, form: str, models: str = TEACHER, tail_samples: str = "0"
) -> TeacherFunction:
    """Load a run's teacher; a device pool's servers call this once each. Answers are k best."""
    place = torch_device(device)
    encode = kbest_encoder(place, k, tail_samples)
    return TeacherFunction(load_members(place, run_uri, form, models), place, encode)


def serve_logits(device: str, run_uri: str, form: str, models: str) -> TeacherFunction:
    """Load a run's teacher, or an ensemble's `models`; answers are all logits."""
    place = torch_device(device)
    return TeacherFunction(
        load_members(place, run_uri, form, models), place, on_host(encode_logits)
    )


@dataclass(frozen=True, slots=True)
class PooledTeacher(Generic[T]):
    """PooledTeacher sends utterances to a host's devices, long ones in windows.

    The utterances alone decide which of them are computed together, so their answers are the same
    bits on any schedule. `decode` reads an answer, of which it keeps some rows, and `join` puts
    windows together.
    """

    pool: DevicePool
    windows: WindowsConfig
    decode: Callable[[bytes, slice], T]
    join: Callable[[Sequence[T]], T]

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[T | TeacherFailure]:
        """Yield what the device makes of each utterance, in order, or why it fails there."""
        sent: deque[Sequence[Window]] = deque()
        stream = RequestStream(self.pool, self.windows.window_frames)
        answers = stream.answers(self._requests(inputs, sent))
        for answer in answers:
            cut = sent.popleft()
            parts = [answer, *(next(answers) for _ in cut[1:])]
            yield self._joined(parts, cut)

    def _requests(
        self, inputs: Iterable[TeacherInput], sent: deque[Sequence[Window]]
    ) -> Iterator[PoolRequest]:
        for given in inputs:
            cut = windows(len(given.frames), self.windows)
            sent.append(cut)
            for each in cut:
                # Each window's draws are its own: those of one seed would be alike.
                frames = given.frames[each.heard.start : each.heard.stop]
                seed = (given.seed + each.labelled.start) % 2**64
                yield PoolRequest(len(frames), encode_input(TeacherInput(frames, seed)))

    def _joined(self, answers: Sequence[PoolAnswer], cut: Sequence[Window]) -> T | TeacherFailure:
        parts: list[T] = []
        for answer, window in zip(answers, cut, strict=True):
            if isinstance(answer, RequestFailure):
                return TeacherFailure(answer.reason)
            parts.append(self.decode(answer, window.kept))
        return parts[0] if len(parts) == 1 else self.join(parts)


def kept_targets(config: TargetsConfig, answer: bytes, kept: slice) -> KBest:
    """Read the rows of a window's targets that it labels."""
    return decode_targets(answer, config.k, config.tail_samples).rows(kept)


def kept_logits(answer: bytes, kept: slice) -> Float32[np.ndarray, "frames senones"]:
    """Read the rows of a window's logits that it labels."""
    return decode_logits(answer)[kept]
