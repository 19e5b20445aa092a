"""Log-mel energies of 25 ms windows every 10 ms, by two engines; rows stack three (003 II-B)."""

from typing import Literal

Engine = Literal["fast", "kaldi"]
"""`kaldi` is kaldi-native-fbank, the reference; `fast` is the same to 1e-4 and 20 times as fast."""

SAMPLE_RATE_HZ = 16_000
FRAME_SHIFT_MS = 10
WINDOW_MS = 25
NUM_BINS = 64

STACK = 3
"""Frames side by side in a row, and the frames from one row to the next."""

NUM_INPUTS = STACK * NUM_BINS

SHIFT_SAMPLES = SAMPLE_RATE_HZ * FRAME_SHIFT_MS // 1000
WINDOW_SAMPLES = SAMPLE_RATE_HZ * WINDOW_MS // 1000
