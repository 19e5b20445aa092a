"""The teachers behind a device's server: spliced utterances in, k best logits out (003 IV-B3).

Messages are counts and raw little-endian arrays: nothing is unpickled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32

from infra.devices.device_pool import DevicePool
from infra.store.object_store import ObjectStore, join_uri
from pipeline.kbest import KBest, select_kbest
from pipeline.runs.names import MODELS_FOLDER, TEACHER
from pipeline.splicing import NUM_INPUTS
from training.models.ensemble import ensemble_logits
from training.models.registry import read_form
from training.models.store import load_model


@dataclass(frozen=True, slots=True)
class PooledTeacher:
    """PooledTeacher answers the targets step: each request is sent to the least busy device."""

    pool: DevicePool
    k: int
    tail_samples: int = 0

    def __call__(
        self, utterances: list[Float32[np.ndarray, "_frames 192"]], seeds: list[int]
    ) -> list[KBest]:
        """Return the k best logits of each utterance's frames."""
        answer = self.pool.request(encode_utterances(utterances, seeds))
        return decode_targets(answer, self.k, self.tail_samples)


def load_teacher(
    device: str, run_uri: str, form: str, models: str
) -> Callable[
    [list[Float32[np.ndarray, "_frames 192"]]], list[Float32[np.ndarray, "_frames senones"]]
]:
    """Load a run's teacher onto `device`, and return the function from utterances to its logits.

    Several `models`, between commas, are an ensemble: the answers are log of its mean posteriors.
    `form` is the recipe's settings of them as JSON.
    """
    torch.set_num_threads(1)  # one server a device: on CPUs, a device is a core
    store = ObjectStore((join_uri(run_uri, MODELS_FOLDER),))
    place = torch.device(device.partition("#")[0])  # cpu#0 and cpu#1 are two cores
    trained = [load_model(store, run_uri, name, read_form(form)) for name in models.split(",")]
    members = [each.to(place).model for each in trained]

    def score(
        utterances: list[Float32[np.ndarray, "_frames 192"]],
    ) -> list[Float32[np.ndarray, "_frames senones"]]:
        given = [torch.from_numpy(frames).to(place) for frames in utterances]
        return [rows.cpu().numpy() for rows in ensemble_logits(members, given)]

    return score


def serve_teacher(
    device: str, run_uri: str, k: str, form: str, models: str = TEACHER, tail_samples: str = "0"
) -> Callable[[bytes], bytes]:
    """Load a run's teacher onto `device`; a device pool's servers call this once each."""
    teacher = load_teacher(device, run_uri, form, models)

    def label(payload: bytes) -> bytes:
        pairs = zip(teacher(decode_utterances(payload)), decode_seeds(payload), strict=True)
        columns = int(k), int(tail_samples)
        return encode_targets([select_kbest(rows, *columns, seed) for rows, seed in pairs])

    return label


def encode_utterances(
    utterances: Sequence[Float32[np.ndarray, "_frames 192"]], seeds: Sequence[int]
) -> bytes:
    """Encode the number of utterances, their frame counts, their seeds, their frames."""
    counts = np.array([len(utterances), *map(len, utterances)], "<u4")
    each = (frames.astype("<f4").tobytes() for frames in utterances)
    return b"".join([counts.tobytes(), np.array(seeds, "<u8").tobytes(), *each])


def decode_utterances(payload: bytes) -> list[Float32[np.ndarray, "_frames 192"]]:
    """Invert `encode_utterances`."""
    (number,) = np.frombuffer(payload, "<u4", 1)
    counts = np.frombuffer(payload, "<u4", number, 4)
    frames = np.frombuffer(payload, "<f4", offset=4 + 12 * int(number)).reshape(-1, NUM_INPUTS)
    return [part.copy() for part in np.split(frames, np.cumsum(counts)[:-1])]


def decode_seeds(payload: bytes) -> list[int]:
    """Read the seeds of the utterances that `encode_utterances` encoded."""
    (number,) = np.frombuffer(payload, "<u4", 1)
    seeds: list[int] = np.frombuffer(payload, "<u8", number, 4 + 4 * int(number)).tolist()
    return seeds


def encode_targets(targets: Sequence[KBest]) -> bytes:
    """Encode each utterance's frame count, then senones, logits and log Z of all."""
    counts = np.array([len(targets), *(len(target.log_z) for target in targets)], "<u4")
    columns = (
        np.concatenate([target.senones for target in targets]).astype("<u2"),
        np.concatenate([target.logits for target in targets]).astype("<f2"),
        np.concatenate([target.log_z for target in targets]).astype("<f2"),
    )
    return b"".join([counts.tobytes(), *(column.tobytes() for column in columns)])


def decode_targets(payload: bytes, k: int, tail_samples: int = 0) -> list[KBest]:
    """Invert `encode_targets`; the last `tail_samples` of the k columns were drawn."""
    (number,) = np.frombuffer(payload, "<u4", 1)
    counts = np.frombuffer(payload, "<u4", number, 4)
    total, start = int(counts.sum()), 4 + 4 * int(number)
    senones = np.frombuffer(payload, "<u2", total * k, start).reshape(total, k)
    logits = np.frombuffer(payload, "<f2", total * k, start + 2 * total * k).reshape(total, k)
    log_z = np.frombuffer(payload, "<f2", total, start + 4 * total * k)
    edges = np.cumsum(counts)[:-1]
    parts = zip(*(np.split(column, edges) for column in (senones, logits, log_z)), strict=True)
    return [KBest(*part, tail_samples=tail_samples) for part in parts]
