"""Command lines within sentences and tables are ones that the jobs' own parsers take."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.cli.megahour import STORY, module_of
from tests.documents.document_commands import ROOT, Command, documents
from tests.job_programs import RunJob

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


COMMANDS = [command for document in documents() for command in inline_commands_of(document)]
OPTIONS = sorted({option for document in documents() for option in named_options(document)})

PLACEHOLDERS = {"STEP": "realign"}
"""Words that documents write for a choice of the user's, and such a choice."""

Parse = Callable[[str, tuple[str, ...]], argparse.ArgumentParser]


@pytest.fixture
def parse(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Return a function that lets a job's parser read arguments, none of which must be there.

    The documents say once which ones every step takes. Nothing runs.
    """
    original, seen = argparse.ArgumentParser.parse_args, list[argparse.ArgumentParser]()

    def parse_and_end(parser: argparse.ArgumentParser, *given: object) -> None:
        for each in (*parser._actions, *parser._mutually_exclusive_groups):
            each.required = False
        seen.append(parser)
        original(parser, *given)  # type: ignore[call-overload]
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)

    def run(name: str, arguments: tuple[str, ...]) -> argparse.ArgumentParser:
        said = run_job(module_of(name), *(PLACEHOLDERS.get(each, each) for each in arguments))
        assert said.code == 0, said.err
        return seen[-1]

    return run


def test_parts_in_brackets_are_left_out_and_put_in() -> None:
    """One at a time, and one of several alternatives; those of a value are left out."""
    assert list(forms_of("run X [--a A | --b B] [--c] end")) == [
        "run X   end",
        "run X --a A  end",
        "run X --b B  end",
        "run X  --c end",
    ]
    assert list(forms_of("ingest --manifest [SUBSET=]URI")) == ["ingest --manifest URI"]


def test_commands_of_tables_and_sentences_are_found() -> None:
    """Of a table's cell, of a launcher with a script or a module, and of a line that is broken."""
    lines = {" ".join(command.words) for command in COMMANDS}
    assert {
        "python -m jobs.plan --hours 1e6",
        "megahour report --compare RUN",
        "spark-submit dist/ingest.py --manifest URI",
        "torchrun --nproc-per-node 4 --module -- jobs.train_student --trainer htm",
        "torchrun --nnodes 2 -m jobs.scaling --measure-link",
        "megahour inspect ID --recipe demo --run URI",
    } <= lines
    assert len(COMMANDS) > 25
    assert {("run", "--from"), ("verify", "--sweep"), ("ingest", "--placements")} <= set(OPTIONS)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_arguments_are_the_jobs_own(command: Command, parse: Parse) -> None:
    """Its options, their choices, and the form of their values."""
    assert command.job is not None
    parse(*command.job)


@pytest.mark.parametrize(("job", "option"), OPTIONS, ids=" ".join)
def test_options_that_sentences_name_exist(job: str, option: str, parse: Parse) -> None:
    """Whole, not as an abbreviation that argparse would take."""
    assert option in parse(job, ())._option_string_actions


@pytest.mark.parametrize("arguments", [("--hurs", "1e6"), ("--hours", "many")])
def test_a_wrong_line_is_noticed(arguments: tuple[str, ...], parse: Parse) -> None:
    """An option that no parser has, and a value of another form."""
    with pytest.raises(AssertionError, match="plan: error"):
        parse("plan", arguments)
