"""Collect the commands that the documents show, split into programs and their arguments."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE_FILE = re.compile(r"`(data/[^`]+|mine\.toml)`[^`]*\n\n```(?:\w*)\n(.*?)```", re.DOTALL)
STARTED_AS_SCRIPT = ("spark-submit", "torchrun")


@dataclass(frozen=True)
class Command:
    """Command is one program of a document's line, without its pipes and redirections."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        """Name the command's test."""
        return f"{self.document}: {' '.join(self.words)}"

    @property
    def program(self) -> str:
        """The program's name, with the module that Python starts."""
        name = Path(self.words[0]).name
        return f"{name} -m {self.words[2]}" if self.words[1:2] == ("-m",) else name

    @property
    def job(self) -> tuple[str, tuple[str, ...]] | None:
        """The job that the command starts, and the job's arguments; None of another program."""
        if self.program == "megahour":
            return self.words[1], self.words[2:]
        if self.program.startswith("python -m jobs."):
            return self.words[2].removeprefix("jobs."), self.words[3:]
        if self.program in STARTED_AS_SCRIPT:
            starts = (n for n, word in enumerate(self.words) if word.endswith(".py"))
            modules = (n for n, word in enumerate(self.words) if word.startswith("jobs."))
            place = next(starts, None) or next(modules, None)
            if place is not None:
                name = self.words[place].removeprefix("jobs.")
                return Path(name).stem, self.words[place + 1 :]
        return None


def documents() -> list[Path]:
    """Return the documents for readers; the change log names what there was."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split() if name != "CHANGELOG.md"]


def commands_of(document: Path) -> list[Command]:
    """Return the commands of the document's sh, bash and console blocks, in order."""
    name = str(document.relative_to(ROOT))
    return [
        Command(name, words)
        for kind, block in FENCE.findall(document.read_text(encoding="utf-8"))
        for line in shell_lines(kind, block)
        for words in programs(line)
    ]


def shell_lines(kind: str, block: str) -> Iterator[str]:
    """Yield the lines that a shell would read; of a console those behind its prompt."""
    for line in block.replace("\\\n", " ").splitlines():
        if kind != "console":
            yield line
        elif line.startswith("$ "):
            yield line.removeprefix("$ ")


def programs(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each program of a line with pipes, && and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in [*lexer, "|"]:
        if word in ("|", "&&"):
            if words:
                yield tuple(words)
            words, is_target = [], False
        elif word == ">":
            is_target = True
        elif not is_target:
            words.append(word)


def example_files() -> dict[str, str]:
    """Return the files that the documents show, which their commands read."""
    return {
        name: text
        for document in documents()
        for name, text in EXAMPLE_FILE.findall(document.read_text(encoding="utf-8"))
    }
