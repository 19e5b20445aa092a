"""Write a small Kaldi data directory, and change its tables; ingest manifests without Spark."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jobs.cli import spark_steps
from tests.job_programs import RunJob
from tests.jobs.ingestion.manifest_corpus import Corpus
from tests.small_corpus import serially


def write(directory: Path, name: str, lines: list[str]) -> None:
    (directory / name).write_text("".join(f"{line}\n" for line in lines))


def append(directory: Path, name: str, line: str) -> None:
    with (directory / name).open("a") as file:
        file.write(f"{line}\n")


@pytest.fixture
def kaldi_dir(tmp_path: Path) -> Path:
    """Three speakers of two utterances each, 0.5 s of noise a file."""
    directory = tmp_path / "data"
    (directory / "audio").mkdir(parents=True)
    utterances = [f"{speaker}-{number}" for speaker in ("ann", "bob", "eve") for number in (1, 2)]
    generator = np.random.default_rng(0)
    for key in utterances:
        samples = generator.normal(size=8000) * 0.1
        soundfile.write(directory / "audio" / f"{key}.flac", samples, 16_000)
    write(directory, "wav.scp", [f"{key} audio/{key}.flac" for key in utterances])
    write(directory, "utt2spk", [f"{key} {key[:3]}" for key in utterances])
    write(directory, "text", [f"{key} HELLO WORLD" for key in utterances])
    write(directory, "lexicon.txt", ["HELLO HH AH L OW", "WORLD W ER L D"])
    write(directory, "labelled.speakers", ["ann"])
    write(directory, "unlabelled.speakers", ["bob"])
    write(directory, "heldout.speakers", ["eve"])
    return directory


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tasks in a loop; tests/whole_path starts Spark."""

    @contextmanager
    def in_a_loop(job: object) -> Any:
        del job
        yield serially

    monkeypatch.setattr(spark_steps, "distribute_on_spark", in_a_loop)


@pytest.fixture
def corpus(tmp_path: Path, run_job: RunJob) -> Corpus:
    return Corpus(tmp_path, run_job)
