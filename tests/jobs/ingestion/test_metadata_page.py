"""Every command of docs/metadata.md ingests the examples that the page shows."""

import io
import re
import shlex
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import soundfile

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest
from pipeline.steps.ingestion.formats import FIELDS
from tests.job_programs import RunJob
from tests.small_corpus import flac, serially, tone, wav

PAGE = (Path(__file__).parents[3] / "docs" / "metadata.md").read_text()
FILES = re.findall(r"`(data/[^`]+)`[^`]*\n\n```(?:json)?\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


def write_audio(data: Path) -> None:
    """Write the audio that the page's examples name."""
    for folder in ("audio", "kaldi/audio", "voice/clips", "shar", "libri/84/1"):
        (data / folder).mkdir(parents=True)
    for folder in ("audio", "kaldi/audio"):
        (data / folder / "a.wav").write_bytes(wav(tone(1, 2)))
    soundfile.write(data / "voice" / "clips" / "a.mp3", tone(1, 2), 16_000)
    (data / "libri/84/1/84-1.trans.txt").write_text("84-1-0000 YES\n")
    (data / "libri/84/1/84-1-0000.flac").write_bytes(flac(tone(1, 2)))
    cut = '{"id": "c", "start": 0, "duration": 2.0, "supervisions": []}\n'
    (data / "shar" / "cuts.000000.jsonl").write_text(cut)
    with tarfile.open(data / "shar" / "recording.000000.tar", "w") as archive:
        info, content = tarfile.TarInfo("c.flac"), flac(tone(1, 2))
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def test_the_page_has_its_examples() -> None:
    """Eight files, eight commands; the table of fields is the records'."""
    assert (len(FILES), len(COMMANDS)) == (8, 8)
    table = PAGE.partition("## Fields")[2].partition("## ")[0]
    named = [
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert named == list(FIELDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The command ends well, quarantines nothing, and writes records."""

    @contextmanager
    def in_a_loop(job: object) -> Iterator[object]:
        del job
        yield serially

    monkeypatch.setattr(spark_steps, "distribute_on_spark", in_a_loop)
    monkeypatch.chdir(tmp_path)
    write_audio(tmp_path / "data")
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _, job, *arguments = shlex.split(command)
    said = run_job(job, *arguments)
    assert said.code == 0, said.err
    store = ObjectStore((str(tmp_path),))
    run_uri = arguments[arguments.index("--run") + 1]
    manifest = read_manifest(store, run_uri, "ingest")
    assert manifest.quarantined.utterances == 0
    assert manifest.tally_out.utterances > 0
