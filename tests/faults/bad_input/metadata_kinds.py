"""List kinds of bad metadata lines, each with the reason that the ledger must give."""

import json
from dataclasses import dataclass

from tests.faults.bad_input.small_runs import record

GOOD_LINE = json.dumps(record("odd", "speaker", 1)).encode()
ABSENT = "absent"


@dataclass(frozen=True)
class Kind:
    """Kind holds a line, its quarantine's reason (None: good) and the ledger's known fields."""

    line: bytes
    reason: str | None
    utterance_id: str = "odd"
    duration_ms: int = 1000


def changed(reason: str | None, duration_ms: int = 1000, **changes: object) -> Kind:
    """Change some fields of a good record, or leave out those that are `ABSENT`."""
    fields = record("odd", "speaker", 1) | changes
    kept = {name: value for name, value in fields.items() if value != ABSENT}
    utterance_id = kept.get("utterance_id")
    known = utterance_id if isinstance(utterance_id, str) else ""
    return Kind(json.dumps(kept).encode(), reason, known[:1024], duration_ms)


def unread(line: bytes) -> Kind:
    """Make the kind of a line of which no field can be read."""
    return Kind(line, "malformed_json", "", 0)


def spliced(old: bytes, new: bytes) -> bytes:
    """Return the good line with some bytes replaced."""
    assert old in GOOD_LINE
    return GOOD_LINE.replace(old, new)


SYNTAX = {
    "broken JSON": unread(b"{not json"),
    "cut short": unread(GOOD_LINE[:-20]),
    "two records in a line": unread(GOOD_LINE + GOOD_LINE),
    "a carriage return between two records": unread(GOOD_LINE + b"\r" + GOOD_LINE),
    "a list": unread(b"[1, 2]"),
    "null": unread(b"null"),
    "an HTML page": unread(b"<html>503</html>"),
    "CSV": unread(b"odd,speaker,1.0,2026-01-01T00:00:00+00:00,en-US,audio/odd"),
    "NUL bytes": unread(bytes(100)),
    "single quotes": unread(GOOD_LINE.replace(b'"', b"'")),
    "trailing comma": unread(GOOD_LINE[:-1] + b",}"),
    "nested 100,000 deep": unread(b"[" * 100_000),
    "an integer of 5,000 digits": unread(spliced(b"1.0", b"9" * 5000)),
    "a field twice": unread(spliced(b'"locale"', b'"utterance_id": "even", "locale"')),
    "Latin-1": unread(spliced(b"odd", b"o\xe9d")),
    "UTF-16": unread(GOOD_LINE.decode().encode("utf-16-be")),
    "an overlong UTF-8 slash": unread(spliced(b"audio/odd", b"audio\xc0\xafodd")),
    "a raw control character": unread(spliced(b"odd", b"o\x01d")),
    "ten megabytes of text": unread(
        spliced(b'"locale"', b'"text": "' + b"x" * 10**7 + b'", "locale"')
    ),
    "ten megabytes of blanks": unread(b" " * 10**7 + GOOD_LINE),
}
FIELDS = {
    **{
        f"no {name}": changed("missing_field", **{name: ABSENT})
        for name in ("utterance_id", "speaker_id", "created_at", "locale", "audio_uri")
    },
    "no duration": changed("missing_field", 0, duration_s=ABSENT),
    "a speaker of null": changed("missing_field", speaker_id=None),
    "an id of 7": changed("wrong_type", utterance_id=7),
    "a speaker of true": changed("wrong_type", speaker_id=True),
    "a locale that is a list": changed("wrong_type", locale=["en"]),
    "a URI that is an object": changed("wrong_type", audio_uri={"bucket": "b"}),
    "a time in seconds": changed("wrong_type", created_at=1767225600),
    "text that is a list": changed("wrong_type", text=["hello"]),
    "a placement that is a number": changed("wrong_type", placement=3.5),
    "an empty id": changed("bad_field", utterance_id=""),
    "an empty URI": changed("bad_field", audio_uri=""),
    "an escaped newline in an id": changed("bad_field", utterance_id="o\nd"),
    "an escaped NUL in a URI": changed("bad_field", audio_uri="audio/\0odd"),
    "a delete character in a speaker": changed("bad_field", speaker_id="s\x7f"),
    "a C1 control in a locale": changed("bad_field", locale="en\x85"),
    "half a surrogate pair": changed("bad_field", utterance_id="o\ud800d"),
    "half a surrogate pair in text": changed("bad_field", text="\udc00"),
    "an id of 2,000 characters": changed("bad_field", utterance_id="o" * 2000),
    "a URI of 100,000 characters": changed("bad_field", audio_uri="a/" * 50_000),
}
NUMBERS = {
    "a duration of zero": changed("bad_duration", 0, duration_s=0),
    "a duration below zero": changed("bad_duration", 0, duration_s=-1.0),
    "a duration below a millisecond": changed("bad_duration", 0, duration_s=1e-9),
    "a duration of NaN": changed("bad_duration", 0, duration_s=float("nan")),
    "a duration of infinity": changed("bad_duration", 0, duration_s=float("inf")),
    "a duration of 1e999": Kind(spliced(b"1.0", b"1e999"), "bad_duration", "odd", 0),
    "a duration of two days": changed("bad_duration", 0, duration_s=2 * 86_400),
    "a duration of 400 digits": changed("bad_duration", 0, duration_s=10**400),
    "a duration of true": changed("bad_duration", 0, duration_s=True),
    "a duration as text": changed("bad_duration", 0, duration_s="1.0"),
}
TIMES = {
    "a time in words": changed("bad_timestamp", created_at="yesterday"),
    "a time without offset": changed("bad_timestamp", created_at="2026-01-01T00:01:00"),
    "a date alone": changed("bad_timestamp", created_at="2026-01-01"),
    "month 13": changed("bad_timestamp", created_at="2026-13-01T00:01:00Z"),
    "30 February": changed("bad_timestamp", created_at="2026-02-30T00:01:00Z"),
    "a leap second": changed("bad_timestamp", created_at="2016-12-31T23:59:60Z"),
    "year 0": changed("bad_timestamp", created_at="0000-01-01T00:01:00Z"),
    "year 10000": changed("bad_timestamp", created_at="10000-01-01T00:01:00Z"),
    "an offset of 25 hours": changed("bad_timestamp", created_at="2026-01-01T00:01:00+25:00"),
    "seconds since the epoch": changed("bad_timestamp", created_at="1767225660"),
}
GOOD = {
    "further fields": changed(None, device="tap", nested={"a": [1, None]}),
    "whole seconds": changed(None, duration_s=1),
    "blanks around": Kind(b" \t" + GOOD_LINE + b" ", None),
    "CRLF": Kind(GOOD_LINE + b"\r", None),
    "a raw U+2028 in the text": Kind(
        spliced(b'"locale"', '"text": "a\u2028b\u0085c", "locale"'.encode()), None
    ),
    "emoji": changed(None, text="\N{GRINNING FACE}"),
    "the first moment of the calendar": changed(None, created_at="0001-01-01T00:00:00+14:00"),
    "the last moment of the calendar": changed(None, created_at="9999-12-31T23:59:59-14:00"),
}
BAD = SYNTAX | FIELDS | NUMBERS | TIMES
