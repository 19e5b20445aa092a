"""Write a small Kaldi data directory, and change its tables; ingest manifests without Spark."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.audio.placements import Acoustics
from pipeline.runs.manifest import Output
from pipeline.runs.names import DEV, HELDOUT, LABELLED, UNLABELLED
from pipeline.steps.ingestion.kaldi_directory import DirectoryIngestion, PlannedCopy, plan_copy
from pipeline.steps.ingestion.placed_audio import Simulation
from tests.job_programs import RunJob
from tests.jobs.ingestion.manifest_corpus import Corpus, manifest_of, row
from tests.jobs.synthesis.test_corpus import tiny_acoustics
from tests.small_corpus import flac, plain_loop, tone


def write(directory: Path, name: str, lines: list[str]) -> None:
    (directory / name).write_text("".join(f"{line}\n" for line in lines))


def append(directory: Path, name: str, line: str) -> None:
    with (directory / name).open("a") as file:
        file.write(f"{line}\n")


@dataclass(frozen=True)
class Copied:
    """Copied holds what was planned, and the objects of the corpus."""

    plan: PlannedCopy
    outputs: tuple[Output, ...]


def copied(kaldi_dir: Path, corpus: Path | str, simulation: Simulation | None = None) -> Copied:
    """Copy the directory, without its lexicon and the step's manifest."""
    plan = plan_copy(DirectoryIngestion(kaldi_dir, simulation=simulation))
    store = ObjectStore((str(corpus),))
    return Copied(plan, plan.write(store, str(corpus)))


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
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)


@pytest.fixture
def corpus(tmp_path: Path, run_job: RunJob) -> Corpus:
    return Corpus(tmp_path, run_job)


@pytest.fixture(scope="module")
def acoustics() -> tuple[Acoustics, Acoustics, Acoustics]:
    """Real rooms and a second of noise, without the babble, which takes seconds."""
    return tiny_acoustics(0), tiny_acoustics(1), tiny_acoustics(2)


@pytest.fixture(autouse=True)
def confirmed_at_once(quick_decisions: None) -> None:
    """Refused objects are asked for again without waits of 7 s."""


@pytest.fixture
def small_acoustics(
    acoustics: tuple[Acoustics, Acoustics, Acoustics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate in these rooms; seed 1 exchanges those of training and of held-out speakers."""
    training, heldout, development = acoustics

    def draw(seed: int, subsets: Sequence[str]) -> dict[str, Acoustics]:
        trained, scored = (heldout, training) if seed else (training, heldout)
        drawn = {LABELLED: trained, UNLABELLED: trained, HELDOUT: scored, DEV: development}
        return {subset: drawn[subset] for subset in subsets}

    monkeypatch.setattr("jobs.synthesis.corpus.draw_acoustics", draw)


@pytest.fixture
def three(corpus: Corpus) -> dict[str, str]:
    """Tables of two utterances a subset, with the audio files that they name."""
    subsets = {"ann": "labelled", "bob": "unlabelled", "eve": "heldout"}
    for number, speaker in enumerate(subsets):
        for each in (1, 2):
            (corpus.audio / f"{speaker}-{each}.flac").write_bytes(
                flac(tone(3 * number + each, 0.5))
            )
    return {
        subset: manifest_of(
            corpus, f"{subset}.jsonl", [row(f"{speaker}-{each}.flac") for each in (1, 2)]
        )
        for speaker, subset in subsets.items()
    }
