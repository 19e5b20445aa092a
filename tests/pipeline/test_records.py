import json
import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import (
    Hypothesis,
    MetadataError,
    Quarantined,
    Tally,
    Utterance,
    composed,
    hypotheses_from_text,
    hypotheses_to_text,
    parse_utterance,
    stream_order,
)

GOOD: dict[str, Any] = {
    "utterance_id": "utt-1",
    "speaker_id": "spk-1",
    "duration_s": 2.5,
    "created_at": "2019-05-12T10:00:00+02:00",
    "locale": "en-US",
    "audio_uri": "audio/00/utt-1.flac",
}
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
CONTROL = [*map(chr, (*range(9), *range(10, 32), 127))]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def error_of(**changes: Any) -> MetadataError:
    fields = {name: value for name, value in {**GOOD, **changes}.items() if value != "ABSENT"}
    with pytest.raises(MetadataError) as caught:
        parse_utterance(json.dumps(fields))
    return caught.value


@given(TEXT, TEXT, st.floats(1e-3, 86400), st.none() | TEXT.map(composed), st.none() | TEXT)
def test_a_record_survives_its_own_line(
    utterance_id: str, speaker_id: str, duration_s: float, text: str | None, placement: str | None
) -> None:
    """Writing and reading gives the same record, on one line whatever splits the lines."""
    uri, moment = "audio/a.flac", "2019-05-12T10:00:00+00:00"
    record = Utterance(utterance_id, speaker_id, duration_s, moment, "de", uri, text, placement)
    line = record.to_json()
    assert line.isascii()
    assert line.splitlines() == [line]
    assert parse_utterance(line) == record


HEARD = st.builds(
    Hypothesis,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(HEARD, max_size=16, unique_by=lambda each: each.recognizer).map(tuple))
def test_hypotheses_are_kept_as_they_came(heard: tuple[Hypothesis, ...]) -> None:
    """In a record's line and in a shard's cell: text of any form, and the score to the bit."""
    record = replace(parse_utterance(json.dumps(GOOD)), hypotheses=heard)
    assert parse_utterance(record.to_json()) == record
    assert hypotheses_from_text(hypotheses_to_text(heard)) == heard
    assert ("hypotheses" in record.to_json()) == bool(heard)


def test_a_manifests_hypothesis_is_named_by_its_field() -> None:
    """One of `pred_text` and `score` stands before the others."""
    listed = [{"recognizer": "b", "text": "c", "score": None}]
    found = parse_utterance(
        json.dumps(GOOD | {"pred_text": "A?", "score": -1, "hypotheses": listed})
    )
    assert found.hypotheses == (Hypothesis("pred_text", "A?", -1.0), Hypothesis("b", "c"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pred_text": 3}, "need an object of recognizer, text"),
        ({"pred_text": "a", "score": "high"}, "need a finite number"),
        ({"pred_text": "a", "score": 10**400}, "need a finite number"),
        ({"pred_text": "\ud800"}, "not Unicode"),
        ({"hypotheses": {"recognizer": "a", "text": "b"}}, "need a list"),
        ({"hypotheses": [{"text": "b"}]}, "need an object of recognizer"),
        ({"hypotheses": [{"recognizer": "a", "text": "b", "words": []}]}, "need an object"),
        ({"hypotheses": [{"recognizer": "a/b", "text": "b"}]}, "need letters, digits"),
        ({"hypotheses": [{"recognizer": "a", "text": ""}] * 2}, "recognizer 'a' twice"),
        ({"hypotheses": [{"recognizer": f"{n}", "text": ""} for n in range(17)]}, "at most 16"),
        ({"pred_text": "\u0434" * 90_000}, "texts of 540002 bytes as JSON: need at most 524288"),
    ],
)
def test_a_hypothesis_that_is_none_is_named(fields: dict[str, Any], said: str) -> None:
    """The record is a row of the ledger."""
    error = error_of(**fields)
    assert error.reason == "bad_field"
    assert said in error.detail


def test_a_transcript_is_read_in_its_composed_form() -> None:
    """As the lexicon is, so that an accent is no other word; what names things stays as it is."""
    decomposed = "CAFE\u0301"
    found = parse_utterance(json.dumps(GOOD | {"text": decomposed, "speaker_id": decomposed}))
    assert (found.text, found.speaker_id) == ("CAF\u00c9", decomposed)


MARKS = st.text(st.sampled_from("\u0300\u0316\u0345\u0e38"), max_size=70)
LETTERS = st.sampled_from(["a", "e", "A", "\u1100", "\u1161", "\u11a8", "\u0e01"])


