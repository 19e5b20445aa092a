"""Every command of the documents that ingests manifests ingests the examples that they show."""

import io
import re
import tarfile
from pathlib import Path

import pytest
import soundfile

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest
from pipeline.steps.ingestion.kaldi import KALDI_HARMLESS
from pipeline.steps.ingestion.lhotse import CUT_HARMLESS, SUPERVISION_HARMLESS
from pipeline.steps.ingestion.manifest_format import FIELDS
from pipeline.steps.ingestion.tables import COMMON_VOICE_HARMLESS, NEMO_HARMLESS
from tests.documents.document_commands import (
    EXAMPLE_FILE,
    ROOT,
    Command,
    commands_of,
    documents,
    example_files,
)
from tests.job_programs import RunJob
from tests.small_corpus import flac, plain_loop, tone, wav

PAGE = (ROOT / "docs" / "metadata.md").read_text()
FILES = example_files()
COMMANDS = [
    each
    for document in documents()
    for each in commands_of(document)
    if each.job and each.job[0] == "ingest"
]


def write_audio(data: Path) -> None:
    """Write the audio that the examples name."""
    for folder in ("audio", "kaldi/audio", "voice/clips", "shar", "libri/84/1"):
        (data / folder).mkdir(parents=True)
    for folder in ("audio", "kaldi/audio"):
        for name in re.findall(r"audio/([\w-]+\.wav)", " ".join(FILES.values())):
            (data / folder / name).write_bytes(wav(tone(1, 2)))
    soundfile.write(data / "voice" / "clips" / "a.mp3", tone(1, 2), 16_000)
    (data / "libri/84/1/84-1.trans.txt").write_text("84-1-0000 YES\n")
    (data / "libri/84/1/84-1-0000.flac").write_bytes(flac(tone(1, 2)))
    cut = '{"id": "c", "start": 0, "duration": 2.0, "supervisions": []}\n'
    (data / "shar" / "cuts.000000.jsonl").write_text(cut)
    with tarfile.open(data / "shar" / "recording.000000.tar", "w") as archive:
        info, content = tarfile.TarInfo("c.flac"), flac(tone(1, 2))
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def write_examples(folder: Path) -> None:
    """Write the files that the documents show; a copied recipe is before mine.toml's lines."""
    write_audio(folder / "data")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    recipe = (ROOT / "jobs/recipes/recorded.toml").read_text()
    (folder / "mine.toml").write_text(recipe + FILES["mine.toml"])


def test_the_page_has_its_examples() -> None:
    """Eight files, eight commands; the table of fields is the records'."""
    of_page = [each for each in COMMANDS if each.document == "docs/metadata.md"]
    assert (len(EXAMPLE_FILE.findall(PAGE)), len(of_page)) == (8, 8)
    table = PAGE.partition("## Fields")[2].partition("## ")[0]
    named = [
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert named == list(FIELDS)


def test_the_page_names_what_is_passed_over() -> None:
    """Each column, key and table that is known to be harmless, and no other."""
    page = (ROOT / "docs" / "manifest_columns.md").read_text()
    cells = [row.split("|") for row in re.findall(r"^\| .*\|$", page, re.MULTILINE)]
    named = {name for row in cells for name in re.findall(r"`([\w.: ]+)`", row[3])}
    of_lhotse = (*CUT_HARMLESS, *SUPERVISION_HARMLESS)
    harmless = {*NEMO_HARMLESS, *KALDI_HARMLESS, *COMMON_VOICE_HARMLESS, *of_lhotse}
    assert named - {"table"} == harmless


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The command ends well, quarantines nothing, and writes records."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path)
    assert command.job is not None
    job, arguments = command.job
    said = run_job(job, *arguments)
    assert said.code == 0, said.err
    store = ObjectStore((str(tmp_path),))
    run_uri = arguments[arguments.index("--run") + 1]
    manifest = read_manifest(store, run_uri, "ingest")
    assert manifest.quarantined.utterances == 0
    assert manifest.tally_out.utterances > 0
