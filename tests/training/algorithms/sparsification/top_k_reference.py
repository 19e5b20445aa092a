"""Compute what top-k messages send in NumPy, an element at a time."""

import math

import numpy as np
import torch

from training.algorithms.top_k_lengths import CHUNK_ELEMENTS
from training.settings.trainers import TopK


def bfloat16(value: np.floating) -> np.float32:
    return np.float32(float(torch.tensor(float(value)).bfloat16()))


def sent_of(vector: np.ndarray, top_k: TopK) -> np.ndarray:
    """Send a chunk at a time, an element at a time: Q(TopK(vector))."""
    sent = np.zeros_like(vector)
    for begin in range(0, len(vector), CHUNK_ELEMENTS):
        chunk = vector[begin : begin + CHUNK_ELEMENTS]
        order = np.argsort(-np.abs(chunk), kind="stable")
        kept = order[: math.ceil(top_k.density * len(chunk))]
        magnitudes = np.abs(chunk[kept])
        least, most = magnitudes.min(), magnitudes.max()
        width = (most - least) / np.float32(2 ** (top_k.bits - 1))
        low, high = bfloat16(least + width / 2), bfloat16(most - width / 2)
        step = (high - low) / np.float32(2 ** (top_k.bits - 1) - 1)
        for index, magnitude in zip(kept, magnitudes, strict=True):
            cell = int((magnitude - least) // width) if width > 0 else 0
            level = low + np.float32(min(cell, 2 ** (top_k.bits - 1) - 1)) * step
            sent[begin + index] = np.copysign(level, chunk[index])
    return sent