@given(
    st.lists(st.tuples(LETTERS, MARKS), max_size=9).map(lambda made: "".join(map("".join, made)))
)
def test_up_to_30_accents_are_composed_as_unicode_has_it(text: str) -> None:
    """Of more in a row none is lost, but they may be in another order."""
    found = composed(text)
    runs = "".join("M" if unicodedata.combining(each) else "." for each in text).split(".")
    if max(map(len, runs)) <= 30:
        assert found == unicodedata.normalize("NFC", text)
    every = unicodedata.normalize("NFD", found)
    assert sorted(every) == sorted(unicodedata.normalize("NFD", text))


def test_a_line_of_accents_is_read() -> None:
    """A quarter of a million of two kinds, for which Unicode's own order takes minutes."""
    text = "a" + "\u0300" * 2**17 + "\u0316" * 2**17
    assert len(composed(text)) == len(text) - 1


@pytest.mark.parametrize("name", ["text", "placement", "stream", "speaker_id", "audio_uri"])
def test_control_characters_are_refused_by_their_code_points(name: str) -> None:
    """C0 and DEL, in any text; the error names the field, too."""
    for each in CONTROL:
        detail = error_of(**{name: f"a{each}b"}).detail
        assert detail.startswith(f"{name} ")
        assert f"U+{ord(each):04X}" in detail


@pytest.mark.parametrize("text", ["a\tb", "a\u0085b", "a\u2028b", "a\u3000b", "a\u200db", " a "])
def test_blanks_and_characters_of_format_are_text(text: str) -> None:
    """A tab is a blank; a joiner and a mark of direction are spelling in some scripts."""
    assert parse_utterance(json.dumps({**GOOD, "text": text})).text == text


@pytest.mark.parametrize("text", ["a b\r", "a b\r\n", "\n a b \n"])
def test_ends_of_lines_around_a_transcript_are_no_part_of_it(text: str) -> None:
    """So a table that was written with other line ends loses no row."""
    assert parse_utterance(json.dumps({**GOOD, "text": text})).text == "a b"


@given(st.dictionaries(st.sampled_from([*GOOD, "text", "placement"]), JSON))
def test_no_value_escapes_as_another_error(changes: dict[str, Any]) -> None:
    """Whatever the fields hold: a record that can be written, or a MetadataError."""
    try:
        record = parse_utterance(json.dumps({**GOOD, **changes}))
    except MetadataError as error:
        row = Quarantined.from_error(error, 10).to_json()
        assert row.isascii()
    else:
        assert parse_utterance(record.to_json()) == record
        record.to_json().encode()
        assert stream_order(record) == stream_order(record)


def test_a_ledger_row_is_short() -> None:
    """A megabyte in a field does not become a megabyte in the ledger."""
    assert len(Quarantined.from_error(error_of(text=["x" * 10**6]), 1).to_json()) < 600


def utterance(number: int, created_at: str, speaker_id: str = "spk") -> Utterance:
    fields = {"utterance_id": f"utt-{number}", "created_at": created_at, "speaker_id": speaker_id}
    return Utterance(**{**GOOD, **fields})


def test_a_speakers_stream_is_in_order_of_creation() -> None:
    """Instants are compared, not their text: 09:30+00:00 is after 11:00+02:00; ids break ties."""
    stream = [
        utterance(9, "2019-05-12T23:00:00+00:00", "another"),
        utterance(3, "2019-05-12T11:00:00+02:00"),
        utterance(1, "2019-05-12T09:30:00+00:00"),
        utterance(2, "2019-05-12T11:30:00+02:00"),
    ]
    backwards = stream[::-1]
    assert sorted(backwards, key=stream_order) == stream


def test_extreme_times_can_be_ordered() -> None:
    """The first and the last moment of the calendar, in any time zone."""
    stream = [utterance(1, "0001-01-01T00:00:00+14:00"), utterance(2, "9999-12-31T23:59:59-12:00")]
    backwards = stream[::-1]
    assert sorted(backwards, key=stream_order) == stream


def test_tallies_add_up_exactly() -> None:
    """Milliseconds are integers: a million records of 0.1 s are 27.8 hours to the millisecond."""
    one = Tally.of([Utterance(**{**GOOD, "duration_s": 0.1})])
    assert one == Tally(1, 100)
    assert Tally(999_999, 99_999_900) + one == Tally(1_000_000, 100_000_000)
    assert Tally(1, 3_600_000).hours == 1
    assert Tally.of([]) == Tally()
