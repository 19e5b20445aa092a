"""An utterance as a model decoded it: words with times and confidence, beside the transcript."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from training.evaluation.word_errors import WordErrors, word_errors


@dataclass(frozen=True, slots=True)
class DecodedWord:
    """DecodedWord: a word, its time in the utterance, and the network's confidence from 0 to 1.

    Confidence is the geometric mean of the posteriors of the word's senones.
    """

    word: str
    start_ms: int
    duration_ms: int
    confidence: float


@dataclass(frozen=True)
class DecodedUtterance:
    """DecodedUtterance: one model's hypothesis, and the transcript that it is held against.

    `has_failed` marks a search without a path: no words, and all reference words are deleted.
    Of `num_aligned` low-rate frames with a label, the best senone of `num_correct` is the label.
    `labels` are those of the transcript's alignment, where this model made it.
    """

    utterance_id: str
    speaker_id: str
    placement: str
    duration_ms: int
    reference: tuple[str, ...]
    words: tuple[DecodedWord, ...]
    has_failed: bool
    num_aligned: int
    num_correct: int
    labels: tuple[int, ...] = ()

    @cached_property
    def errors(self) -> WordErrors:
        """The word errors of the hypothesis."""
        return word_errors(self.reference, [word.word for word in self.words])


def write_decoded(utterances: Iterable[DecodedUtterance]) -> bytes:
    """Write a line of JSON for each utterance."""
    return "".join(f"{json.dumps(asdict(each))}\n" for each in utterances).encode()


def read_decoded(data: bytes) -> list[DecodedUtterance]:
    """Read what `write_decoded` wrote."""
    utterances = []
    for line in data.splitlines():
        fields = json.loads(line)
        fields["reference"] = tuple(fields["reference"])
        fields["labels"] = tuple(fields["labels"])
        fields["words"] = tuple(DecodedWord(**word) for word in fields["words"])
        utterances.append(DecodedUtterance(**fields))
    return utterances
