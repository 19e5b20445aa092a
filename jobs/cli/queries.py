"""Jobs that only read a run: their arguments, exit codes, and one answer for people or as JSON."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.configuration import ConfigurationError
from infra.spark.standard_error import separate_standard_error
from infra.store.object_store import StoreError
from jobs.cli.command_line import Job, fail, open_job


@dataclass(frozen=True)
class Answer:
    """What was found: whether it is as it should be, as lines for people, and for JSON."""

    is_good: bool
    text: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Query:
    """A job's description and the function that answers; it writes no manifest."""

    name: str
    description: str
    epilog: str
    answer: Callable[[Job], Answer]

    def parser(self) -> argparse.ArgumentParser:
        """The arguments that every inquiry takes."""
        parser = argparse.ArgumentParser(
            prog=f"jobs/{self.name}.py", description=self.description, epilog=self.epilog
        )
        add = parser.add_argument
        add("--recipe", required=True, help="TOML file, or the name of one in jobs/recipes (demo)")
        add("--run", required=True, help="s3:// URI or path that holds the run")
        add(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="override one value of the recipe; may be repeated",
        )
        add("--cluster", help="cluster TOML or name; default: the recipe's")
        add("--json", action="store_true", help="print one JSON object")
        return parser


def main(query: Query, parser: argparse.ArgumentParser) -> None:
    """Parse the command line, answer, and exit: 0 good, 1 not so or failed, 2 bad usage."""
    arguments = parser.parse_args()
    separate_standard_error()
    try:
        job = open_job(query, arguments)
    except (ConfigurationError, StoreError) as error:
        sys.exit(fail(query, error, 2))
    try:
        answer = query.answer(job)
    except (ValueError, OSError, StoreError) as error:
        sys.exit(fail(query, error, 1))
    print(json.dumps(answer.document) if arguments.json else answer.text, flush=True)
    sys.exit(0 if answer.is_good else 1)
