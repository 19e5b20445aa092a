"""The records that travel through the pipeline, validated at the border (paper 003 IV-B1)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

MAX_DURATION_S = 24 * 3600.0


class MetadataError(ValueError):
    """A metadata record that cannot be used; `reason` is its name in the quarantine ledger."""

    def __init__(self, reason: str, detail: str, partial: "PartialRecord | None" = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.partial = partial or PartialRecord()


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """What could be read of a broken metadata record, to find it again."""

    utterance_id: str = ""
    audio_uri: str = ""
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class Utterance:
    """One utterance's metadata: who spoke, when, for how long, and where the audio lies."""

    utterance_id: str
    speaker_id: str
    duration_s: float
    created_at: str
    locale: str
    audio_uri: str
    text: str | None = None
    placement: str | None = None

    @property
    def duration_ms(self) -> int:
        """Declared duration in whole milliseconds, so that hours add up exactly."""
        return round(self.duration_s * 1000)

    def to_json(self) -> str:
        """One line of ASCII for a metadata or selection file, without absent optional fields."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields, sort_keys=True)


def parse_utterance(line: str) -> Utterance:
    """Read one JSON line of metadata; raise MetadataError naming the reason why not."""
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of 4300 digits, too
        raise MetadataError("malformed_json", str(error)[:200]) from error
    if not isinstance(fields, dict):
        raise MetadataError("malformed_json", f"need an object, got {type(fields).__name__}")
    partial = _partial(fields)
    for name in ("utterance_id", "speaker_id", "created_at", "locale", "audio_uri"):
        _require_text(fields, name, partial)
    for name in ("text", "placement"):
        _require_optional_text(fields, name, partial)
    duration_s = _require_duration(fields, partial)
    _require_time(fields["created_at"], partial)
    known: dict[str, Any] = {name: fields.get(name) for name in Utterance.__slots__}
    return Utterance(**{**known, "duration_s": duration_s})


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
    return float(value) if 0 < value <= MAX_DURATION_S else None


def _require_text(fields: dict[str, Any], name: str, partial: PartialRecord) -> None:
    value = fields.get(name)
    if value is None:
        raise MetadataError("missing_field", f"{name} is absent", partial)
    _require_optional_text(fields, name, partial)
    if not value or any(ord(character) < 32 for character in value):
        raise MetadataError("bad_field", f"{name} = {value!r}: need printable text", partial)


def _require_optional_text(fields: dict[str, Any], name: str, partial: PartialRecord) -> None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise MetadataError("wrong_type", f"{name} = {value!r}: need text", partial)
    # JSON may escape half a surrogate pair, which no file can hold.
    if value is not None and not _is_unicode(value):
        raise MetadataError("bad_field", f"{name} = {value!r}: not Unicode", partial)


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _require_duration(fields: dict[str, Any], partial: PartialRecord) -> float:
    value = fields.get("duration_s")
    if value is None:
        raise MetadataError("missing_field", "duration_s is absent", partial)
    duration_s = _usable_duration(value)
    if duration_s is None:
        bound = f"need 0 < duration_s <= {MAX_DURATION_S:.0f}"
        raise MetadataError("bad_duration", f"duration_s = {value!r}: {bound}", partial)
    return duration_s


def _require_time(created_at: str, partial: PartialRecord) -> None:
    try:
        moment = datetime.fromisoformat(created_at)
    except ValueError as error:
        detail = f"created_at = {created_at!r}: need ISO 8601 with an offset"
        raise MetadataError("bad_timestamp", detail, partial) from error
    if moment.tzinfo is None:
        raise MetadataError("bad_timestamp", f"created_at = {created_at!r}: no offset", partial)


def stream_order(utterance: Utterance) -> tuple[str, datetime, str]:
    """Sort key of a speaker's stream: speaker, creation time, then utterance id for ties."""
    created_at = datetime.fromisoformat(utterance.created_at)
    return utterance.speaker_id, created_at, utterance.utterance_id


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One row of the quarantine ledger: what was left out, and why."""

    utterance_id: str
    audio_uri: str
    reason: str
    detail: str
    num_bytes: int
    duration_ms: int

    @classmethod
    def from_error(cls, error: MetadataError, num_bytes: int) -> "Quarantined":
        """Make the ledger row of a metadata record that failed validation."""
        partial = error.partial
        return cls(
            partial.utterance_id,
            partial.audio_uri,
            error.reason,
            error.detail[:300],
            num_bytes,
            partial.duration_ms,
        )

    def to_json(self) -> str:
        """One line of ASCII for a ledger object."""
        return json.dumps(asdict(self), sort_keys=True)


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
    def of(cls, items: Iterable[Utterance | Quarantined]) -> "Tally":
        """Count `items`."""
        durations = [item.duration_ms for item in items]
        return cls(len(durations), sum(durations))
