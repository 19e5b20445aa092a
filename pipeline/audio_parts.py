"""Name the part of an object that is one utterance's audio: a segment of a recording, or a member.

A record without a part is about the whole object.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

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
