"""Count word errors, and their reduction against a baseline (paper 003 Table II).

A file holds a line of JSON for each utterance, with the counts of every model. Files of several
evaluations join: other models of the same utterances, or other utterances.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.runs.sealed_json import typed_record


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
    return [_parse(number, line) for number, line in enumerate(data.splitlines(), start=1)]


def _parse(number: int, line: bytes) -> UtteranceErrors:
    try:
        fields: dict[str, Any] = json.loads(line)
        words = fields.pop("reference_words")
        counts = fields.pop("errors")
        errors = {
            name: typed_record(WordErrors, {**each, "reference_words": words})
            for name, each in counts.items()
        }
        return typed_record(UtteranceErrors, {**fields, "errors": errors})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"line {number} is {line[:80]!r}: need word errors by utterance, as evaluation writes"
        ) from error


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
