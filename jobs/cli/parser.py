"""Parse command lines without showing a password in a complaint."""

import argparse
from typing import NoReturn

from infra.ranges import printable


class Parser(argparse.ArgumentParser):
    """Parser is argparse's; what it complains of is one line, and its passwords are stars."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit with 2."""
        super().error(printable(message))


def add_ranks_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide on how many ranks a run trains."""
    for option, models, default in (
        ("--supervised-ranks", "the baseline and the teacher", 2),
        ("--student-ranks", "the student", 4),
    ):
        text = f"processes that train {models}, default {default}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
