"""Draw utterances uniformly to an hours budget, by a keyed hash of their ids (003 IV-B1)."""

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int64, UInt64

NUM_PRIORITIES = 2**64


def sampling_priority(seed: int, utterance_id: str) -> int:
    """Hash an utterance to 64 bits: a uniform draw that no order or partition can change."""
    key = seed.to_bytes(8, "little")
    # A sampled RDD depends on its partitions (003 IV-B1); a keyed hash depends on the id alone.
    # The id of a malformed record may hold half a surrogate pair.
    name = utterance_id.encode(errors="surrogatepass")
    digest = hashlib.blake2b(name, digest_size=8, key=key)
    return int.from_bytes(digest.digest(), "little")


def hash_name(name: str) -> int:
    """Hash an utterance id or another name to 64 bits, the same in every run."""
    return sampling_priority(0, name)


def hash_names(names: Iterable[str]) -> UInt64[np.ndarray, " _names"]:
    """Hash each name to 64 bits: a billion are 8 GB."""
    return np.fromiter(map(hash_name, names), np.uint64)


def last_priority(
    priorities: UInt64[np.ndarray, " utterances"],
    durations_ms: Int64[np.ndarray, " utterances"],
    budget_ms: int,
) -> int:
    """Find the priority that meets the budget, taking utterances by rising priority.

    All utterances up to and including it exceed the budget by less than the last of them.
    """
    total_ms = int(durations_ms.sum())
    if not 0 < budget_ms <= total_ms:
        raise ValueError(f"budget = {budget_ms} ms: need 1..{total_ms}, the eligible milliseconds")
    # The lowest priorities meet the budget exactly, so no oversampling is needed (003 IV-B1).
    order = np.argsort(priorities)
    totals_ms = np.cumsum(durations_ms[order])
    return int(priorities[order[np.searchsorted(totals_ms, budget_ms)]])


def within_speaker_cap(
    speakers: UInt64[np.ndarray, " utterances"],
    priorities: UInt64[np.ndarray, " utterances"],
    durations_ms: Int64[np.ndarray, " utterances"],
    cap_ms: int,
) -> Bool[np.ndarray, " utterances"]:
    """Keep of each speaker the lowest priorities, as long as they last at most `cap_ms` together.

    0 keeps all. Whether an utterance is kept depends on its speaker's lower priorities alone.
    """
    if cap_ms == 0:
        return np.ones(len(speakers), dtype=np.bool_)
    order = np.lexsort((priorities, speakers))
    totals_ms = np.cumsum(durations_ms[order])
    _, firsts, counts = np.unique(speakers[order], return_index=True, return_counts=True)
    before_ms = np.repeat(totals_ms[firsts] - durations_ms[order][firsts], counts)
    kept = np.empty(len(speakers), dtype=np.bool_)
    kept[order] = totals_ms - before_ms <= cap_ms
    return kept
