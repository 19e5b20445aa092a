"""Join what recognizers heard with records: JSON lines of their own beside the manifests.

A line has `pred_text`, maybe `score`, and `utterance_id` or the path of a whole audio object. One
pass over the lines finds those of some records, so memory is bounded whatever the number of lines.
Where many tasks would read many lines, give `pred_text` in the manifests themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

from infra.store.object_store import ObjectStore, join_uri
from infra.store.uris import is_absolute
from pipeline.records import (
    PRED_TEXT,
    Hypothesis,
    Quarantined,
    Utterance,
    checked_hypotheses,
    parse_hypotheses,
)
from pipeline.steps.ingestion import TRANSCRIPTS
from pipeline.steps.ingestion.manifest_rows import (
    JSON_SUFFIXES,
    Piece,
    folder_of_object,
    json_rows,
    list_objects,
    whole,
)

JOINED_RECORDS = 20_000
"""So many records and their hypotheses are in memory: 20 MB at 1 kB of text each."""

HYPOTHESES = "hypotheses"
"""The statistic of the utterances that a recognizer's lines are of, by its name."""

_PATHS = ("audio_filepath", "audio_uri")

Key = tuple[str, str]
"""What a line is of: an utterance by "id", or a whole object by "uri"."""


@dataclass(frozen=True, slots=True)
class Transcripts:
    """Transcripts: JSON lines of a recognizer, in the objects of `pieces`, which `store` reads."""

    recognizer: str
    uri: str
    store: ObjectStore
    pieces: tuple[Piece, ...]

    @classmethod
    def listed(cls, recognizer: str, uri: str) -> "Transcripts":
        """List the objects at `uri`; ValueError for a folder without any."""
        store = ObjectStore((uri,))
        objects = list_objects(store, uri, JSON_SUFFIXES)
        pieces = (whole([each], folder_of_object(each.uri)) for each in objects)
        return cls(recognizer, uri, store, tuple(pieces))

    def require_unchanged(self) -> None:
        """Raise ValueError for an object that was replaced since it was listed."""
        for piece in self.pieces:
            piece.require_unchanged(self.store)

    def find(self, wanted: Iterable[Key]) -> dict[Key, Hypothesis]:
        """Return the hypotheses of those that are wanted, in one pass over the lines.

        ValueError for a line that is no object, for a text or score that is none, and for two lines
        of one utterance. A line without a text is of none.
        """
        keys, found = set(wanted), dict[Key, Hypothesis]()
        for piece in self.pieces:
            for row in json_rows(self.store, piece):
                if isinstance(row, Quarantined):
                    raise ValueError(f"{piece.uri}: {row.detail}: correct the line")
                text, key = row.fields.get(PRED_TEXT), _key(row.fields, piece.folder)
                if text is None or key not in keys:
                    continue
                if key in found:
                    raise ValueError(f"{piece.uri}: two lines of {key[1]}: keep one")
                try:
                    fields = {"recognizer": self.recognizer, "text": text}
                    fields["score"] = row.fields.get("score")
                    [found[key]] = parse_hypotheses([fields])
                except ValueError as error:
                    raise ValueError(f"{piece.uri}: {key[1]}: {error}") from error
        return found


def _key(fields: Mapping[str, Any], folder: str) -> Key | None:
    named = fields.get("utterance_id")
    if isinstance(named, str | int) and not isinstance(named, bool):
        return "id", str(named)
    path = next((value for name in _PATHS if isinstance(value := fields.get(name), str)), None)
    if not path:
        return None
    return "uri", path if is_absolute(path) else join_uri(folder, path.removeprefix("./"))


@runtime_checkable
class HasHypotheses(Protocol):
    """HasHypotheses is an utterance, of a manifest or a directory."""

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What recognizers heard."""
        ...


T = TypeVar("T", bound=HasHypotheses)


def join(
    transcripts: Sequence[Transcripts],
    utterances: Sequence[T],
    keys_of: Callable[[T], Sequence[Key]],
    counts: Counter[str],
) -> list[T]:
    """Return the utterances with what each recognizer heard, and count these by recognizer."""
    joined = list(utterances)
    for each in transcripts:
        found = each.find(key for utterance in joined for key in keys_of(utterance))
        for number, utterance in enumerate(joined):
            keys = [key for key in keys_of(utterance) if key in found]
            if len(keys) > 1:
                named = " and ".join(key for _, key in keys)
                raise ValueError(f"{each.uri}: two lines of one utterance, {named}: keep one")
            for key in keys:
                hypotheses = _with_one_more(utterance.hypotheses, found[key], key[1])
                changed: Any = utterance
                joined[number] = replace(changed, hypotheses=hypotheses)
                counts[each.recognizer] += 1
    return joined


def with_hypotheses(
    transcripts: Sequence[Transcripts],
    records: Iterable[Utterance | Quarantined],
    counts: Counter[str],
) -> Iterator[Utterance | Quarantined]:
    """Yield the records with what each recognizer heard, and count these by recognizer.

    A path names an utterance that is its whole object; segments and members have ids.
    """
    remaining = iter(records)
    while batch := list(islice(remaining, JOINED_RECORDS)):
        utterances = [each for each in batch if isinstance(each, Utterance)]
        joined = iter(join(transcripts, utterances, _keys_of, counts))
        yield from (next(joined) if isinstance(each, Utterance) else each for each in batch)


def _with_one_more(
    given: Sequence[Hypothesis], heard: Hypothesis, key: str
) -> tuple[Hypothesis, ...]:
    """Add a recognizer's hypothesis; ValueError where there is one of that name, or no room."""
    if any(each.recognizer == heard.recognizer for each in given):
        remedy = f"give {TRANSCRIPTS} another name"
        raise ValueError(f"recognizer {heard.recognizer!r}: the manifest has its text: {remedy}")
    try:
        return checked_hypotheses((*given, heard))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _keys_of(record: Utterance) -> list[Key]:
    of_object = [("uri", record.audio_uri)] if record.part is None else []
    return [("id", record.utterance_id), *of_object]


def require_joined(transcripts: Sequence[Transcripts], counts: Mapping[str, int]) -> None:
    """Raise ValueError for a recognizer of whose lines none was of an utterance."""
    for each in transcripts:
        if not counts.get(each.recognizer):
            need = f"need lines of {PRED_TEXT} and utterance_id, or of a path in {_PATHS[0]}"
            raise ValueError(f"{each.uri}: no line is of an utterance that is ingested: {need}")


def transcript_settings(transcripts: Sequence[Transcripts]) -> dict[str, list[str]]:
    """Return what the manifest of ingest states of transcripts; nothing without any."""
    named = [f"{each.recognizer}={each.uri}" for each in transcripts]
    return {"transcripts": named} if named else {}
