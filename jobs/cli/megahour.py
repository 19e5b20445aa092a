"""Start megahour: list every step and query as the story of a run, and start each."""

import ast
import difflib
import os
import runpy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, NoReturn

from infra.extras import Extra, how_to_install
from infra.log_lines import report_error
from infra.settings import printable
from jobs.run_table import STEPS

CHECK = "check"
"""The command that `run` gives first."""

INSPECT = "inspect"

STORY: Mapping[str, Collection[str]] = {
    "Before a run": ("synthesize", "plan", "scaling", "package", CHECK),
    "A whole run": ("demo", "run"),
    "The steps of a run, in order": STEPS,
    "Clusters and schedulers": ("roles", "request_cluster", "workflow"),
    "Second attempts at a run": ("retry",),
    "Questions to a run": ("status", INSPECT, "verify"),
    "After a run": ("export", "transcribe", "export_shards"),
}
"""All commands by chapter."""

_EXTRAS: Mapping[str, tuple[Extra, ...]] = {
    **{name: step.extras for name, step in STEPS.items()},
    **dict.fromkeys(("plan", CHECK, "run", "verify"), ("spark", "train")),
    **dict.fromkeys(("package", "request_cluster", "workflow"), ("spark",)),
    **dict.fromkeys((INSPECT, "retry", "export_shards"), ("spark",)),
    **dict.fromkeys(("synthesize", "demo"), ("demo",)),
    "scaling": ("train",),
    "export": ("deploy", "train"),
    "transcribe": ("deploy",),
}
"""The extras that commands need; plan and check need theirs for some options alone."""

CLOSED_PIPE = 141
"""The exit code if the reader of our output ended first: 128 + SIGPIPE, as of other programs."""

HEAD = """\
megahour: from a firehose of untranscribed speech to a deployed acoustic model

usage: megahour COMMAND [OPTIONS]
       megahour COMMAND --help      explains a command, its options and its exit codes;
                                    all end with 141 if the reader of their output ends first
"""

FOOT = """\
Numbers such as 003 IV-B2 are papers and their sections:
000  Ladkat et al., Two Tiered Distributed Training Algorithm for Acoustic Modeling, 2019
001  Zhang et al., Improving Efficiency in Large-Scale Decentralized Distributed Training, 2020
003  Parthasarathi et al., Realizing Petabyte Scale Acoustic Modeling, 2019
004  Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
     Distributed Training of Speech DNNs, 2014

Spark     starts Spark here, as the cluster file of the step says. On a cluster:
          spark-submit dist/NAME.py OPTIONS; megahour package writes dist.
torchrun  trains alone, on one rank. For four ranks:
          torchrun --nproc-per-node 4 --module -- jobs.NAME OPTIONS
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """List the commands, or start the named one with the rest of the arguments."""
    with ended_by_closed_pipe():
        _start(arguments)


def _start(arguments: Sequence[str] | None) -> None:
    name, *options = arguments or sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return
    names = [name for chapter in STORY.values() for name in chapter]
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else "megahour --help lists all commands"
        print(f"megahour: unknown command {printable(name)}: {remedy}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [name, *options]
    try:
        runpy.run_module(f"jobs.{module_of(name)}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        report_error(name, f"{error.name} is not installed: {how_to_install(_EXTRAS[name])}")
        sys.exit(2)
    except KeyboardInterrupt:  # while it imports
        report_error(name, "interrupted: the same command resumes")
        sys.exit(130)


class _Output:
    """_Output is standard output or error; writing to a reader that has ended ends us, silently.

    SIGPIPE itself would also end us where a connection closes, which is retried.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            self._end()

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._end()

    def _end(self) -> NoReturn:
        # What is still buffered is written at the end of the process, and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        sys.exit(CLOSED_PIPE)


@contextmanager
def ended_by_closed_pipe() -> Iterator[None]:
    """End this process silently, with 141, once the reader of its output has ended (| head)."""
    before: Any = sys.stdout, sys.stderr
    after: Any = [stream and _Output(stream) for stream in before]
    sys.stdout, sys.stderr = after
    try:
        yield
    finally:
        try:
            for stream in after:
                if stream:
                    stream.flush()
        finally:
            sys.stdout, sys.stderr = before


def listing() -> str:
    """Return all commands by chapter, each with its starter and its summary."""
    lines = [HEAD]
    for title, commands in STORY.items():
        lines.append(title)
        for name in commands:
            starter = STEPS[name].starter if name in STEPS else "python"
            shown = "" if starter == "python" else starter
            lines.append(f"  {name:<18} {shown:<9} {summary_of(name)}")
        lines.append("")
    return "\n".join([*lines, FOOT])


def module_of(command: str) -> str:
    """Return the name of a command's file in jobs."""
    # A job that is started by its path would take jobs/inspect.py for Python's own module.
    return "inspect_object" if command == INSPECT else command


def summary_of(command: str) -> str:
    """Return the first line of the docstring of jobs/<command>.py, which describes it."""
    source = (files("jobs") / f"{module_of(command)}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None, f"jobs/{command}.py has no docstring"
    return docstring.partition("\n")[0]
