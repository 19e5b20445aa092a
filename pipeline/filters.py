"""Filters of a selection: locale, duration, date, and the hours of one speaker."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Annotated

from infra.settings import Items, Range, Text, check_ranges
from pipeline.records import MAX_DURATION_S, Utterance

DurationS = Annotated[float, Range(0, MAX_DURATION_S)]
Locale = Annotated[str, Text(1, 100)]
DAY = timedelta(days=1)
CREATED_AT = "created_at"
"""The reason of a record that the dates leave out."""

Instant = Annotated[str, Text(0, 40)]


@dataclass(frozen=True, slots=True)
class SelectionFilters:
    """Bounds on what may be selected; the defaults let everything pass.

    Without `locales` all locales pass. Bounds on durations pass themselves; `created_before`
    does not. Times are ISO 8601, a date (from midnight UTC) or a time with an offset; "" is no
    bound. `max_speaker_hours` bounds what is selected of one speaker; 0 is no bound.
    """

    locales: Annotated[tuple[Locale, ...], Items(0, 10_000)] = ()
    min_duration_s: DurationS = 0.0
    max_duration_s: DurationS = MAX_DURATION_S
    created_from: Instant = ""
    created_before: Instant = ""
    max_speaker_hours: Annotated[float, Range(2e-7, 1e6, zero="no bound")] = 0.0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_duration_s > self.max_duration_s:
            raise ValueError(
                f"min_duration_s = {self.min_duration_s}: need at most max_duration_s = "
                f"{self.max_duration_s}"
            )
        first, end = self._bounds
        if first and end and first >= end:
            raise ValueError(
                f"created_from = {self.created_from!r}: need a time before created_before = "
                f"{self.created_before!r}"
            )

    @property
    def max_speaker_ms(self) -> int:
        """The bound on one speaker in milliseconds, 0 for none."""
        return round(self.max_speaker_hours * 3_600_000)

    def rejection(self, utterance: Utterance) -> str | None:
        """Return the field that rejects `utterance`: locale, duration_s, created_at, or None."""
        if self.locales and utterance.locale not in self.locales:
            return "locale"
        if not self.min_duration_s <= utterance.duration_s <= self.max_duration_s:
            return "duration_s"
        if self.created_from or self.created_before:
            (first, end), moment = self._bounds, datetime.fromisoformat(utterance.created_at)
            if (first and moment < first) or (end and end <= moment):
                return CREATED_AT
        return None

    def reaches(self, day: date) -> bool:
        """Return whether some instant of a day, from midnight to midnight UTC, may pass."""
        begin = datetime.combine(day, time(), UTC)
        first, end = self._bounds
        # No sum: the last day of the calendar, as some write "no day", has none after it.
        return (first is None or first - begin < DAY) and (end is None or begin < end)

    @property
    def _bounds(self) -> tuple[datetime | None, datetime | None]:
        first = _instant("created_from", self.created_from)
        return first, _instant("created_before", self.created_before)


def ends_later(end: str, before: str) -> bool:
    """Return whether `created_before` = `end` lets instants pass that another bound does not."""
    first, then = _instant("created_before", before), _instant("created_before", end)
    return first is not None and (then is None or first < then)


@cache  # asked once per record
def _instant(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        remedy = 'need an ISO 8601 date or time, such as "2019-03-01" or ""'
        raise ValueError(f"{name} = {text!r}: {remedy}") from error
    if moment.tzinfo is not None:
        return moment
    try:
        date.fromisoformat(text)
    except ValueError as error:
        remedy = f'need an offset, such as "{text}+00:00"'
        raise ValueError(f"{name} = {text!r}: {remedy}") from error
    return moment.replace(tzinfo=UTC)
