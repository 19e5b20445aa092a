"""The lines of ledgers and selection files: JSON objects of which some fields are read."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infra.ranges import printable

SELECTED = {"utterance_id": str, "speaker_id": str, "duration_s": float}
"""Fields of a selection file's lines, and their types."""

QUARANTINED = {"utterance_id": str, "reason": str, "duration_ms": int}
"""Fields of a ledger's lines, and their types."""

IDENTIFIED = {"utterance_id": str}
"""The field that the lines of both have."""


def read_lines(data: bytes, needs: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines; ValueError names the line without the fields of `needs`."""
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not _has(fields, needs):
            need = ", ".join(f"{name} ({kind.__name__})" for name, kind in needs.items())
            said = printable(str(line[:80]))
            raise ValueError(f"line {number} is {said}: need a JSON object with {need}")
        yield fields


def _has(fields: Mapping[str, Any], needs: Mapping[str, type]) -> bool:
    return all(_is_of(fields.get(name), kind) for name, kind in needs.items())


def _is_of(value: object, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # A whole number of seconds is one, too; NaN is in no range.
    return 0 <= value < 2**63 and (kind is float or isinstance(value, int))
