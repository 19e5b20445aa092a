"""Retry transient failures: exponential backoff with full jitter, bounded in number and time.

A throttled answer is no failure of an attempt: the store works, and asks for patience.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from infra.task_metrics import REQUESTS, RequestCounts

R = TypeVar("R")

MAX_ATTEMPTS = 10
"""If 5 % of requests fail, one operation in 1e13 uses up this number."""

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 20.0

LIMIT_S = 180.0
"""No attempt begins after so many seconds of failed attempts and of waits between them."""

THROTTLED_LIMIT_S = 1800.0
"""Throttled answers use up no attempts while the store serves others. After half an hour, or
LIMIT_S in which it served none of the host's, an operation fails."""

LONGEST_THROTTLED_WAIT_S = 1.0
"""The shared rate of requests does the waiting; this parts those that were throttled together."""

MAX_ASKS = 4
"""One operation in a million is denied so often, if 3 % of answers deny what is there."""

MAX_CONTRADICTIONS = 4
"""A store may contradict itself, as by 403 among 404, for so many times as many asks."""


class GaveUpError(Exception):
    """GaveUpError says that every attempt failed transiently; `last` is the last error."""

    def __init__(self, last: Exception, num_attempts: int, seconds: float) -> None:
        super().__init__(f"given up after {num_attempts} attempts in {seconds:.1f} s")
        self.last = last


@dataclass(slots=True)
class Attempts:
    """Attempts counts the failures of one operation; times and chance are passed in."""

    max_attempts: int
    limit_s: float
    num_failed: int = 0
    failed_s: float = 0.0
    num_throttled: int = 0

    def after_failure(self, attempt_s: float, chance: float) -> float | None:
        """Return the wait after a failed attempt that took `attempt_s`, or None to give up.

        `chance` is uniform in 0..1: tasks that failed together must not retry together.
        """
        wait_s = chance * _backoff_s(self.num_failed, LONGEST_WAIT_S)
        self.num_failed += 1
        self.failed_s += attempt_s + wait_s
        given_up = self.num_failed == self.max_attempts or self.failed_s > self.limit_s
        return None if given_up else wait_s

    def after_throttling(self, elapsed_s: float, unserved_s: float, chance: float) -> float | None:
        """Return the wait after a throttled answer, or None to give up.

        `elapsed_s` are the seconds since the operation began, and `unserved_s` those of them since
        the store last served one of the host's operations.
        """
        wait_s = chance * _backoff_s(self.num_throttled, LONGEST_THROTTLED_WAIT_S)
        self.num_throttled += 1
        return None if is_in_vain(elapsed_s + wait_s, unserved_s) else wait_s


def is_in_vain(elapsed_s: float, unserved_s: float) -> bool:
    """Return whether an operation that is throttled should wait no longer."""
    return elapsed_s > THROTTLED_LIMIT_S or unserved_s > LIMIT_S


def _backoff_s(num_before: int, longest_s: float) -> float:
    return min(FIRST_WAIT_S * 2.0 ** min(num_before, 60), longest_s)


class Patience:
    """Patience is what an operation has beyond its attempts; here it is none."""

    def is_throttled(self, error: Exception) -> bool:
        """Return whether the store only asks for fewer requests."""
        del error
        return False

    def waited_s(self) -> float:
        """Return the seconds that the operation has waited for its turns."""
        return 0.0

    def unserved_s(self) -> float:
        """Return the seconds in which the store has served none of the host's operations."""
        return 0.0


def retry(
    action: Callable[[], R],
    is_transient: Callable[[Exception], bool],
    max_attempts: int | None = None,
    limit_s: float | None = None,
    patience: Patience | None = None,
) -> R:
    """Call `action` until it succeeds; retry the errors for which `is_transient` is true.

    Raises the first error that is not transient as it is. Raises GaveUpError after
    `max_attempts`, or when these took more than `limit_s` with the waits between them. What
    `patience` says was throttled, or spent in waiting for turns, does not count.
    """
    patience = patience or Patience()
    attempts = Attempts(max_attempts or MAX_ATTEMPTS, LIMIT_S if limit_s is None else limit_s)
    started = time.monotonic()
    while True:
        begun_s = time.monotonic() - patience.waited_s()
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            now_s, chance = time.monotonic(), random.random()
            if patience.is_throttled(error):
                elapsed_s, unserved_s = now_s - started, patience.unserved_s()
                wait_s = attempts.after_throttling(elapsed_s, unserved_s, chance)
            else:
                wait_s = attempts.after_failure(now_s - patience.waited_s() - begun_s, chance)
            if wait_s is None:
                num_attempts = attempts.num_failed + attempts.num_throttled
                raise GaveUpError(error, num_attempts, now_s - started) from error
        REQUESTS.add(RequestCounts(retries=1))
        time.sleep(wait_s)


class Confirmation:
    """Confirmation raises the refusal of an operation only at `MAX_ASKS` such answers in a row.

    `refusal_of` numbers an error's kind of refusal; 0 is none, and raised at once. Such an error is
    no answer to count: the operation's next attempt continues from the refusals so far. An answer
    is no failure, so the calls to confirm it do not count as retries.
    """

    def __init__(self, refusal_of: Callable[[Exception], int]) -> None:
        self._refusal_of = refusal_of
        self._last = self._num_alike = self._num_refusals = 0

    def __call__(self, action: Callable[[], R]) -> R:
        """Call `action` until it succeeds, or has been refused so often."""
        while True:
            try:
                return action()
            except Exception as error:
                refusal = self._refusal_of(error)
                if refusal == 0 or self._is_confirmed(refusal):
                    raise
            time.sleep(random.uniform(0, FIRST_WAIT_S * 2 ** (self._num_alike - 1)))

    def _is_confirmed(self, refusal: int) -> bool:
        self._num_alike = self._num_alike + 1 if refusal == self._last else 1
        self._last = refusal
        self._num_refusals += 1
        contradicts_itself = self._num_refusals > MAX_CONTRADICTIONS * MAX_ASKS
        return self._num_alike == MAX_ASKS or contradicts_itself
