"""A whole run whose teacher is the guide's own: audio in, word error rates out, no teacher trained.

The jobs run in this process, and their Spark tasks in a plain loop; the teacher's server is real.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.run import launches
from pipeline.kbest import select_kbest
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.shards import read_targets
from tests.job_programs import RunJob
from tests.small_corpus import flac, plain_loop
from tests.training.decode.toy_language import LEXICON_TXT
from tests.whole_path.processes import REPOSITORY, TINY
from training.align.labelled import read_tree

pytestmark = pytest.mark.chaos

GUIDE = REPOSITORY / "training" / "targets" / "README.md"
SIZES = {"labelled": (3, 10), "unlabelled": (2, 4), "heldout": (1, 3)}
SENTENCES = ("see a cab", "sake a bee", "be cabs", "a bee see sake", "cab see a sake")
PHONES = ("AX", "EY", "B", "IY", "K", "AE", "S")
WORDS = {"see": "S IY", "a": "AX", "cab": "K AE B", "cabs": "K AE B S", "bee": "B IY"}
WORDS |= {"be": "B IY", "sake": "S EY K"}


def block(kind: str) -> str:
    """The guide's first example in a language."""
    found = re.search(rf"```{kind}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def spoken(sentence: str, seed: int) -> np.ndarray:
    """Two tones a phone, in noise, with silence at both ends."""
    generator = np.random.default_rng(seed)
    parts = [np.zeros(2400)]
    for phone in " ".join(WORDS[word] for word in sentence.split()).split():
        time = np.arange(generator.integers(1600, 3200)) / 16_000
        number = PHONES.index(phone)
        pitches = 300 * (1 + number), 1000 + 700 * ((3 * number) % 7)
        parts.append(sum(0.1 * np.sin(2 * np.pi * pitch * time) for pitch in pitches))
    samples = np.concatenate([*parts, np.zeros(2400)])
    return samples + 0.005 * generator.normal(size=len(samples))


def write_kaldi_dir(folder: Path, sizes: Mapping[str, tuple[int, int]] = SIZES) -> Path:
    """So many speakers of each subset, with so many utterances each."""
    (folder / "audio").mkdir(parents=True)
    tables: dict[str, list[str]] = {"wav.scp": [], "text": [], "utt2spk": []}
    for subset, (num_speakers, num_each) in sizes.items():
        speakers = [f"{subset}{number}" for number in range(num_speakers)]
        (folder / f"{subset}.speakers").write_text("".join(f"{each}\n" for each in speakers))
        for speaker in speakers:
            for number in range(num_each):
                name = f"{speaker}-{number}"
                text = SENTENCES[(number + len(speaker)) % len(SENTENCES)]
                seed = len(tables["text"])
                (folder / "audio" / f"{name}.flac").write_bytes(flac(spoken(text, seed)))
                tables["wav.scp"].append(f"{name} audio/{name}.flac\n")
                tables["text"].append(f"{name} {text}\n")
                tables["utt2spk"].append(f"{name} {speaker}\n")
    for name, lines in tables.items():
        (folder / name).write_text("".join(lines))
    (folder / "lexicon.txt").write_text(LEXICON_TXT)
    return folder


OPTIONS = (
    *("--set", "student.trainer={name = 'synchronous'}"),
    *("--set", "teacher.trainer={name = 'synchronous'}"),
    *("--set", "alignment.rounds=1"),
    *("--set", "alignment.regrow_tree=true"),
    *("--set", "senones.features='lda_mllt'"),
    *("--set", "targets.teacher.factory='my_teachers:waveform'"),
)


@pytest.fixture
def jobs_of(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Return a function that runs one job of the run, and returns what it says."""
    (tmp_path / "my_teachers.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)

    def run(name: str, *more: str) -> dict[str, Any]:
        weights = f"targets.teacher.settings.weights='{tmp_path / 'weights.pt'}'"
        options = ("--recipe", str(TINY), "--run", str(tmp_path / "run"), *OPTIONS)
        said = run_job(name, *options, "--set", weights, "--json", *more)
        assert said.code == 0, f"{name}: {said.err}"
        return json.loads(said.out)

    return run


def store_weights(path: Path, num_senones: int) -> torch.nn.Module:
    """Store the weights of the guide's network, untrained."""
    from my_teachers import Waveform  # type: ignore[import-not-found]  # noqa: PLC0415 - written by a fixture

    torch.manual_seed(0)
    network: torch.nn.Module = Waveform(num_senones)
    torch.save(network.state_dict(), path)
    return network


def samples_by_id(kaldi_dir: Path) -> dict[str, np.ndarray]:
    files = (kaldi_dir / "audio").iterdir()
    return {each.stem: soundfile.read(each, dtype="float32")[0] for each in files}


@torch.no_grad()
def require_targets_of(network: torch.nn.Module, run_uri: str, kaldi_dir: Path) -> None:
    """Each utterance's k best are those of the network on its samples from the offset on."""
    store, samples = ObjectStore((run_uri,)), samples_by_id(kaldi_dir)
    made = read_manifest(store, run_uri, "targets/unlabelled")
    rows = [row for each in made.outputs for row in read_targets(read_output(store, run_uri, each))]
    assert len(rows) == 8
    for row in rows:
        num_frames = len(row.kbest.log_z)
        heard = torch.from_numpy(samples[row.utterance_id][160 * row.offset :])
        logits = network(heard[: 480 * num_frames]).numpy()
        expected = select_kbest(logits, 8)
        assert (row.kbest.senones == expected.senones).mean() > 0.99
        np.testing.assert_allclose(row.kbest.log_z, expected.log_z, atol=4e-3)


def test_a_run_learns_from_a_teacher_of_the_users_own(
    tmp_path: Path, jobs_of: Callable[..., dict[str, Any]]
) -> None:
    """The targets are the guide's network's own, of the audio; all books balance."""
    run_uri, kaldi_dir = str(tmp_path / "run"), write_kaldi_dir(tmp_path / "kaldi")
    jobs_of("check", "--kaldi-dir", str(kaldi_dir), "--supervised-ranks=1", "--student-ranks=1")
    jobs_of("ingest", "--kaldi-dir", str(kaldi_dir))
    aligned = ("bootstrap", *("train_aligner", "realign") * 2)
    for name in ("select_utterances", "extract_features", *aligned, "train_baseline"):
        jobs_of(name)
    trained = jobs_of("train_teacher")
    assert (trained["status"], trained["manifests"]) == ("nothing to do", {})
    store = ObjectStore((run_uri,))
    num_senones = read_tree(store, run_uri).num_senones
    network = store_weights(tmp_path / "weights.pt", num_senones)
    reads = jobs_of("generate_targets", "--dry-run")["reads"]
    assert set(reads) == {"features/unlabelled", "alignments/labelled"}
    for name in ("generate_targets", "repartition", "train_student", "evaluate"):
        jobs_of(name)
    require_targets_of(network, run_uri, kaldi_dir)
    jobs_of("report")
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report["wer"].keys() == {"baseline", "student"}
    assert report["targets"]["num_teachers"] == 1
    assert 0 < report["kbest_costs"]["all"]["k"]["8"]["mass"] < 1
    assert "without_teacher" not in report["kbest_costs"]
    page = " ".join((tmp_path / "run" / "report" / "report.html").read_text().split())
    assert "k = 8 highest logits of the teacher" in page
    verified = jobs_of("verify")
    assert verified["findings"] == []
    assert verified["unfinished"] == []
    assert not (tmp_path / "run" / "models" / "teacher").exists()
    # Other settings of the teacher are other work.
    said = changed(jobs_of)
    assert "targets/unlabelled/manifest.json was made from" in said


def changed(jobs_of: Callable[..., dict[str, Any]]) -> str:
    """Return what the job says of targets that a teacher of other settings made."""
    with pytest.raises(AssertionError) as failed:
        jobs_of("generate_targets", "--set", "targets.teacher.settings.weights='other.pt'")
    return str(failed.value)


def test_no_job_trains_a_teacher() -> None:
    """It is left out of a run, but for the rounds whose teacher learns from targets."""
    own = [each.step for each in launches(["--kaldi-dir", "data"], 1, 1, has_own_teacher=True)]
    trained = [each.step for each in launches(["--kaldi-dir", "data"], 1, 1)]
    assert [*own[:7], "train_teacher", *own[7:]] == trained
    twice = [
        each.step
        for each in launches(["--kaldi-dir", "d"], 1, 1, num_target_rounds=2, has_own_teacher=True)
    ]
    again = ["generate_targets", "repartition"]
    assert twice[7:12] == [*again, "train_teacher", *again]
