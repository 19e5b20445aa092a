"""Hold phone alignments, and convert them to the senone of every 10 ms frame."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt16

from pipeline.splicing import STACK
from training.decoding.lexicon import SILENCE_ID
from training.decoding.senones.senone_tree import SenoneTree

NO_WORDS = "no words: need a transcript to align"


@dataclass(frozen=True, slots=True)
class Unaligned:
    """Unaligned says why an utterance has no alignment, as its ledger row does."""

    detail: str
    reason: Literal["alignment_failed", "unknown_word"] = "alignment_failed"


@dataclass(frozen=True)
class TranscribedUtterance:
    """TranscribedUtterance has words, and log-mel energies at 100 Hz less the causal mean."""

    utterance_id: str
    speaker_id: str
    words: tuple[str, ...]
    features: Float32[np.ndarray, "frames bins"]


@dataclass(frozen=True)
class PhoneAlignment:
    """PhoneAlignment lists segments: phones (positions in Lexicon.phones), first 10 ms frames."""

    phones: Int32[np.ndarray, " segments"]
    starts: Int32[np.ndarray, " segments"]
    num_frames: int

    @property
    def durations(self) -> Int64[np.ndarray, " segments"]:
        """Return the number of frames in each segment."""
        return np.diff(self.starts, append=self.num_frames).astype(np.int64)

    @property
    def triphones(self) -> Int32[np.ndarray, "segments 3"]:
        """Return the left, centre and right phone of each segment; beyond the edges is silence."""
        # Triphones reach across words, and silence is a context as any phone is.
        padded = np.pad(self.phones, 1, constant_values=SILENCE_ID)
        return np.stack([padded[:-2], padded[1:-1], padded[2:]], axis=1)


def senone_alignment(alignment: PhoneAlignment, tree: SenoneTree) -> UInt16[np.ndarray, " frames"]:
    """Return the senone of every 10 ms frame: the tree's leaf for the frame's triphone."""
    left, centre, right = alignment.triphones.T
    return np.repeat(tree.table[left, centre, right], alignment.durations).astype(np.uint16)


def expand_to_frames(
    senones: Int64[np.ndarray, " low_rate_frames"], offset: int, num_frames: int
) -> UInt16[np.ndarray, " frames"]:
    """Repeat low-rate frames' senones for 10 ms frames; invert `alignment[offset + 1 :: 3]`.

    Frames before the offset take the first senone, frames after the last stack the last one.
    """
    # At 100 Hz the labels serve all three offsets, which training rotates.
    low_rate_frames = (np.arange(num_frames) - offset) // STACK
    return senones[np.clip(low_rate_frames, 0, len(senones) - 1)].astype(np.uint16)
