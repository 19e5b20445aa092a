"""Every command that a document shows is executed by a test, or listed with the reason why not.

The arguments of all that start a job are parsed by the job's own parser.
"""

import argparse
import ast
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.platforms.accounts import PLATFORMS
from jobs.cli.megahour import module_of
from jobs.run_table import INGEST, STEPS
from tests.documents.document_commands import ROOT, Command, commands_of, documents
from tests.infra.platforms.account_files import account_file
from tests.job_programs import RunJob, Said
from tests.small_corpus import tone, wav
from tests.small_run import SETTINGS as SMALL_SETTINGS
from tests.small_run import make_run
from tests.training.export.heard_run import SETTINGS as HEARD_SETTINGS
from tests.training.export.heard_run import write_heard_run
from tests.whole_path.processes import TINY

COMMANDS = [command for document in documents() for command in commands_of(document)]
JOB_COMMANDS = [command for command in COMMANDS if command.job]

OF_SMALL_RUN = ("status", "verify", "inspect", "retry", "export_shards", "select_utterances")
OF_HEARD_RUN = ("export", "transcribe")
OF_NO_RUN = ("plan", "roles", "request_cluster", "workflow")
EXECUTED_HERE = (*OF_SMALL_RUN, *OF_HEARD_RUN, *OF_NO_RUN)

EXECUTED_ELSEWHERE = {
    INGEST: "tests/jobs/ingestion/test_metadata_page.py::test_commands",
    "check": "tests/jobs/test_check.py::test_all_is_well",
    "run": "tests/whole_path/test_s3.py::test_the_table_has_the_five_placements",
    "extract_features": "tests/whole_path/test_an4.py::test_the_report_has_the_documented_shape",
    "train_baseline": "tests/whole_path/test_an4.py::test_the_report_has_the_documented_shape",
    "report": "tests/whole_path/test_an4.py::test_the_report_has_the_documented_shape",
}
"""Jobs whose commands run in another test: with its own arguments, where the run takes minutes."""

GROUNDS = "\nMeasured on one core"
"""The line below the tables of a plan that names where its figures come from."""

COPY = re.compile(rf"s3://my-bucket/code/({'|'.join(STEPS)})\.toml")
"""A reader's copy of a cluster file, for which ours stands."""

