"""The records that travel through the pipeline, validated at its border (paper 003 IV-B1).

An utterance's audio is a whole object, or a part of one: a segment of a recording, or a member of a
tar.
"""

import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias, runtime_checkable

from infra.settings import without_secrets

MAX_MARKS = 30
"""The most combining marks on one letter; no language needs more."""

_MAYBE_MARKS = re.compile(rf"[^\0-\u02ff]{{{MAX_MARKS + 1},}}")

MAX_START_S = 1e7
"""No recording is longer than some hundred days."""

MAX_OBJECT_BYTES = 2**50

SEGMENT_FIELDS = ("start_s",)
MEMBER_FIELDS = ("member_offset", "member_bytes")


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment is the utterance's time within a recording: `duration_s` from `start_s` on."""

    start_s: float
    duration_s: float

    def fields(self) -> dict[str, float]:
        """Return the fields of a metadata record, which has the duration anyway."""
        return {"start_s": self.start_s}


@dataclass(frozen=True, slots=True)
class Member:
    """Member is a file within an uncompressed archive such as a tar: its first byte and size."""

    offset: int
    num_bytes: int

    def fields(self) -> dict[str, int]:
        """Return the fields of a metadata record."""
        return {"member_offset": self.offset, "member_bytes": self.num_bytes}


AudioPart: TypeAlias = Segment | Member


def parse_part(fields: Mapping[str, Any], duration_s: float) -> AudioPart | None:
    """Read the part that a record names; None for a whole object. ValueError says what is wrong."""
    start_s, offset, num_bytes = (fields.get(name) for name in (*SEGMENT_FIELDS, *MEMBER_FIELDS))
    if start_s is None and offset is None and num_bytes is None:
        return None
    if start_s is not None and (offset is not None or num_bytes is not None):
        raise ValueError("start_s and member_offset: need a segment or a member, not both")
    if start_s is not None:
        return Segment(_seconds("start_s", start_s), duration_s)
    first = _whole("member_offset", offset, 0)
    return Member(first, _whole("member_bytes", num_bytes, 1))


def part_to_text(part: AudioPart | None) -> str | None:
    """Write a part for a column of a shard."""
    return None if part is None else json.dumps(asdict(part), sort_keys=True)


def part_from_text(text: str | None) -> AudioPart | None:
    """Read what `part_to_text` wrote; ValueError for other text."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"audio_part = {text[:80]!r}: {error}") from error
    names = set(fields) if isinstance(fields, dict) else set()
    if names == {"start_s", "duration_s"}:
        return Segment(*(_seconds(name, fields[name]) for name in ("start_s", "duration_s")))
    if names == {"offset", "num_bytes"}:
        return Member(*(_whole(name, fields[name], 0) for name in ("offset", "num_bytes")))
    raise ValueError(f"audio_part = {text[:80]!r}: need a segment or a member")


def _seconds(name: str, value: object) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number <= MAX_START_S:  # NaN is in no range
        raise ValueError(f"{name} = {repr(value)[:80]}: need 0 to {MAX_START_S:.0f}")
    return float(number)


def _whole(name: str, value: object, least: int) -> int:
    number = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if not least <= number <= MAX_OBJECT_BYTES:
        raise ValueError(
            f"{name} = {repr(value)[:80]}: need an integer, {least} to {MAX_OBJECT_BYTES}"
        )
    return number


MAX_HYPOTHESES = 16
MAX_HYPOTHESES_BYTES = 2**19
"""So much JSON may the texts of an utterance be, half of a line."""

_RECOGNIZER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

PRED_TEXT = "pred_text"
"""What NeMo's manifests call a hypothesis, and the name here of the recognizer that it is of."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Hypothesis is what a recognizer heard: its text and its score, both as they came."""

    recognizer: str
    text: str
    score: float | None = None

    def __post_init__(self) -> None:
        require_recognizer(self.recognizer)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a metadata record, without a score that is absent."""
        score = {} if self.score is None else {"score": self.score}
        return {"recognizer": self.recognizer, "text": self.text, **score}


def require_recognizer(name: str) -> None:
    """Raise ValueError for a name that no recognizer may have."""
    if not _RECOGNIZER.fullmatch(name):
        need = "need letters, digits, _, . and -, 64 at most, a letter or digit first"
        raise ValueError(f"recognizer = {name[:80]!r}: {need}")


def parse_hypotheses(value: object) -> tuple[Hypothesis, ...]:
    """Read the list of a record, or what is of one recognizer; ValueError says what is wrong."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"hypotheses: need a list of at most {MAX_HYPOTHESES} objects")
    return checked_hypotheses(tuple(map(_parse_hypothesis, value)))


