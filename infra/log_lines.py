"""Write log lines with time and step, as text or JSON, and progress as bars or lines.

All of them are written to standard error. spark-submit would join it to standard output, so
`separate_standard_error` keeps the two apart.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tqdm import tqdm

from infra.settings import printable, without_secrets

MAX_LINE = 10_000
"""The characters of a line that are shown."""

LogFormat: TypeAlias = Literal["text", "json"]
"""text: time, step and message; json: one object a line."""

LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)

PROGRESS_INTERVAL_S = 30.0
"""Seconds between two lines of progress where standard error is no terminal."""

_FORMAT, _STEP = "MEGAHOUR_LOG_FORMAT", "MEGAHOUR_LOG_STEP"
_PLURALS = {"B": "B", "pass": "passes"}
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} elapsed, {remaining} left{postfix}"


def log_format() -> LogFormat:
    """Return the format that this process, or the one that started it, has chosen."""
    return "json" if os.environ.get(_FORMAT) == "json" else "text"


def begin_log(step: str, chosen: LogFormat) -> None:
    """Name the step of this process's lines, and of the processes that it starts."""
    os.environ[_FORMAT], os.environ[_STEP] = chosen, step


def log(message: str, step: str = "", **facts: object) -> None:
    """Write one line to standard error; JSON has the `facts` as keys of their own.

    Passwords and signatures of URIs in the message are starred out.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    step = step or os.environ.get(_STEP, "megahour")
    if log_format() == "json":
        said = without_secrets(message)
        line = json.dumps({"time": now, "step": step, "message": said, **facts})
    else:
        line = f"{now} {step}: {printable(message, MAX_LINE)}"
    print(line, file=sys.stderr, flush=True)


def printed(text: str) -> str:
    """Return lines as they are printed: a name in a store may hold what a terminal obeys."""
    return "\n".join(printable(line, MAX_LINE) for line in text.split("\n"))


def report_error(step: str, error: object) -> None:
    """Write why a command ends: its name and one sentence, or the same as JSON."""
    if log_format() == "json":
        log(str(error), step, level="error")
    else:
        print(f"{step}: {printed(str(error))}", file=sys.stderr, flush=True)


class _Bar(tqdm):
    """_Bar is tqdm's, whose last state is not written again as it is closed."""

    def close(self) -> None:
        """Write the last state, unless it was written."""
        if not self.disable:
            self.leave = self.n != self.last_print_n
        super().close()


class _Lines:
    """_Lines is a file for tqdm that makes each redrawn bar a log line."""

    def write(self, text: str) -> None:
        """Write a line, unless a bar is only cleared."""
        if message := text.strip():
            log(message)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress_bar(
    elements: Iterable[Any] | None = None,
    *,
    description: str,
    total: int | None = None,
    unit: str = "task",
    **options: Any,  # noqa: ANN401
) -> "tqdm[Any]":
    """Return tqdm's bar on a terminal; elsewhere one that writes a line every 30 s.

    Work of less than 30 s writes no line.
    """
    shared: dict[str, Any] = {"desc": description, "total": total, "unit": unit, **options}
    if sys.stderr.isatty():
        return tqdm(elements, **shared)
    interval = {"mininterval": PROGRESS_INTERVAL_S, "maxinterval": PROGRESS_INTERVAL_S}
    lines = {"file": _Lines(), "delay": PROGRESS_INTERVAL_S, "bar_format": _LINE}
    shared["unit"] = _PLURALS.get(unit, f"{unit}s")
    return _Bar(elements, **shared, **interval, **lines)


def elapsed_text(since: float) -> str:
    """Say how long it is since a monotonic time: 42 s, 12 min 5 s, 3 h 4 min."""
    seconds = round(time.monotonic() - since)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"


def separate_standard_error() -> None:
    """Send standard error where spark-submit sends its own; without spark-submit do nothing.

    spark-submit joins both streams of a Python program into its standard output. They stay
    joined where there is no /proc, and where the user joined them too (`2>&1`).
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    streams_of_parent = Path("/proc", str(os.getppid()), "fd")
    try:
        if (streams_of_parent / "1").samefile(streams_of_parent / "2"):
            return
        descriptor = os.open(streams_of_parent / "2", os.O_WRONLY | os.O_APPEND)
    except OSError:  # no /proc, or standard error is a socket, which has no name to open
        return
    os.dup2(descriptor, 2)
    os.close(descriptor)
