"""Metadata objects are read line by line, within bounds that no archive can evade."""

import codecs
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import metadata
from pipeline.metadata import read_ids, read_records
from pipeline.records import Utterance

RECORD = {
    "utterance_id": "utt",
    "speaker_id": "spk",
    "duration_s": 2.5,
    "created_at": "2026-01-01T00:00:00+00:00",
    "locale": "en-US",
    "audio_uri": "audio/utt.flac",
}
LINE = json.dumps(RECORD).encode() + b"\n"


def test_an_archive_of_newlines_is_refused_at_the_first_quarter_million() -> None:
    """A quarter of a megabyte that unpacks to 2^28 newlines took 565 s."""
    packed = gzip.compress(b"\n" * 2**20) * 2**8
    with pytest.raises(
        ValueError, match=r"a.jsonl.gz: by line 262145, 262145 more lines are blank"
    ):
        list(read_records(packed, "a.jsonl.gz"))


@pytest.mark.parametrize("junk", [b"\n", b" \r\n", b"x\n", b"{}\n"])
def test_as_many_lines_may_be_no_records_as_are_and_a_bound_more(
    junk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank and malformed lines alike; below the bound the good ones are read."""
    monkeypatch.setattr(metadata, "MAX_OTHER_LINES", 100)
    within, beyond = (LINE * 5 + junk * count + LINE for count in (105, 106))
    good = [each for _, each in read_records(within, "a.jsonl") if isinstance(each, Utterance)]
    assert len(good) == 6
    with pytest.raises(ValueError, match=r"by line 111, 101 more .*: need at most 100; write it"):
        list(read_records(beyond, "a.jsonl"))


@pytest.mark.parametrize("line", [LINE, b"\0" * 2**16], ids=["records", "no line's end"])
def test_an_archive_is_unpacked_up_to_its_bound(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it records or one line without end, of which no more than a bound is kept."""
    data = line * (2**17 // len(line))
    monkeypatch.setattr(metadata, "MAX_UNPACKED_BYTES", len(data))
    assert len(list(read_records(gzip.compress(data), "a.jsonl.gz"))) == max(data.count(b"\n"), 1)
    monkeypatch.setattr(metadata, "MAX_UNPACKED_BYTES", len(data) - 1)
    with pytest.raises(ValueError, match=f"unpacks to more than {len(data) - 1} bytes: split it"):
        list(read_records(gzip.compress(data), "a.jsonl.gz"))


ODD_LINES = (
    *(b"", b"  ", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b'{"utterance_id": "\xff"}'),
    *(b'{"utterance_id": 7}', b'{"utterance_id": ""}', b'{"utterance_id": null, "duration_s": 1}'),
    *(b'{"utterance_id": "a", "utterance_id": "b"}', b'{"utterance_id": "' + b"n" * 1100 + b'"}'),
    *('{"utterance_id": "c"}'.encode("utf-16"), b'{"utterance_id": "\\u00e9\\ud800"}', b"[" * 9999),
    *(b'{"utterance_id": "d", "duration_s": -1}', b'{"utterance_id": "e\\u0007"}', b'{"a": 1} {}'),
)


@given(st.lists(st.sampled_from(ODD_LINES), max_size=8), st.booleans(), st.booleans())
def test_ids_are_those_of_the_records(lines: list[bytes], marked: bool, packed: bool) -> None:
    """Good, faulty, none; only "b" is of a record that repeats its field."""
    data = (codecs.BOM_UTF8 if marked else b"") + b"\n".join((LINE, *lines, LINE))
    data, uri = (gzip.compress(data), "a.jsonl.gz") if packed else (data, "a.jsonl")
    for found, (_, record) in zip(read_ids(data, uri), read_records(data, uri), strict=True):
        assert found == record.utterance_id or (found, record.utterance_id) == ("b", "")
