from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.filters import SelectionFilters, ends_later
from pipeline.records import Utterance


def utterance(
    locale: str = "en-US", duration_s: float = 2.0, created_at: str = "2019-03-01T12:00:00+00:00"
) -> Utterance:
    return Utterance("utt", "spk", duration_s, created_at, locale, "a.flac")


def test_by_default_everything_passes() -> None:
    """From a millisecond to a day, in any locale, at any time."""
    for created_at in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"):
        for duration_s in (0.001, 86_400.0):
            assert SelectionFilters().rejection(utterance("x", duration_s, created_at)) is None


def test_locales_are_compared_whole() -> None:
    """en is not en-US."""
    filters = SelectionFilters(locales=("en-US", "de-DE"))
    assert [filters.rejection(utterance(each)) for each in ("en-US", "de-DE", "en", "fr-FR")] == [
        None,
        None,
        "locale",
        "locale",
    ]


def test_both_bounds_of_the_duration_pass() -> None:
    """1 s to 10 s, inclusive."""
    filters = SelectionFilters(min_duration_s=1.0, max_duration_s=10.0)
    found = [filters.rejection(utterance(duration_s=each)) for each in (0.999, 1.0, 10.0, 10.001)]
    assert found == ["duration_s", None, None, "duration_s"]


def test_the_period_is_half_open_in_instants() -> None:
    """A date is midnight UTC; offsets are instants, not text."""
    filters = SelectionFilters(
        created_from="2019-03-01", created_before="2019-04-01T00:00:00+02:00"
    )
    for created_at, expected in {
        "2019-02-28T23:59:59+00:00": "created_at",
        "2019-03-01T00:00:00+00:00": None,
        "2019-03-01T01:30:00+02:00": "created_at",
        "2019-02-28T23:00:00-02:00": None,
        "2019-03-31T21:59:59+00:00": None,
        "2019-03-31T22:00:00+00:00": "created_at",
    }.items():
        assert filters.rejection(utterance(created_at=created_at)) == expected, created_at


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_duration_s": -1.0}, r"min_duration_s = -1.0: need 0\.\.86400"),
        (
            {"min_duration_s": 5.0, "max_duration_s": 4.0},
            r"min_duration_s = 5.0: need at most max_duration_s = 4.0",
        ),
        ({"max_duration_s": 1e6}, r"max_duration_s = 1000000.0: need 0\.\.86400"),
        ({"max_duration_s": float("nan")}, "max_duration_s = nan"),
        ({"created_from": "March"}, r"created_from = 'March': need an ISO 8601 date"),
        ({"created_before": "2019-02-30"}, r"created_before = '2019-02-30': need an ISO 8601"),
        ({"created_from": "2019-03-01T10:00"}, r"need an offset, such as .2019-03-01T10:00\+00:00"),
        (
            {"created_from": "2019-03-01", "created_before": "2019-03-01"},
            "created_from = '2019-03-01': need a time before created_before",
        ),
        (
            {"max_speaker_hours": -0.5},
            r"max_speaker_hours = -0.5: need 0 \(no bound\) or 2e-07\.\.1e\+06",
        ),
        ({"max_speaker_hours": float("inf")}, r"max_speaker_hours = inf"),
    ],
)
def test_unusable_bounds_are_refused(settings: dict[str, object], message: str) -> None:
    """The message has the value and the bound."""
    with pytest.raises(ValueError, match=message):
        SelectionFilters(**settings)  # type: ignore[arg-type]


BOUNDS = st.sampled_from(
    ["", "2019-03-01", "2019-03-02", "2019-03-02T00:00:01+00:00", "2019-03-03T01:00:00+02:00"]
)


@given(BOUNDS, BOUNDS, st.datetimes(datetime(2019, 2, 27), datetime(2019, 3, 5)))
def test_no_record_is_outside_the_days_that_filters_reach(
    first: str, end: str, moment: datetime
) -> None:
    """A record that passes is of a day that is reached; the days beside the bounds are not."""
    try:
        filters = SelectionFilters(created_from=first, created_before=end)
    except ValueError:
        return
    created_at = moment.replace(tzinfo=UTC).isoformat()
    if filters.rejection(utterance(created_at=created_at)) is None:
        assert filters.reaches(moment.date())
    assert filters.reaches(date.max) == (not end)
    a_day = SelectionFilters(created_from="2019-03-01", created_before="2019-03-02")
    assert a_day.reaches(moment.date()) == (moment.date() == date(2019, 3, 1))


@pytest.mark.parametrize(
    ("end", "before", "is_later"),
    [
        ("2026-01-03", "2026-01-02", True),
        ("2026-01-02", "2026-01-03", False),
        ("2026-01-02", "2026-01-02", False),
        ("", "2026-01-02", True),
        ("2026-01-02", "", False),
        ("", "", False),
        ("2026-01-02T00:00:00-01:00", "2026-01-02", True),
        ("2026-01-02T00:00:00+01:00", "2026-01-02", False),
    ],
)
def test_ends_compare_as_instants(end: str, before: str, is_later: bool) -> None:
    """No end is later than any, and none is later than no end."""
    assert ends_later(end, before) == is_later
