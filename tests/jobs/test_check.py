"""Mistakes that a run would find after hours are reported before its first step."""

import json
from pathlib import Path

import pytest
import torch

from tests.job_programs import RunJob, Said
from tests.whole_path.processes import TINY

LEXICON = "A AH\nB B IY\nC S IY\n"
PASSWORD = "hunter/2"


@pytest.fixture
def kaldi_dir(tmp_path: Path) -> Path:
    (tmp_path / "lexicon.txt").write_text(LEXICON)
    return tmp_path


def require_refusal(said: Said, *parts: str) -> None:
    """Require exit code 2 and one line that holds `parts`."""
    assert (said.code, said.out) == (2, ""), said
    (line,) = said.err.splitlines()
    for part in parts:
        assert part in line


def check(run_job: RunJob, *options: str) -> Said:
    return run_job("check", "--recipe", str(TINY), "--run", "runs/x", *options)


def test_all_is_well(run_job: RunJob, kaldi_dir: Path) -> None:
    """One line, or one JSON object, or nothing; nothing is written."""
    ranks = ("--supervised-ranks", "3", "--student-ranks", "4", "--kaldi-dir", str(kaldi_dir))
    assert check(run_job, *ranks) == Said(0, "check: tiny: all is well\n", "")
    assert check(run_job, *ranks, "--quiet") == Said(0, "", "")
    found = json.loads(check(run_job, *ranks, "--json").out)
    assert found["ranks"] == {"aligner": 1, "baseline": 3, "teacher": 3, "student": 4}
    assert not Path("runs/x").exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--student-ranks", "3"), ("student: trainer: group_size = 2: need a divisor of 3",)),
        (("--student-ranks", "0"), ("--student-ranks 0: need 1..1024",)),
        (("--supervised-ranks", "1025"), ("--supervised-ranks 1025: need 1..1024",)),
        (
            ("--student-ranks", "2", "--set", "student.trainer.block_learning_rate=1.5"),
            ("student: trainer: momentum_constant = 1.0: need at least",),
        ),
        (("--set", "teacher.trainer.momentum_constant=0.1"), ("teacher: trainer: momentum",)),
        (("--set", "baseline.minibatch_frames=-1"), ("minibatch_frames = -1: need 1..10000000",)),
        (
            ("--set", "models.teacher.num_layers=100", "--set", "models.teacher.num_units=16384"),
            ("teacher: a model of ", "parameters needs ", "the memory of this host: lower num_"),
        ),
        (("--set", "targets.k=61"), ("k = 61: need at most senones.max_senones = 60",)),
        (("--cluster", "moon"), ("cluster 'moon'",)),
        (("--kaldi-dir", "nowhere"), ("--kaldi-dir nowhere is not a directory",)),
        (("--run", f"s3://me:{PASSWORD}@bucket/x"), ("a user, password or port",)),
        (("--run", f"https://me:{PASSWORD}@host/x"), ("https://***: unknown scheme",)),
    ],
)
def test_what_cannot_be_done_is_named(
    run_job: RunJob, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """The exit code is 2; the message names the values and the bound, and no password."""
    said = check(run_job, *options)
    require_refusal(said, *parts)
    assert PASSWORD not in said.err


def test_senones_must_cover_the_phones(run_job: RunJob, kaldi_dir: Path) -> None:
    """Silence is a phone too; as many senones as phones are enough."""
    directory = ("--kaldi-dir", str(kaldi_dir), "--set", "targets.k=3")
    said = check(run_job, *directory, "--set", "senones.max_senones=4")
    require_refusal(said, "max_senones = 4: need at least 5, one for each phone")
    assert check(run_job, *directory, "--set", "senones.max_senones=5").code == 0


def test_a_lexicon_that_is_none_is_named(run_job: RunJob, kaldi_dir: Path) -> None:
    """Its line is named, before anything is copied."""
    (kaldi_dir / "lexicon.txt").write_text("A AH\nB\n")
    said = check(run_job, "--kaldi-dir", str(kaldi_dir))
    require_refusal(said, "lexicon.txt: lexicon line 2: 'B' has no phones")


def test_a_driver_must_fit_into_this_host(run_job: RunJob, tmp_path: Path) -> None:
    """A local master's memory is that of the host, which is named; an instance's is its own."""
    demo = (Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(demo.replace('driver_memory = "1g"', 'driver_memory = "30t"'))
    require_refusal(check(run_job, "--cluster", str(own)), "driver_memory = '30t': need at most")
    own.write_text(
        demo.replace('driver_memory = "1g"', 'driver_memory = "500g"')
        .replace('"local[2]"', '"yarn"')
        .replace('instance_type = "local"', 'instance_type = "p3.16xlarge"')
    )
    said = check(run_job, "--cluster", str(own))
    require_refusal(said, "driver_memory = 512000 MB: need at most 499712 MB, the memory of p3.16x")


def test_a_local_cluster_s_devices_must_be_here(run_job: RunJob, tmp_path: Path) -> None:
    """A GPU that this host has not is named; so is a prefix that keeps a step from writing."""
    demo = (Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(demo.replace('"cpu#1"', '"cuda:99"'))
    require_refusal(check(run_job, "--cluster", str(own)), "devices: 'cuda:99' is not on this host")
    own.write_text(
        demo.replace('write_prefixes = ["{corpus}", ', 'write_prefixes = ["s3://other/x"]#')
    )
    require_refusal(check(run_job, "--cluster", str(own)), "ingest/manifest.json: outside the all")


@pytest.mark.parametrize("program", ["run", "demo"])
@pytest.mark.parametrize(
    "options",
    [
        ("--run", f"s3://me:{PASSWORD}@bucket/x"),
        ("--run", "runs/x", "--set", f"corpus.uri=https://me:{PASSWORD}@host/corpus"),
        ("--run", "runs/x", "--surplus", f"https://host/x?X-Amz-Signature={PASSWORD}"),
    ],
)
def test_a_run_shows_no_password(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch, program: str, options: tuple[str, ...]
) -> None:
    """Neither its messages nor another process's command line hold it: none is started."""
    monkeypatch.setattr("subprocess.Popen", None)
    said = run_job(program, "--recipe", str(TINY), "--kaldi-dir", "nowhere", *options)
    assert said.code == 2
    assert "***" in said.err
    assert PASSWORD not in said.err + said.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_gpu_that_is_absent_is_refused_before_a_run(run_job: RunJob) -> None:
    """The sentence has the choice and the remedies; auto and cpu train on this host's CPU."""
    require_refusal(check(run_job, "--device", "cuda"), "--device cuda: need a GPU, found none: ")
    assert check(run_job, "--device", "cpu").code == check(run_job).code == 0


def test_ranks_are_checked_against_gpus(run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of three GPUs trains the student on two ranks, not on four."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    said = check(run_job, "--student-ranks", "4")
    require_refusal(said, "--device auto: 4 ranks on this host: need at most 3, one for each GPU")
    assert check(run_job, "--student-ranks", "2").code == 0
    assert check(run_job, "--student-ranks", "4", "--device", "cpu").code == 0
