"""Join what recognizers heard with records: JSON lines of their own beside the manifests.

A line has `pred_text`, maybe `score`, and `utterance_id`, the path of a whole audio object, or the
path and `offset` of a segment. One pass over the lines finds those of some records, so memory is
bounded whatever the number of lines. Where many tasks would read many lines, give `pred_text` in
the manifests themselves.
"""

import posixpath
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeVar

from infra.store.object_store import ObjectStore, join_uri
from infra.store.uris import is_absolute, is_s3
from pipeline.records import (
    MAX_START_S,
    PRED_TEXT,
    Hypothesis,
    Quarantined,
    Segment,
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

_PATHS, _OFFSETS = ("audio_filepath", "audio_uri"), ("offset", "start_s")

_TRIED_ROWS = 1000

Key = tuple[str, str]
"""What a line is of: an utterance by "id", or an object or a segment by its "place"."""


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

    def require_usable(self) -> None:
        """Raise ValueError if the first lines are of nothing, or cannot be read."""
        rows = chain.from_iterable(map(self._rows, self.pieces))
        for fields, keys in islice(rows, _TRIED_ROWS):
            if keys and self._hypothesis(fields, keys[0]) is not None:
                return
        raise ValueError(f"{self.uri}: no line of the first {_TRIED_ROWS} is usable: {_NEED}")

    def find(self, wanted: Iterable[Key]) -> dict[Key, Hypothesis]:
        """Return the hypotheses of those that are wanted, in one pass over the lines.

        ValueError for a line that is no object, for a text or score that is none, and for two lines
        of one utterance that differ. A line without a text is of none.
        """
        among, found = set(wanted), dict[Key, Hypothesis]()
        for fields, keys in chain.from_iterable(map(self._rows, self.pieces)):
            for key in among.intersection(keys):
                if (heard := self._hypothesis(fields, key)) is None:
                    break
                if found.setdefault(key, heard) != heard:
                    raise ValueError(f"{self.uri}: two lines of {key[1]}: keep one")
        return found

    def _rows(self, piece: Piece) -> Iterator[tuple[Mapping[str, Any], list[Key]]]:
        """Yield the lines of an object, and what each is of."""
        for number, row in enumerate(json_rows(self.store, piece), 1):
            if isinstance(row, Quarantined):
                raise ValueError(f"{piece.uri}: row {number}: {row.detail}: correct the line")
            yield row.fields, list(_keys(row.fields, piece.folder))

    def _hypothesis(self, fields: Mapping[str, Any], key: Key) -> Hypothesis | None:
        """Return what a line says was heard; None for a line without a text."""
        if (text := fields.get(PRED_TEXT)) is None:
            return None
        heard = {"recognizer": self.recognizer, "text": text, "score": fields.get("score")}
        try:
            [found] = parse_hypotheses([heard])
        except ValueError as error:
            raise ValueError(f"{self.uri}: {key[1]}: {error}") from error
        return found


_NEED = (
    f"need {PRED_TEXT}, and utterance_id or the path of the audio in {_PATHS[0]}, a relative one "
    "from the folder of these lines on"
)


def _keys(fields: Mapping[str, Any], folder: str) -> Iterator[Key]:
    """Yield what a line is of, by its id and by its audio."""
    named = fields.get("utterance_id")
    if isinstance(named, str | int) and not isinstance(named, bool):
        yield "id", str(named)
    path = next((value for name in _PATHS if isinstance(value := fields.get(name), str)), None)
    if path:
        uri = path if is_absolute(path) else join_uri(folder, path.removeprefix("./"))
        offset = next((value for name in _OFFSETS if (value := fields.get(name))), 0)
        if isinstance(offset, int | float) and 0 <= offset <= MAX_START_S:
            yield place_key(uri, float(offset))


def place_key(uri: str, start_s: float = 0.0) -> Key:
    """Return the key of an object, or of its segment from a second on, however the path is spelt.

    File systems and recognizers write accents as one character or as two.
    """
    spelt = unicodedata.normalize("NFC", uri.removeprefix("file://"))
    plain = spelt if is_s3(spelt) else posixpath.normpath(spelt)
    return "place", f"{plain} from {start_s:.3f} s on" if start_s else plain


T = TypeVar("T")
"""An utterance with `hypotheses`, of a manifest or a directory."""


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
            changed: Any = utterance
            keys = {found[key]: key[1] for key in keys_of(utterance) if key in found}
            if len(keys) > 1:
                named = " and ".join(keys.values())
                raise ValueError(f"{each.uri}: two lines of one utterance, {named}: keep one")
            for heard, key in keys.items():
                hypotheses = _with_one_more(changed.hypotheses, heard, key)
                joined[number] = replace(changed, hypotheses=hypotheses)
                counts[each.recognizer] += 1
    return joined


def with_hypotheses(
    transcripts: Sequence[Transcripts],
    records: Iterable[Utterance | Quarantined],
    counts: Counter[str],
) -> Iterator[Utterance | Quarantined]:
    """Yield the records with what each recognizer heard, and count these by recognizer.

    A path names an utterance that is its whole object; members have ids.
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
    keys = [("id", record.utterance_id)]
    if record.part is None:
        keys.append(place_key(record.audio_uri))
    # A path alone is that of the whole recording.
    if isinstance(record.part, Segment) and record.part.start_s:
        keys.append(place_key(record.audio_uri, record.part.start_s))
    return keys


def require_joined(transcripts: Sequence[Transcripts], counts: Mapping[str, int]) -> None:
    """Raise ValueError for a recognizer of whose lines none was of an utterance."""
    for each in transcripts:
        if not counts.get(each.recognizer):
            raise ValueError(f"{each.uri}: no line is of an utterance that is ingested: {_NEED}")


def transcript_settings(transcripts: Sequence[Transcripts]) -> dict[str, list[str]]:
    """Return what the manifest of ingest states of transcripts; nothing without any."""
    named = [f"{each.recognizer}={each.uri}" for each in transcripts]
    return {"transcripts": named} if named else {}