NOT_EXECUTED = {
    "make": "it installs an environment, or starts this suite; dry runs: test_other_programs.py",
    "aws": "it needs an account of AWS; options: test_other_programs.py; templates: cfn-lint",
    "docker": "it needs a docker daemon; options: test_other_programs.py; files: test_docker.py",
    "arecord": "it needs a microphone",
    "databricks": "it needs a workspace; its JSON: tests/infra/platforms/test_platform_requests.py",
    "gcloud": "it needs a project; its workflow: tests/infra/platforms/test_platform_requests.py",
    "kubectl": "it needs a cluster; its manifests: tests/infra/platforms/test_platform_requests.py",
    "mkdir": "the shell's own",
    "python -m pip": "it asks a package index",
    "python -m venv": "Python's own",
    "sbatch": "it needs a cluster; its script: tests/infra/platforms/test_platform_requests.py",
    "sh": "it submits a step; the line: tests/infra/platforms/test_platform_requests.py",
    "cp": "the shell's own",
    "pip": "it asks a package index; its list: tests/training/export/test_device_install.py",
    "python -m pytest": "it starts this suite",
    "python -m infra.spark.session": "tests/whole_path/conftest.py calls the module's function",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of four steps, in which one utterance's audio is bad."""
    return make_run(tmp_path_factory.mktemp("small"))[1]


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A run with a student, and its corpus."""
    _, run_uri, corpus_uri = write_heard_run(tmp_path_factory.mktemp("heard"))
    return run_uri, corpus_uri


@pytest.fixture
def execute(
    small: str,
    heard: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_job: RunJob,
) -> Callable[[str, tuple[str, ...]], Said]:
    """Return a function that runs a job in an empty folder, on a run that is there."""
    monkeypatch.chdir(tmp_path)
    for platform in PLATFORMS:
        shutil.copy(account_file(platform), f"{platform}.toml")
    Path("speech.wav").write_bytes(wav(tone(3, 1.2)))

    def run(name: str, arguments: tuple[str, ...]) -> Said:
        if name in OF_SMALL_RUN:
            arguments = on_run(arguments, small, SMALL_SETTINGS)
        if name == "export":
            arguments = on_run(arguments, heard[0], (*HEARD_SETTINGS, f'corpus.uri="{heard[1]}"'))
        arguments = tuple(
            str(ROOT / each) if (ROOT / each).is_file() else COPY.sub(r"\1", each)
            for each in arguments
        )
        return run_job(module_of(name), *arguments)

    return run


def on_run(arguments: tuple[str, ...], run_uri: str, settings: tuple[str, ...]) -> tuple[str, ...]:
    """Put a run that is there, and the recipe that made it, in place of the document's."""
    words = [re.sub(r"^runs/\w+", run_uri, word) for word in arguments]
    if "--recipe" in words:
        words[words.index("--recipe") + 1] = str(TINY)
        words += [part for setting in settings for part in ("--set", setting)]
    return tuple(words)


def test_documents_show_commands() -> None:
    """The collection is not empty, nor blind to a kind of block."""
    shown = {command.document for command in COMMANDS}
    assert {"README.md", "docs/tutorial.md", "docs/metadata.md", "infra/README.md"} <= shown
    assert len(JOB_COMMANDS) >= 40


def test_each_command_is_executed_or_listed() -> None:
    """A job's by a test that exists, another program's with the reason why not."""
    listed = {*EXECUTED_HERE, *EXECUTED_ELSEWHERE, *NOT_EXECUTED}
    names = {command.job[0] if command.job else command.program for command in COMMANDS}
    assert names - listed == set()
    assert {*EXECUTED_ELSEWHERE, *NOT_EXECUTED} - names == set(), "listed, yet in no document"


def named_tests() -> set[str]:
    """Return the tests that the list above and the documents name."""
    texts = [document.read_text(encoding="utf-8") for document in documents()]
    named = re.findall(r"`(tests/[\w/]+\.py::\w+)`", "\n".join(texts))
    return {*EXECUTED_ELSEWHERE.values(), *named}


@pytest.mark.parametrize("test", sorted(named_tests()))
def test_the_named_tests_exist(test: str) -> None:
    """A test that is renamed is renamed in the list and in the documents, too."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", JOB_COMMANDS, ids=str)
def test_arguments_are_the_jobs_own(
    command: Command, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job's parser takes the arguments of the documents; nothing runs."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *given: object) -> None:
        parse(parser, *given)  # type: ignore[call-overload]
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    assert command.job is not None
    name, arguments = command.job
    said = run_job(module_of(name), *arguments)
    assert said.code == 0, said.err


HERE = [each for each in JOB_COMMANDS if each.job and each.job[0] in EXECUTED_HERE]


@pytest.mark.parametrize("command", HERE, ids=str)
def test_commands_end_well(
    command: Command, execute: Callable[[str, tuple[str, ...]], Said]
) -> None:
    """Each ends with exit code 0; transcribe hears what export wrote."""
    assert command.job is not None
    name, arguments = command.job
    if name == "transcribe":
        export = ("--recipe", "mine.toml", "--run", "runs/mine", "--out", "student.zip")
        assert execute("export", export).code == 0
        arguments = tuple(
            "speech.wav" if each in ("-", "speech.flac") else each for each in arguments
        )
    said = execute(name, arguments)
    assert said.code == 0, said.err
    if name == "plan":
        tables = said.out.partition(GROUNDS)[0].rstrip()
        shown = f"$ megahour plan {shlex.join(arguments)}\n{tables}\n```"
        assert shown in (ROOT / command.document).read_text()
