"""The hierarchical shuffle: of files, and of utterances within a file (003 IV-A2, IV-B2)."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Int64

T = TypeVar("T")


def shuffled_order(n: int, seed: int, *key: str | int) -> Int64[np.ndarray, " n"]:
    """Permute 0..n-1 at random; `seed` and `key` alone decide, on every machine and version."""
    name = "\0".join([repr(seed), *map(repr, key)]).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    # NumPy promises the bits of its generators for ever, those of `permutation` it does not.
    draws = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


def shuffle(files: Sequence[T], seed: int) -> list[T]:
    """Put files into a seeded random order: the outer level of the hierarchical shuffle (IV-A2)."""
    return [files[index] for index in shuffled_order(len(files), seed, "files")]
