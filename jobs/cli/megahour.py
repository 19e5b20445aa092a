"""Start megahour: list every step and query as the story of a run, and start each."""

import difflib
import runpy
import sys
from collections.abc import Sequence

from infra.log_lines import report_error
from infra.ranges import printable
from jobs.cli.catalogue import STORY, Starter, module_of, summary_of

HEAD = """\
megahour: from a firehose of untranscribed speech to a deployed acoustic model

usage: megahour COMMAND [OPTIONS]
       megahour COMMAND --help      explains a command, its options and its exit codes
"""

FOOT = """\
Numbers such as 003 IV-B2 are papers and their sections: see the README.
Spark     starts Spark here, as the cluster file of the step says. On a cluster:
          spark-submit jobs/NAME.py OPTIONS (megahour package writes what it needs).
torchrun  trains alone, on one rank. For four ranks:
          torchrun --nproc-per-node 4 -- jobs/NAME.py OPTIONS
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """List the commands, or start the named one with the rest of the arguments."""
    name, *options = arguments or sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return
    names = [name for chapter in STORY.values() for name in chapter]
    if name not in names:
        sys.exit(_refuse(name, names))
    sys.argv = [name, *options]
    try:
        runpy.run_module(f"jobs.{module_of(name)}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while it imports
        report_error(name, "interrupted: the same command resumes")
        sys.exit(130)


def listing() -> str:
    """Return all commands by chapter, each with its starter and its summary."""
    chapters = (
        "\n".join([title, *(_line(name, starter) for name, starter in commands.items()), ""])
        for title, commands in STORY.items()
    )
    return "\n".join([HEAD, *chapters, FOOT])


def _line(name: str, starter: Starter) -> str:
    return f"  {name:<18} {'' if starter == 'python' else starter:<9} {summary_of(name)}"


def _refuse(name: str, names: Sequence[str]) -> int:
    nearest = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else "megahour --help lists all commands"
    print(f"megahour: unknown command {printable(name)}: {remedy}", file=sys.stderr)
    return 2
