"""Join recognizers' words into the slots of an alignment graph, each word with its confidence.

Several transcripts are aligned one after the other to a network of words, as ROVER does it without
times (J. Fiscus 1997). A word's confidence is alpha N(w) / N + (1 - alpha) C(w), as his score of
voting: its share of the N recognizers, and the mean of the scores of those that have it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from training.decode.transcript_graph import Slot
from training.targets.text_normalization import Reading, Readings

SUBSTITUTION, INSERTION = 4, 3
"""The costs of NIST's alignments, of a deletion too."""

SILENT_CONFIDENCE = 0.5
"""C where others have a word and this recognizer has none, and so no score."""

LEAST, MOST = 0.01, 0.99
"""The bounds of a confidence: neither word nor garbage is impossible."""


Word: TypeAlias = str | Readings
"""What a slot holds of a text: a word, or all readings of what several texts write alike."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Heard: the readings of a recognizer's text; `confidence` is how probably a word is right."""

    readings: Sequence[Readings]
    confidence: float


@dataclass(frozen=True, slots=True)
class SlotWords:
    """SlotWords: readings at a place of a transcript, and the confidence of each; () is no word."""

    confidences: dict[Reading, float]

    def slot(self, known: Collection[str], min_confidence: float) -> Slot:
        """Return the slot, without readings of unknown words or of too little confidence.

        That some recognizer has no word there remains a reading.
        """
        trust = min(max(*self.confidences.values(), LEAST), MOST)
        total = sum(self.confidences.values())
        # In logarithms: the product of a tiny confidence and these can round to zero.
        costs = {
            reading: math.log(total) - math.log(confidence) - math.log(trust)
            for reading, confidence in self.confidences.items()
            if confidence > 0
            and all(word in known for word in reading)
            and (confidence >= min_confidence or not reading)
        }
        return Slot(costs, -math.log(1 - trust))

    @property
    def words(self) -> set[str]:
        """The words of all readings."""
        return {word for reading in self.confidences for word in reading}

    def is_known(self, known: Collection[str]) -> bool:
        """Return whether a reading has known words alone, or none."""
        return any(all(word in known for word in each) for each in self.confidences)


def slot_words(heard: Sequence[Heard], alpha: float) -> list[SlotWords]:
    """Return the slots of one recognizer's readings, or those of several by ROVER."""
    if len(heard) == 1:
        confidence = alpha + (1 - alpha) * heard[0].confidence
        return [SlotWords(dict.fromkeys(each, confidence)) for each in heard[0].readings]
    columns = rover(chosen_words([each.readings for each in heard]))
    return [_voted(column, [each.confidence for each in heard], alpha) for column in columns]


def _voted(column: Sequence[Word | None], confidences: Sequence[float], alpha: float) -> SlotWords:
    scores: dict[Reading, list[float]] = defaultdict(list)
    for word, confidence in zip(column, confidences, strict=True):
        if word is None:
            scores[()].append(SILENT_CONFIDENCE)
        else:
            for reading in ((word,),) if isinstance(word, str) else word:
                scores[reading].append(confidence)
    return SlotWords(
        {
            reading: alpha * len(some) / len(column) + (1 - alpha) * sum(some) / len(some)
            for reading, some in scores.items()
        }
    )


def chosen_words(texts: Sequence[Sequence[Readings]]) -> list[list[Word]]:
    """Read each text in one way: of several readings that which another text has, or the first.

    Where another text has the same number, say, and none has its words, all readings are left to
    the alignment.
    """
    firsts = [_line(word for readings in text for word in readings[0]) for text in texts]
    units, found = [set(text) for text in texts], []
    for number, text in enumerate(texts):
        others = [(firsts[i], units[i]) for i in range(len(texts)) if i != number]
        words = list[Word]()
        for readings in text:
            lines = [line for line, has in others if readings not in has]
            spoken = (each for each in readings if any(_line(each) in line for line in lines))
            if (said := next(spoken, None)) is not None:
                words += said
            elif len(readings) > 1 and len(lines) < len(others):
                words.append(readings)
            else:
                words += readings[0]
        found.append(words)
    return found


def _line(words: Iterable[str]) -> str:
    """Return the words between blanks, which are in no word."""
    return f" {' '.join(words)} "


def rover(texts: Sequence[Sequence[Word]]) -> list[tuple[Word | None, ...]]:
    """Align the texts, in order, to one network; each of its slots has each text's word, or None.

    A text is aligned to all before it at the least cost, at which a word matches a slot that has
    it, or no word where another has none.
    """
    network: list[tuple[Word | None, ...]] = [(word,) for word in texts[0]]
    for number, text in enumerate(texts[1:], start=1):
        network = [
            (*(slot if slot is not None else (None,) * number), word)
            for slot, word in _aligned(network, text)
        ]
    return network


def _aligned(
    network: Sequence[tuple[Word | None, ...]], words: Sequence[Word]
) -> list[tuple[tuple[Word | None, ...] | None, Word | None]]:
    """Pair slots and words at the least cost: a slot without a word, or a word without a slot."""
    places = defaultdict[Word, list[int]](list)
    for place, word in enumerate(words):
        places[word].append(place)
    skips = [0 if None in slot else INSERTION for slot in network]
    # costs[i, j] is of the first i slots and j words.
    costs = np.empty((len(network) + 1, len(words) + 1), np.int32)
    costs[0] = insertions = INSERTION * np.arange(len(words) + 1, dtype=np.int32)
    for number, (there, skip) in enumerate(zip(network, skips, strict=True)):
        differs = np.full(len(words), SUBSTITUTION, np.int32)
        for word in (each for each in there if each is not None):
            differs[places.get(word, [])] = 0
        row = costs[number] + skip
        np.minimum(row[1:], costs[number, :-1] + differs, out=row[1:])
        # The best place from which the words before j are inserted, for all j at once.
        costs[number + 1] = np.minimum.accumulate(row - insertions) + insertions
    pairs: list[tuple[tuple[Word | None, ...] | None, Word | None]] = []
    i, j = len(network), len(words)
    while i or j:
        cost = costs[i, j]
        slot = network[i - 1] if i else None
        if (
            slot is not None
            and j
            and cost == costs[i - 1, j - 1] + (0 if words[j - 1] in slot else SUBSTITUTION)
        ):
            i, j = i - 1, j - 1
            pairs.append((slot, words[j]))
        elif slot is not None and cost == costs[i - 1, j] + skips[i - 1]:
            i -= 1
            pairs.append((slot, None))
        else:
            j -= 1
            pairs.append((None, words[j]))
    return pairs[::-1]
