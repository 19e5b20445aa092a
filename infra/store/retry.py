"""Retry transient failures: exponential backoff with full jitter, bounded in number and time."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from infra.store.request_counts import REQUESTS, RequestCounts

R = TypeVar("R")

MAX_ATTEMPTS = 10
"""If 5 % of requests fail, one operation in 1e13 uses up this number."""

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 20.0

LIMIT_S = 180.0
"""No attempt begins later than this after the first one."""

MAX_ASKS = 4
"""If 3 % of answers deny what is there, one operation in a million is denied so often."""

MAX_CONTRADICTIONS = 4
"""A store may contradict itself, as by 403 among 404, for so many times as many asks."""


class GaveUpError(Exception):
    """GaveUpError says that every attempt failed transiently; `last` is the last error."""

    def __init__(self, last: Exception, num_attempts: int, seconds: float) -> None:
        super().__init__(f"given up after {num_attempts} attempts in {seconds:.1f} s")
        self.last = last


def retry(
    action: Callable[[], R],
    is_transient: Callable[[Exception], bool],
    max_attempts: int | None = None,
    limit_s: float | None = None,
) -> R:
    """Call `action` until it succeeds; retry the errors for which `is_transient` is true.

    Raises the first error that is not transient as it is. Raises GaveUpError after
    `max_attempts`, or when the next attempt would begin more than `limit_s` after the first.
    """
    max_attempts, limit_s = max_attempts or MAX_ATTEMPTS, limit_s or LIMIT_S
    started = time.monotonic()
    for attempt in range(1, max_attempts + 1):
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            # Full jitter: tasks that failed together must not retry together.
            wait_s = random.uniform(0, min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S))
            elapsed_s = time.monotonic() - started
            if attempt == max_attempts or elapsed_s + wait_s > limit_s:
                raise GaveUpError(error, attempt, elapsed_s) from error
        REQUESTS.add(RequestCounts(retries=1))
        time.sleep(wait_s)
    raise ValueError(f"max_attempts = {max_attempts}: need at least 1")


def confirm(action: Callable[[], R], refusal_of: Callable[[Exception], int]) -> R:
    """Call `action`; believe a refusal only when `MAX_ASKS` calls in a row end in this one.

    `refusal_of` numbers an error's kind of refusal; 0 is none, and raised at once. An answer is no
    failure, so these calls do not count as retries.
    """
    last_refusal = num_alike = 0
    for _ in range(MAX_CONTRADICTIONS * MAX_ASKS):
        try:
            return action()
        except Exception as error:
            refusal = refusal_of(error)
            num_alike = num_alike + 1 if refusal == last_refusal else 1
            last_refusal = refusal
            if refusal == 0 or num_alike == MAX_ASKS:
                raise
        time.sleep(random.uniform(0, FIRST_WAIT_S * 2 ** (num_alike - 1)))
    return action()
