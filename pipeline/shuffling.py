"""The hierarchical shuffle of files and of utterances within them (paper 003 IV-A2, IV-B2)."""

import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


def shuffled_order(n: int, seed: int, *key: str | int) -> Int64[np.ndarray, " n"]:
    """Permute 0..n-1 at random; `seed` and `key` alone decide, on every machine and version."""
    name = "\0".join([repr(seed), *map(repr, key)]).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    # NumPy promises the bits of its generators for ever, those of `permutation` it does not.
    draws = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(draws, kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True)
class Mixing:
    """How far minibatches are from uniform samples of all files."""

    effective_num_files: float
    design_effect: float


def mixing(
    files: Int64[np.ndarray, " samples"], batch_size: int, intra_file_correlation: float
) -> Mixing:
    """Certify a training order, given the file of each sample in it.

    With lambda the chance that two samples of a minibatch share a file: 1 / lambda effective
    files, and gradients with 1 + (batch_size - 1) * lambda * correlation times the variance.
    """
    num_batches = len(files) // batch_size
    if batch_size < 2 or num_batches < 1:
        raise ValueError(f"batch_size = {batch_size}: need 2..{len(files)}, the samples")
    batches = np.sort(files[: num_batches * batch_size].reshape(num_batches, batch_size), axis=1)
    shared_pairs = sum(_pairs_in_one_file(batch) for batch in batches)
    share = shared_pairs / (num_batches * batch_size * (batch_size - 1))
    effect = 1 + (batch_size - 1) * share * intra_file_correlation
    return Mixing(1 / share if share else float("inf"), effect)


def _pairs_in_one_file(batch: Int64[np.ndarray, " batch_size"]) -> int:
    counts = np.unique(batch, return_counts=True)[1]
    return int((counts * (counts - 1)).sum())
