"""Command lines within sentences and tables are ones that the jobs' own parsers take."""

import argparse
from collections.abc import Callable

import pytest

from jobs.cli.megahour import module_of
from tests.documents.document_commands import Command, documents
from tests.documents.inline_commands import forms_of, inline_commands_of, named_options
from tests.job_programs import RunJob

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