def checked_hypotheses(found: tuple[Hypothesis, ...]) -> tuple[Hypothesis, ...]:
    """Return what is heard in an utterance; ValueError for more than a metadata record holds."""
    if len(found) > MAX_HYPOTHESES:
        raise ValueError(f"{len(found)} hypotheses: need at most {MAX_HYPOTHESES}")
    size = sum(len(each.text) for each in found)
    # A character takes twelve bytes at most, and most texts are short.
    if 12 * size > MAX_HYPOTHESES_BYTES:
        size = sum(len(json.dumps(each.text)) for each in found)
    if size > MAX_HYPOTHESES_BYTES:
        raise ValueError(
            f"hypotheses: texts of {size} bytes as JSON: need at most {MAX_HYPOTHESES_BYTES}: cut "
            "the recording"
        )
    names = [each.recognizer for each in found]
    if len(set(names)) < len(names):
        repeated, _ = Counter(names).most_common(1)[0]
        raise ValueError(f"hypotheses: recognizer {repeated!r} twice: give each a name of its own")
    return found


def _parse_hypothesis(value: object) -> Hypothesis:
    fields = (
        {name: each for name, each in value.items() if each is not None}
        if isinstance(value, dict)
        else {}
    )
    unknown = sorted(set(map(str, fields)) - {"recognizer", "text", "score"})
    recognizer, text, score = (fields.get(name) for name in ("recognizer", "text", "score"))
    if unknown or not isinstance(recognizer, str) or not isinstance(text, str):
        need = "need an object of recognizer, text and maybe score"
        raise ValueError(f"hypotheses: {repr(value)[:80]}: {need}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may escape half a surrogate pair
        raise ValueError(f"hypotheses: text = {text[:80]!r}: not Unicode") from error
    if score is None:
        return Hypothesis(recognizer, text)
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    # An integer may exceed all floats; NaN is in no range.
    if not is_number or not -sys.float_info.max <= score <= sys.float_info.max:
        raise ValueError(f"score = {repr(score)[:80]}: need a finite number")
    return Hypothesis(recognizer, text, float(score))


def hypotheses_to_text(hypotheses: Sequence[Hypothesis]) -> str | None:
    """Write hypotheses for a column of a shard; None for none."""
    if not hypotheses:
        return None
    return json.dumps([each.fields() for each in hypotheses], sort_keys=True)


def hypotheses_from_text(text: str | None) -> tuple[Hypothesis, ...]:
    """Read what `hypotheses_to_text` wrote; ValueError for other text."""
    if text is None:
        return ()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"hypotheses = {text[:80]!r}: {error}") from error
    return parse_hypotheses(found)


MIN_DURATION_S = 0.001  # hours are counted in whole milliseconds
MAX_DURATION_S = 24 * 3600.0
MAX_NAME_CHARACTERS = 1024  # what S3 allows a key
MAX_LINE_BYTES = 2**20
MAX_DETAIL_CHARACTERS = 300
_CONTROL_IN_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# C0 and DEL. A tab is a blank between words; Unicode's own ends of lines, U+0085 and U+2028, come
# with text from web pages and end no line of ours; a zero-width joiner is spelling in some scripts.
_CONTROL_IN_TEXT = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_BLANKS_AROUND = " \t\r\n"
_QUERY = re.compile(r"\?[^\s#'\"]*")
_NESTED = ("part", "hypotheses")
# `json.dumps` with options makes an encoder each time.
_SORTED_JSON = json.JSONEncoder(sort_keys=True)


