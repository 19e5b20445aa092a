"""Join what recognizers heard with records: lines of their own beside the manifests.

A line has `pred_text`, maybe `score`, and `utterance_id`, the path of a whole audio object, or the
path and `offset` of a segment. Kaldi's `text` has ids and words. One pass over the lines finds
those of some records, so memory is bounded whatever the number of lines. Where many tasks would
read many lines, give `pred_text` in the manifests themselves.
"""

import math
import posixpath
import re
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
from pipeline.steps.ingestion.kaldi import text_rows
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

UNUSABLE = "bad_field"
"""The reason of the ledger row of an utterance whose lines cannot be used, as of its record's."""

HYPOTHESES = "hypotheses"
"""The statistic of the utterances that a recognizer's lines are of, by its name."""

_PATHS, _OFFSETS = ("audio_filepath", "audio_uri"), ("offset", "start_s")

_TRIED_ROWS = 1000

Key = tuple[str, str]
"""What a line is of: an utterance by "id", or an object or a segment by its "place"."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Unusable: why what a recognizer's lines say of an utterance cannot be used."""

    detail: str


@dataclass(frozen=True, slots=True)
class Transcripts:
    """Transcripts: lines of a recognizer, in the objects of `pieces`, which `store` reads.

    They are JSON, but in an object that has the name of Kaldi's text.
    """

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
        rows, why = chain.from_iterable(map(self._rows, self.pieces)), _NEED
        for fields, keys, _ in islice(rows, _TRIED_ROWS):
            found = self._hypothesis(fields)
            if keys and isinstance(found, Hypothesis):
                return
            why = found.detail if isinstance(found, Unusable) else why
        raise ValueError(f"{self.uri}: no line of the first {_TRIED_ROWS} is usable: {why}")

    def find(self, wanted: Iterable[Key]) -> dict[Key, Hypothesis | Unusable]:
        """Return the hypotheses of those that are wanted, in one pass over the lines.

        A text or score that is none is unusable, and so are two lines of one utterance that differ.
        A line without a text is of none. ValueError for a line that is no JSON object.
        """
        among, found = set(wanted), dict[Key, Hypothesis | Unusable]()
        for fields, keys, of_part in chain.from_iterable(map(self._rows, self.pieces)):
            if of_part in among and fields.get(PRED_TEXT) is not None:
                found[of_part] = Unusable(
                    "there are lines for its segments: need one for all of it"
                )
            for key in among.intersection(keys):
                if (heard := self._hypothesis(fields)) is None:
                    break
                if found.setdefault(key, heard) != heard:
                    found[key] = Unusable("two lines: keep one")
        return found

    def _rows(self, piece: Piece) -> Iterator[tuple[Mapping[str, Any], list[Key], Key | None]]:
        """Yield the lines of an object, what each is of, and the object that it is a part of."""
        read = text_rows if _KALDI_TEXT.search(piece.uri) else json_rows
        for number, row in enumerate(read(self.store, piece), 1):
            if isinstance(row, Quarantined):
                raise ValueError(f"{piece.uri}: row {number}: {row.detail}: {_CORRECT}")
            fields = row.fields
            uri, start_s = _place(fields, piece.folder)
            of_part = place_key(uri) if start_s is not None and start_s > 0 else None
            yield fields, list(_keys(fields, uri, start_s)), of_part

    def _hypothesis(self, fields: Mapping[str, Any]) -> Hypothesis | Unusable | None:
        """Return what a line says was heard; None for a line without a text."""
        if (text := fields.get(PRED_TEXT)) is None:
            return None
        heard = {"recognizer": self.recognizer, "text": text, "score": fields.get("score")}
        try:
            [found] = parse_hypotheses([heard])
        except ValueError as error:
            return Unusable(str(error))
        return found


_KALDI_TEXT = re.compile(r"(/text|\.txt)(\.gz)?$")
_CORRECT = f"correct the line; of a long one keep {PRED_TEXT}, score and what it is of"
_NEED = (
    f"need {PRED_TEXT}, and utterance_id or the path of the audio in {_PATHS[0]}, a relative one "
    "from the folder of these lines on"
)


def _keys(fields: Mapping[str, Any], uri: str, start_s: float | None) -> Iterator[Key]:
    """Yield what a line is of, by its id and by its audio."""
    named = fields.get("utterance_id")
    if isinstance(named, str | int) and not isinstance(named, bool):
        yield "id", str(named)
    if uri:
        if not start_s:
            yield place_key(uri)
        if start_s is not None and 0 <= start_s <= MAX_START_S:
            yield place_key(uri, start_s)


