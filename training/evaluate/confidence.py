"""Hold the confidence of decoded words against which of them are right.

Normalized cross-entropy is NIST's: how much a scorer who sees the confidences knows of which words
are right, in percent of what one lacks who knows only how many are. A calibration curve compares
the confidence of words with the share of them that is right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from training.evaluate.word_errors import DecodedUtterance

NUM_BINS = 10
"""Bins of equal width, from confidence 0 to 1."""

_NO_WORD = "\0"


@dataclass(frozen=True, slots=True)
class Bin:
    """Bin counts the words whose confidence is from `low` on, and below the next bin."""

    low: float
    num_words: int
    num_correct: int
    mean_confidence: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration: how many decoded words are right, and what their confidence says of it.

    `normalized_cross_entropy` is in percent, below 0 where the confidences mislead, and None where
    all words are right, or none is. `bins` without words are left out.
    """

    num_words: int
    num_correct: int
    mean_confidence: float
    normalized_cross_entropy: float | None
    bins: tuple[Bin, ...]

    @classmethod
    def of(
        cls, confidences: Float64[np.ndarray, " words"], are_correct: Bool[np.ndarray, " words"]
    ) -> "Calibration":
        """Hold one confidence or more, each above 0 and below 1, against the words' labels."""
        places = np.minimum(confidences * NUM_BINS, NUM_BINS - 1).astype(int)
        bins = [
            Bin(
                place / NUM_BINS,
                int(np.count_nonzero(places == place)),
                int(np.count_nonzero(are_correct[places == place])),
                float(confidences[places == place].mean()),
            )
            for place in np.unique(places).tolist()
        ]
        return cls(
            len(confidences),
            int(np.count_nonzero(are_correct)),
            float(confidences.mean()),
            normalized_cross_entropy(confidences, are_correct),
            tuple(bins),
        )


def normalized_cross_entropy(
    confidences: Float64[np.ndarray, " words"], are_correct: Bool[np.ndarray, " words"]
) -> float | None:
    """Return 100 (H - H(confidences)) / H, where H is that of the share of words that are right.

    None where H is 0.
    """
    share = float(are_correct.mean())
    if share in (0.0, 1.0):
        return None
    known = -float(np.log(np.where(are_correct, share, 1 - share)).sum())
    left = -float(np.log(np.where(are_correct, confidences, 1 - confidences)).sum())
    return 100 * (known - left) / known


def calibration(utterances: Iterable[DecodedUtterance]) -> Calibration | None:
    """Hold all words of a model's hypotheses against the transcripts; None without any word."""
    confidences, are_correct = [], []
    for each in utterances:
        confidences += [word.confidence for word in each.words]
        are_correct += correct_words(each.reference, [word.word for word in each.words])
    if not confidences:
        return None
    return Calibration.of(np.array(confidences), np.array(are_correct))


def correct_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """Return which words of a hypothesis are right, by an alignment of the least cost of sclite.

    Substitutions cost 4, insertions and deletions 3; of equal alignments sclite may take another.
    """
    import kaldialign  # noqa: PLC0415 - reports of stored errors need none

    pairs = kaldialign.align(list(reference), list(hypothesis), _NO_WORD, sclite_mode=True)
    return [said == heard for said, heard in pairs if heard != _NO_WORD]
