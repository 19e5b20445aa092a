"""Count word errors, and read and write what a model decoded (paper 003 Table II).

Files of errors hold a line of JSON for each utterance, with the counts of every model; files of
several evaluations join. Hypotheses are JSON for tasks, and trn, ctm and stm for NIST's scorer:

sclite -s -i spu_id -r reference.trn trn -h student.trn trn
sclite -s -r reference.stm stm -h student.ctm ctm
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from infra.settings import printable
from pipeline.runs.sealed_json import typed_record

T = TypeVar("T")


@dataclass(frozen=True)
class WordErrors:
    """WordErrors counts errors against references; `+` sums them over utterances."""

    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    reference_words: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.reference_words + other.reference_words,
        )

    @property
    def errors(self) -> int:
        """Return the sum of substitutions, insertions and deletions."""
        return self.substitutions + self.insertions + self.deletions

    @property
    def word_error_rate(self) -> float:
        """Return errors in percent of the reference words; raise ValueError if there are none."""
        if not self.reference_words:
            raise ValueError("no reference words: need transcripts to evaluate against")
        return 100 * self.errors / self.reference_words


def word_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> WordErrors:
    """Count the fewest errors that turn `reference` into `hypothesis` (Levenshtein)."""
    import kaldialign  # noqa: PLC0415 - reports of stored errors need none

    # Several alignments may have the fewest errors, which then differ in kind only.
    distance = kaldialign.edit_distance(list(reference), list(hypothesis))
    return WordErrors(distance["sub"], distance["ins"], distance["del"], len(reference))


def werr(baseline: float, system: float) -> float:
    """Return the word error rate reduction in percent of the baseline's rate (003 Table II)."""
    if baseline <= 0:
        raise ValueError(f"baseline word error rate = {baseline}: need more than 0 to reduce it")
    return 100 * (baseline - system) / baseline


@dataclass(frozen=True, slots=True)
class UtteranceErrors:
    """UtteranceErrors: whose utterance it is, its placement, and each model's word errors."""

    utterance_id: str
    speaker_id: str
    placement: str
    duration_ms: int
    errors: Mapping[str, WordErrors]

    def to_json(self) -> str:
        """Write one line of ASCII; reference words are the same for all models."""
        fields = asdict(self)
        words = {each.pop("reference_words") for each in fields["errors"].values()}
        assert len(words) == 1, "one transcript, whatever the model"
        return json.dumps({**fields, "reference_words": words.pop()}, sort_keys=True)


def write_errors(utterances: Iterable[UtteranceErrors]) -> bytes:
    """Write a line of JSON for each utterance, in the given order."""
    return "".join(f"{each.to_json()}\n" for each in utterances).encode()


def read_errors(data: bytes) -> list[UtteranceErrors]:
    """Read what `write_errors` wrote; ValueError names the line that is something else."""
    return _read_lines(data, _parse_errors, "word errors by utterance, as evaluation writes")


def _parse_errors(fields: Any) -> UtteranceErrors:  # noqa: ANN401 - what JSON held
    words = fields.pop("reference_words")
    errors = {
        name: typed_record(WordErrors, {**each, "reference_words": words})
        for name, each in fields.pop("errors").items()
    }
    return typed_record(UtteranceErrors, {**fields, "errors": errors})


def _read_lines(data: bytes, parse: Callable[[Any], T], need: str) -> list[T]:
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = printable(str(line[:80]))
            raise ValueError(f"line {number} is {said}: need {need}") from error
    return found


def of_models(
    utterances: Iterable[UtteranceErrors], names: Mapping[str, str]
) -> list[UtteranceErrors]:
    """Keep the models that `names` maps to other names, such as {"baseline": "oracle"}."""
    return [
        replace(each, errors={new: each.errors[old] for old, new in names.items()})
        for each in utterances
    ]


def joined(*evaluations: Sequence[UtteranceErrors]) -> list[UtteranceErrors]:
    """Join evaluations of the same utterances by several models, in the order of the first.

    ValueError names an utterance or a number of words that they do not share, and a model twice.
    """
    first, *others = evaluations
    found = list(first)
    for other in others:
        by_id = {each.utterance_id: each for each in other}
        if len(by_id) != len(found):
            raise ValueError(f"{len(by_id)} and {len(found)} utterances: need the same ones")
        found = [_join(each, by_id.get(each.utterance_id)) for each in found]
    return found


def _join(one: UtteranceErrors, other: UtteranceErrors | None) -> UtteranceErrors:
    if other is None:
        raise ValueError(f"{one.utterance_id} is in one evaluation alone: need the same utterances")
    if twice := sorted(one.errors.keys() & other.errors.keys()):
        raise ValueError(f"model {twice[0]} is in two evaluations: give one of them another name")
    words = {each.reference_words for each in (*one.errors.values(), *other.errors.values())}
    if len(words) > 1 or one.speaker_id != other.speaker_id or one.placement != other.placement:
        raise ValueError(
            f"{one.utterance_id} has {sorted(words)} words of {one.speaker_id} at {one.placement} "
            f"and of {other.speaker_id} at {other.placement}: need evaluations of one corpus"
        )
    return replace(one, errors={**one.errors, **other.errors})


_CHANNEL = "1"
# sclite takes these for alternatives, optional words, comments and labels. The percent sign is
# replaced too, so that two words never become one.
_SPECIAL = re.compile(r"[\s%(){}/@<>;*\\]")
# sclite's spu_id ends a speaker's name at the first of these.
_ENDS_SPEAKER = re.compile(r"[-_]")


@dataclass(frozen=True, slots=True)
class DecodedWord:
    """DecodedWord: a word, its time in the utterance, and its confidence from 0 to 1.

    Confidence is the mean, over the word's frames, of its posterior in the rescored lattice.
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
    return _read_lines(data, _parse_decoded, "what evaluation decoded")


def _parse_decoded(fields: Any) -> DecodedUtterance:  # noqa: ANN401 - what JSON held
    fields["words"] = tuple(typed_record(DecodedWord, word) for word in fields["words"])
    for name, kind in (("reference", str), ("labels", int)):
        fields[name] = tuple(fields[name])
        if not all(type(each) is kind for each in fields[name]):
            raise TypeError(name)
    return typed_record(DecodedUtterance, fields)


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
