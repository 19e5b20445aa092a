"""Utterances as a model decoded them, and their files: JSON for tasks, trn, ctm and stm for NIST.

sclite -s -i spu_id -r reference.trn trn -h student.trn trn
sclite -s -r reference.stm stm -h student.ctm ctm
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from infra.settings import printable
from pipeline.runs.sealed_json import typed_record
from training.evaluate.word_errors import WordErrors, word_errors

_CHANNEL = "1"
# sclite takes these for alternatives, optional words, comments and labels. The percent sign is
# replaced too, so that two words never become one.
_SPECIAL = re.compile(r"[\s%(){}/@<>;*\\]")
# sclite's spu_id ends a speaker's name at the first of these.
_ENDS_SPEAKER = re.compile(r"[-_]")


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
    """Read what `write_decoded` wrote; ValueError names the line that is something else."""
    return [_parse(number, line) for number, line in enumerate(data.splitlines(), start=1)]


def _parse(number: int, line: bytes) -> DecodedUtterance:
    try:
        fields = json.loads(line)
        fields["words"] = tuple(typed_record(DecodedWord, word) for word in fields["words"])
        for name, kind in (("reference", str), ("labels", int)):
            fields[name] = tuple(fields[name])
            if not all(type(each) is kind for each in fields[name]):
                raise TypeError(name)
        return typed_record(DecodedUtterance, fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        said = printable(str(line[:80]))
        raise ValueError(f"line {number} is {said}: need what evaluation decoded") from error


def file_order(utterance: DecodedUtterance) -> bytes:
    """Sort key of utterances in these files: sclite wants `ctm` and `stm` sorted by bytes."""
    return _plain(utterance.utterance_id).encode()


def reference_trn(utterances: Iterable[DecodedUtterance]) -> bytes:
    """Write a line for each transcript: its words, and in brackets speaker and utterance."""
    return _lines(_trn(each, each.reference) for each in utterances)


def hypothesis_trn(utterances: Iterable[DecodedUtterance]) -> bytes:
    """Write a line for each utterance; what was not decoded has no words, and counts as deleted."""
    return _lines(_trn(each, [word.word for word in each.words]) for each in utterances)


def hypothesis_ctm(utterances: Iterable[DecodedUtterance]) -> bytes:
    """Write a line for each decoded word: start and duration in seconds, and its confidence."""
    return _lines(
        f"{_plain(each.utterance_id)} {_CHANNEL} {word.start_ms / 1000:.2f} "
        f"{word.duration_ms / 1000:.2f} {_plain(word.word)} {word.confidence:.4f}"
        for each in utterances
        for word in each.words
    )


def reference_stm(utterances: Iterable[DecodedUtterance]) -> bytes:
    """Write a line for each transcript: the whole utterance is one segment."""
    return _lines(
        f"{_plain(each.utterance_id)} {_CHANNEL} {_speaker(each)} 0.00 "
        f"{each.duration_ms / 1000:.2f} {' '.join(map(_plain, each.reference))}".rstrip()
        for each in utterances
    )


def _trn(utterance: DecodedUtterance, words: Sequence[str]) -> str:
    name = f"({_speaker(utterance)}-{_plain(utterance.utterance_id)})"
    return " ".join([*map(_plain, words), name])


def _speaker(utterance: DecodedUtterance) -> str:
    return _ENDS_SPEAKER.sub(_escaped, _plain(utterance.speaker_id))


def _plain(text: str) -> str:
    return _SPECIAL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
