"""Collect the command lines that stand within the sentences and tables of the documents."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from jobs.cli.megahour import STORY
from tests.documents.document_commands import ROOT, Command

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
STARTERS = ("megahour", "python", "spark-submit", "torchrun")
JOBS = {name for chapter in STORY.values() for name in chapter}


def spans_of(document: Path) -> Iterator[str]:
    """Yield what a document has in `code` outside of blocks; a span may go on in the next line."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    for paragraph in re.split(r"\n\s*\n", text):
        for span in SPAN.findall(paragraph):
            yield " ".join(span.split())


def forms_of(line: str) -> Iterator[str]:
    """Yield a line without its parts in brackets, and with each of them, or each alternative."""
    yield OPTIONAL.sub("", line)
    for part in OPTIONAL.finditer(line):
        # Other parts belong to a value, as in [SUBSET=]URI.
        if part[1].startswith("--"):
            before, after = (OPTIONAL.sub("", each) for each in _around(line, part))
            for alternative in part[1].split(" | "):
                yield f"{before}{alternative}{after}"


def _around(line: str, part: re.Match[str]) -> tuple[str, str]:
    return line[: part.start()], line[part.end() :]


def inline_commands_of(document: Path) -> list[Command]:
    """Return each form of each line that starts a job with arguments of its own or a launcher's."""
    name, found = str(document.relative_to(ROOT)), []
    for span in spans_of(document):
        if Path(span.partition(" ")[0]).name not in STARTERS:
            continue
        for form in forms_of(span):
            words = tuple(word for word in shlex.split(form) if word != "...")
            command = Command(name, words)
            # `megahour verify` names a job and has no arguments.
            if len(words) > 2 and command.job and command.job[0] in JOBS:
                found.append(command)
    return list(dict.fromkeys(found))


def named_options(document: Path) -> list[tuple[str, str]]:
    """Return the options in spans such as `verify --sweep`, each with its job."""
    found = []
    for span in spans_of(document):
        words = span.removeprefix("megahour ").split(" ")
        if words[0] in JOBS:
            found += [(words[0], word.partition("=")[0]) for word in words if word[:2] == "--"]
    return list(dict.fromkeys(found))