def _place(fields: Mapping[str, Any], folder: str) -> tuple[str, float | None]:
    """Return the object that a line names, or "", and the second that it says it begins at."""
    path = next((value for name in _PATHS if isinstance(value := fields.get(name), str)), None)
    if not path:
        return "", None
    given = next((value for name in _OFFSETS if (value := fields.get(name)) is not None), None)
    uri = path if is_absolute(path) else join_uri(folder, path.removeprefix("./"))
    return uri, None if given is None else _number(given)


def _number(given: object) -> float:
    """Read a number, also of text; NaN for anything else."""
    try:
        return math.nan if isinstance(given, bool) else float(given or 0)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def place_key(uri: str, start_s: float | None = None) -> Key:
    """Return the key of an object, or of its segment from a second on, however the path is spelt.

    File systems and recognizers write accents as one character or as two.
    """
    spelt = unicodedata.normalize("NFC", uri.removeprefix("file://"))
    plain = spelt if is_s3(spelt) else posixpath.normpath(spelt)
    return "place", plain if start_s is None else f"{plain} from {start_s:.3f} s on"


T = TypeVar("T")
"""An utterance with `hypotheses`, of a manifest or a directory."""


def join(
    transcripts: Sequence[Transcripts],
    utterances: Sequence[T],
    keys_of: Callable[[T], Sequence[Key]],
    counts: Counter[str],
) -> list[T | Unusable]:
    """Return each utterance with what each recognizer heard, or why it cannot have it.

    Counts those that a recognizer heard by its name. ValueError for a manifest that has its text.
    """
    joined: list[T | Unusable] = list(utterances)
    for each in transcripts:
        found = each.find(key for utterance in utterances for key in keys_of(utterance))
        for number, utterance in enumerate(utterances):
            heard = {found[key]: key[1] for key in keys_of(utterance) if key in found}
            if heard and not isinstance(before := joined[number], Unusable):
                joined[number] = _joined(before, heard, each)
                counts[each.recognizer] += 1
    return joined


def _joined(
    utterance: T, heard: Mapping[Hypothesis | Unusable, str], of: Transcripts
) -> T | Unusable:
    """Add what a recognizer's lines say of an utterance, each found by one of its keys."""
    usable: list[tuple[Hypothesis, str]] = []
    for said, key in heard.items():
        if isinstance(said, Unusable):
            return Unusable(f"{of.uri}: {key}: {said.detail}")
        usable.append((said, key))
    if len(usable) > 1:
        named = " and ".join(heard.values())
        return Unusable(f"{of.uri}: two lines of one utterance, {named}: keep one")
    [(found, key)] = usable
    changed: Any = utterance
    given: Sequence[Hypothesis] = changed.hypotheses
    if any(each.recognizer == of.recognizer for each in given):
        remedy = f"give {TRANSCRIPTS} another name"
        raise ValueError(f"recognizer {of.recognizer!r}: the manifest has its text: {remedy}")
    try:
        hypotheses = checked_hypotheses((*given, found))
    except ValueError as error:
        return Unusable(f"{of.uri}: {key}: {error}")
    with_it: T = replace(changed, hypotheses=hypotheses)
    return with_it


def with_hypotheses(
    transcripts: Sequence[Transcripts],
    records: Iterable[Utterance | Quarantined],
    counts: Counter[str],
) -> Iterator[Utterance | Quarantined]:
    """Yield the records with what each recognizer heard, and count these by recognizer.

    A path names an utterance that is its whole object; members have ids. An utterance of which the
    lines cannot be used becomes a ledger row.
    """
    remaining = iter(records)
    while batch := list(islice(remaining, JOINED_RECORDS)):
        utterances = [each for each in batch if not isinstance(each, Quarantined)]
        joined = join(transcripts, utterances, _keys_of, counts)
        remade = iter(joined)
        for each in batch:
            found = each if isinstance(each, Quarantined) else next(remade)
            if isinstance(found, Unusable):
                found = Quarantined.of(each, UNUSABLE, found.detail)
            yield found


def _keys_of(record: Utterance) -> list[Key]:
    keys = [("id", record.utterance_id)]
    if record.part is None:
        keys.append(place_key(record.audio_uri))
    # A path alone is that of the whole recording.
    if isinstance(record.part, Segment):
        keys.append(place_key(record.audio_uri, record.part.start_s))
    return keys


def require_joined(transcripts: Sequence[Transcripts], counts: Mapping[str, int]) -> None:
    """Raise ValueError for a recognizer of whose lines none was of an utterance."""
    for each in transcripts:
        if not counts.get(each.recognizer):
            raise ValueError(f"{each.uri}: no line matches an ingested utterance: {_NEED}")


def transcript_settings(transcripts: Sequence[Transcripts]) -> dict[str, list[str]]:
    """Return what the manifest of ingest states of transcripts; nothing without any."""
    named = [f"{each.recognizer}={each.uri}" for each in transcripts]
    return {"transcripts": named} if named else {}