class MetadataError(ValueError):
    """A metadata record that cannot be used; `reason` is its name in the quarantine ledger."""

    def __init__(self, reason: str, detail: str, partial: "PartialRecord | None" = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.partial = partial or PartialRecord()


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """PartialRecord holds the readable fields of a broken metadata record, to find it again."""

    utterance_id: str = ""
    audio_uri: str = ""
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class Utterance:
    """One utterance's metadata: who spoke, when, for how long, and where the audio lies.

    `stream` names one of several streams of the speaker; without it the speaker is one stream.
    `part` is the segment or the member of the audio object; None is the whole object. `hypotheses`
    are what recognizers heard; only targets use them.
    """

    utterance_id: str
    speaker_id: str
    duration_s: float
    created_at: str
    locale: str
    audio_uri: str
    text: str | None = None
    placement: str | None = None
    stream: str | None = None
    part: AudioPart | None = None
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def duration_ms(self) -> int:
        """Declared duration in whole milliseconds, so that hours add up exactly."""
        return round(self.duration_s * 1000)

    def to_json(self) -> str:
        """Write one line of ASCII for a metadata or selection file, without absent fields."""
        values = ((name, getattr(self, name)) for name in self.__slots__ if name not in _NESTED)
        fields: dict[str, Any] = {name: value for name, value in values if value is not None}
        if self.hypotheses:
            fields["hypotheses"] = [each.fields() for each in self.hypotheses]
        return _SORTED_JSON.encode(fields | (self.part.fields() if self.part else {}))


def parse_line(line: bytes) -> Utterance:
    """Read one line of a metadata object; raise MetadataError naming the reason why not."""
    if len(line) > MAX_LINE_BYTES:
        raise MetadataError("malformed_json", f"a line beyond {MAX_LINE_BYTES} bytes: split it")
    try:
        return parse_utterance(line.decode())
    except UnicodeDecodeError as error:
        detail = f"not UTF-8: {error.reason} at byte {error.start} of the line"
        raise MetadataError("malformed_json", detail) from error


def parse_utterance(line: str) -> Utterance:
    """Read one JSON line of metadata; raise MetadataError naming the reason why not."""
    try:
        fields: Any = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of 4300 digits, too
        raise MetadataError("malformed_json", str(error)) from error
    if not isinstance(fields, dict):
        raise MetadataError("malformed_json", f"need an object, got {type(fields).__name__}")
    return parse_fields(fields)


def parse_fields(fields: dict[str, Any]) -> Utterance:
    """Check the fields of one record; raise MetadataError naming the reason why not."""
    for name in ("utterance_id", "speaker_id", "created_at", "locale", "audio_uri"):
        _require_text(fields, name)
    text, placement, stream = (_text(fields, name) for name in ("text", "placement", "stream"))
    duration_s = _require_duration(fields)
    _require_time(fields)
    try:
        part = parse_part(fields, duration_s)
        hypotheses = _hypotheses_of(fields)
    except ValueError as error:
        raise MetadataError("bad_field", str(error), _partial(fields)) from error
    # One by one, as a dictionary to unpack takes 1 us more of 4.
    return Utterance(
        fields["utterance_id"],
        fields["speaker_id"],
        duration_s,
        fields["created_at"],
        fields["locale"],
        fields["audio_uri"],
        None if text is None else composed(text),
        placement,
        stream,
        part,
        hypotheses,
    )


def _hypotheses_of(fields: Mapping[str, Any]) -> tuple[Hypothesis, ...]:
    """Return a record's hypotheses; those of `pred_text` and `score` are of a manifest's row."""
    given, text = fields.get("hypotheses"), fields.get(PRED_TEXT)
    if given is None and text is None:
        return ()
    listed = () if given is None else parse_hypotheses(given)
    if text is None:
        return listed
    own = {"recognizer": PRED_TEXT, "text": text, "score": fields.get("score")}
    return parse_hypotheses([own, *(each.fields() for each in listed)])


def composed(text: str) -> str:
    """Return the text in NFC, in which an accent is part of its letter, as the lexicon has it.

    Of more than MAX_MARKS accents in a row so many at a time are put in order: the time of
    Unicode's own order grows with their square, 21 s for 80,000 of two kinds.
    """
    if text.isascii():
        return text
    if _MAYBE_MARKS.search(text) is None:
        return unicodedata.normalize("NFC", text)
    pieces, first, num_marks = list[str](), 0, 0
    for number, each in enumerate(text):
        num_marks = num_marks + 1 if unicodedata.combining(each) else 0
        if num_marks > MAX_MARKS:
            pieces.append(text[first:number])
            first, num_marks = number, 1
    return "".join(unicodedata.normalize("NFC", each) for each in (*pieces, text[first:]))


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; ValueError for a repeated field.

    Parsers disagree about which of its values counts.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"field {repeated!r} twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=without_repeats)


def _partial(fields: dict[str, Any]) -> PartialRecord:
    utterance_id, audio_uri = fields.get("utterance_id"), fields.get("audio_uri")
    return PartialRecord(
        utterance_id if isinstance(utterance_id, str) else "",
        audio_uri if isinstance(audio_uri, str) else "",
        round((_usable_duration(fields.get("duration_s")) or 0) * 1000),
    )


def _usable_duration(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if MIN_DURATION_S <= value <= MAX_DURATION_S else None


def _require_text(fields: dict[str, Any], name: str) -> None:
    value = fields.get(name)
    plain = value if isinstance(value, str) and value.isascii() and value.isprintable() else ""
    if 0 < len(plain) <= MAX_NAME_CHARACTERS:
        return  # nearly always; saves 0.7 us of 5 a record
    if value is None:
        raise MetadataError("missing_field", f"{name} is absent", _partial(fields))
    _require_unicode(fields, name)
    if not value:
        raise MetadataError("bad_field", f"{name} = '': need printable text", _partial(fields))
    if found := _CONTROL_IN_NAME.search(value):
        need = f"need printable text, without {_code_point(found[0])}"
        detail = f"{name} = {repr(value)[:100]}: {need}"
        raise MetadataError("bad_field", detail, _partial(fields))
    if len(value) > MAX_NAME_CHARACTERS:
        detail = f"{name} has {len(value)} characters: need at most {MAX_NAME_CHARACTERS}"
        raise MetadataError("bad_field", detail, _partial(fields))


def _text(fields: dict[str, Any], name: str) -> str | None:
    """Return an optional text; one with an end of line around it without the blanks there."""
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value.isprintable()):
        return value
    _require_unicode(fields, name)
    if _CONTROL_IN_TEXT.search(value) is None:
        return str(value)
    text: str = value.strip(_BLANKS_AROUND)
    if found := _CONTROL_IN_TEXT.search(text):
        detail = f"{name} has the control character {_code_point(found[0])}: remove it"
        raise MetadataError("bad_field", detail, _partial(fields))
    return text


def _code_point(character: str) -> str:
    return f"U+{ord(character):04X}"


def _require_unicode(fields: dict[str, Any], name: str) -> None:
    value = fields[name]
    if not isinstance(value, str):
        raise MetadataError("wrong_type", f"{name} = {value!r}: need text", _partial(fields))
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may escape half a surrogate pair
        detail = f"{name} = {value!r}: not Unicode"
        raise MetadataError("bad_field", detail, _partial(fields)) from error


def _require_duration(fields: dict[str, Any]) -> float:
    value = fields.get("duration_s")
    if value is None:
        raise MetadataError("missing_field", "duration_s is absent", _partial(fields))
    duration_s = _usable_duration(value)
    if duration_s is None:
        detail = f"duration_s = {value!r}: need {MIN_DURATION_S} to {MAX_DURATION_S:.0f}"
        raise MetadataError("bad_duration", detail, _partial(fields))
    return duration_s


def _require_time(fields: dict[str, Any]) -> None:
    created_at = fields["created_at"]
    try:
        moment = datetime.fromisoformat(created_at)
    except ValueError as error:
        detail = f"created_at = {created_at!r}: need ISO 8601 with an offset"
        raise MetadataError("bad_timestamp", detail, _partial(fields)) from error
    if moment.tzinfo is None:
        detail = f"created_at = {created_at!r}: no offset"
        raise MetadataError("bad_timestamp", detail, _partial(fields))


def stream_order(utterance: Utterance) -> tuple[str, datetime, str]:
    """Sort key of a speaker's stream: speaker, creation time, then utterance id for ties."""
    created_at = datetime.fromisoformat(utterance.created_at)
    return utterance.speaker_id, created_at, utterance.utterance_id


CLEAN = "clean"
"""The placement of an utterance that is ingested as it is."""

WITHOUT_PLACEMENT = "all"
"""The placement of utterances whose corpus names none, where errors and costs are counted."""


def version_id(utterance_id: str, placement: str) -> str:
    """Name the version of an utterance that is ingested in a placement, such as ann-1-DP3."""
    return f"{utterance_id}-{placement}"


def source_id(utterance_id: str, placements: Iterable[str]) -> str:
    """Return the id of which `version_id` made this one, if it ends in one of the placements.

    No placement has a hyphen, so at most one of them ends an id.
    """
    for placement in placements:
        if utterance_id.endswith(version_id("", placement)):
            return utterance_id.removesuffix(version_id("", placement))
    return utterance_id


def _without_secrets(text: str) -> str:
    """Return text with stars for all values of queries, too: a ledger is kept."""
    starred = without_secrets(text)
    return _QUERY.sub(lambda query: re.sub("=[^&]+", "=***", query[0]), starred)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One row of the quarantine ledger: an utterance that was left out, and the reason.

    Its texts are bounded, and passwords and signatures within URIs are starred out.
    """

    utterance_id: str
    audio_uri: str
    reason: str
    detail: str
    num_bytes: int
    duration_ms: int

    def __post_init__(self) -> None:
        audio_uri, detail = map(_without_secrets, (self.audio_uri, self.detail))
        object.__setattr__(self, "utterance_id", self.utterance_id[:MAX_NAME_CHARACTERS])
        object.__setattr__(self, "audio_uri", audio_uri[:MAX_NAME_CHARACTERS])
        object.__setattr__(self, "detail", detail[:MAX_DETAIL_CHARACTERS])

    @classmethod
    def of(
        cls,
        source: Any,  # noqa: ANN401 - an utterance, or a row of one
        reason: str,
        detail: str,
        num_bytes: int = 0,
    ) -> "Quarantined":
        """Make the ledger row of an utterance that cannot be used."""
        about = source.utterance_id, source.audio_uri
        return cls(*about, reason, detail, num_bytes, source.duration_ms)

    @classmethod
    def from_error(cls, error: MetadataError, num_bytes: int) -> "Quarantined":
        """Make the ledger row of a metadata record that failed validation."""
        return cls.of(error.partial, error.reason, error.detail, num_bytes)

    def to_json(self) -> str:
        """Write one line of ASCII for a ledger object."""
        return json.dumps(asdict(self), sort_keys=True)


@runtime_checkable
class HasDuration(Protocol):
    """HasDuration is an utterance, or a row of one."""

    @property
    def duration_ms(self) -> int:
        """Declared duration in milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Tally:
    """A count of utterances and their declared milliseconds; integers, so sums balance exactly."""

    utterances: int = 0
    duration_ms: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.utterances + other.utterances, self.duration_ms + other.duration_ms)

    @property
    def hours(self) -> float:
        """Declared hours."""
        return self.duration_ms / 3_600_000

    @classmethod
    def of(cls, items: Iterable[HasDuration]) -> "Tally":
        """Count `items`."""
        durations = [item.duration_ms for item in items]
        return cls(len(durations), sum(durations))
