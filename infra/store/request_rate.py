"""Adapt the rate of requests to what a throttling store serves: AIMD, as in TCP.

Additive increase while the store serves all, multiplicative decrease when it throttles (Chiu and
Jain, 1989). The cut is to the share that was served, as DCTCP's (Alizadeh et al., 2010), and the
increase grows with the time since the last cut, as H-TCP's (Leith and Shorten, 2004).
A store limits rates, so the rate is adapted; concurrency is rate x latency by Little's law.
"""

import math
from typing import NamedTuple

FIRST_PER_S = 5500.0
"""The reads a second that S3 grants a prefix: the limit that the first throttled answer sets."""

LEAST_PER_S = 1.0
"""While a store throttles everything, a host asks this often for each prefix."""

LEAST_SERVED_PER_S = 20.0
"""While it serves some, a host asks this often: 503s that no rate causes would else stop it."""

INCREASE_PER_S = 2.0
WINDOW_S = 0.5
"""Answers of so many seconds make one decision."""

_LEAST_SHARE = 0.1  # one window may be bad luck
_PRESSED_SHARE = 0.7  # below it a limit does not limit, and is no reason for a higher one
_FORGET_S = 60.0
_FARTHEST_TURN_S = 300.0


class RequestRate(NamedTuple):
    """RequestRate is one host's limit for one prefix, with what it saw since its window began.

    `per_s` is 0 for no limit. Times are seconds of one clock for all of the host's processes.
    """

    per_s: float = 0.0
    next_turn_s: float = 0.0
    window_s: float = 0.0
    num_sent: float = 0.0
    num_served: float = 0.0
    num_throttled: float = 0.0
    cut_s: float = 0.0
    throttled_s: float = 0.0
    served_s: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Return whether requests must wait for their turns."""
        return self.per_s > 0.0

    def is_valid(self, now_s: float) -> bool:
        """Return whether such a rate can have been stored by one of us before `now_s`."""
        times = (self.window_s, self.cut_s, self.throttled_s, self.served_s)
        counts = (self.num_sent, self.num_served, self.num_throttled)
        return (
            all(map(math.isfinite, self))
            and (self.per_s == 0.0 or self.per_s >= LEAST_PER_S)
            and all(0.0 <= time_s <= now_s for time_s in times)
            and all(count >= 0.0 for count in counts)
            and self.next_turn_s <= now_s + _FARTHEST_TURN_S
        )


UNLIMITED = RequestRate()


def take_turn(rate: RequestRate, now_s: float) -> tuple[RequestRate, float]:
    """Return the time at which the next request may be sent, and the rate after it."""
    if not rate.is_limited or now_s - rate.throttled_s > _FORGET_S:
        return UNLIMITED, now_s
    turn_s = max(now_s, rate.next_turn_s)
    sent = rate.num_sent + 1.0
    return rate._replace(next_turn_s=turn_s + 1.0 / rate.per_s, num_sent=sent), turn_s


def after_answer(rate: RequestRate, now_s: float, sent_s: float, is_throttled: bool) -> RequestRate:
    """Return the rate after an answer, throttled or not, to a request that was sent at `sent_s`."""
    if not rate.is_limited:
        return _first_limit(now_s) if is_throttled else rate
    counts = sent_s >= rate.cut_s  # an earlier one says what the rate was cut for
    if is_throttled:
        rate = rate._replace(throttled_s=now_s, num_throttled=rate.num_throttled + counts)
    else:
        rate = rate._replace(served_s=now_s, num_served=rate.num_served + counts)
    if not counts:
        return rate
    return rate if now_s - rate.window_s < WINDOW_S else _decide(rate, now_s)


def _first_limit(now_s: float) -> RequestRate:
    return RequestRate(FIRST_PER_S, now_s, now_s, cut_s=now_s, throttled_s=now_s)


def _decide(rate: RequestRate, now_s: float) -> RequestRate:
    sent_per_s = rate.num_sent / (now_s - rate.window_s)
    per_s, cut_s = rate.per_s, rate.cut_s
    if rate.num_throttled:
        share = rate.num_served / (rate.num_served + rate.num_throttled)
        least_per_s = LEAST_SERVED_PER_S if share else LEAST_PER_S
        per_s = max(min(per_s, sent_per_s) * max(share, _LEAST_SHARE), least_per_s)
        cut_s = now_s
    elif sent_per_s >= _PRESSED_SHARE * per_s:
        per_s += _increase_per_s(now_s - rate.throttled_s)
    return RequestRate(
        per_s,
        rate.next_turn_s,
        now_s,
        cut_s=cut_s,
        throttled_s=rate.throttled_s,
        served_s=rate.served_s,
    )


def _increase_per_s(since_throttled_s: float) -> float:
    """Return H-TCP's increase for one window (its equation 3), steeper as time passes."""
    return INCREASE_PER_S * (1.0 + 10.0 * since_throttled_s + (since_throttled_s / 2.0) ** 2)
