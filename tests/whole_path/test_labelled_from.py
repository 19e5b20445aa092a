"""A run of labelled speech alone, and runs of other selections that take its models over.

The jobs run in this process, and their Spark tasks in a plain loop; the teacher's server is real.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.run_table import written
from pipeline.runs.increment import Bases, read_bases
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, sha256
from pipeline.runs.names import model_step
from tests.job_programs import RunJob, Said
from tests.small_corpus import plain_loop
from tests.whole_path.processes import TINY
from tests.whole_path.test_own_teacher_run import write_kaldi_dir
from training.models.store import load_model
from training.settings.recipe import read_recipe

pytestmark = pytest.mark.chaos

SETTINGS = (
    "models.normalization='labelled'",
    "student.trainer={name = 'synchronous'}",
    "student.warm_start='baseline'",
    "teacher.trainer={name = 'synchronous'}",
    "alignment.rounds=1",
    "sequence_training.baseline=true",
    "sequence_training.lattices.ngram_order=1",
    "loss_budget=0.2",
)
SUPERVISED = (
    "bootstrap",
    "train_aligner",
    "realign",
    "build_graph",
    "train_baseline",
    "train_teacher",
)
OF_UNLABELLED = ("generate_targets", "repartition", "train_student", "certify")


@dataclass(frozen=True)
class Runs:
    """Runs is a folder of runs beside a corpus, whose unlabelled metadata may come later."""

    folder: Path
    run_job: RunJob

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((str(self.folder),))

    @property
    def unlabelled(self) -> Path:
        return self.folder / "corpus" / "metadata" / "unlabelled"

    def uri(self, name: str) -> str:
        return str(self.folder / "runs" / name)

    def job(self, job: str, run: str, *options: str) -> Said:
        """Run a job, by the settings of all runs and by others."""
        corpus = f"corpus.uri='{self.folder / 'corpus'}'"
        sets = [part for each in (corpus, *SETTINGS) for part in ("--set", each)]
        return self.run_job(job, "--recipe", str(TINY), "--run", self.uri(run), *sets, *options)

    def done(self, job: str, run: str, *options: str) -> dict[str, Any]:
        """Run a job that ends well; return what it says."""
        said = self.job(job, run, "--json", *options)
        assert said.code == 0, f"{job}: {said.err}"
        return json.loads(said.out)

    def manifest(self, run: str, step: str) -> Manifest:
        return read_manifest(self.store, self.uri(run), step)


@pytest.fixture
def runs(tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Ingest a corpus, and take its unlabelled metadata away."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    found = Runs(tmp_path, run_job)
    found.done("ingest", "ingest", "--kaldi-dir", str(write_kaldi_dir(tmp_path / "kaldi")))
    found.unlabelled.rename(tmp_path / "later")
    return found


def test_models_of_labelled_speech_serve_each_selection(runs: Runs) -> None:
    """They need no unlabelled speech; two selections of it train nothing but students."""
    run_labelled_speech_alone(runs)
    (runs.folder / "later").rename(runs.unlabelled)
    taken = ("--labelled-from", runs.uri("labelled"))
    require_refusals(runs, taken)
    require_equal_student(runs, taken)
    # Another selection takes the same from a run that has taken it over.
    again = ("--labelled-from", runs.uri("first"), "--set", "selection.seed=6")
    for job in ("select_utterances", "extract_features", *SUPERVISED):
        runs.done(job, "second", *again)
    bases = Bases((), (runs.uri("first"), runs.uri("labelled")))
    assert read_bases(runs.store, runs.uri("second")) == bases
    teacher, first = (runs.manifest(run, "models/teacher") for run in ("second", "labelled"))
    assert teacher.outputs == tuple(each.seen_from(runs.uri("labelled")) for each in first.outputs)
    assert runs.done("verify", "second", *again[2:])["findings"] == []


def run_labelled_speech_alone(runs: Runs) -> None:
    """Baseline and teacher are trained and scored; the other steps say what they lack."""
    for job in ("select_utterances", "extract_features"):
        runs.done(job, "labelled")
    refused = runs.job("bootstrap", "labelled", "--set", "models.normalization='all'")
    assert refused.code == 2
    assert "models: normalization = 'all': " in refused.err
    assert "or set 'labelled'" in refused.err
    for job in SUPERVISED:
        runs.done(job, "labelled")
    for model in ("aligner", "baseline", "baseline_smbr", "teacher"):
        inputs = runs.manifest("labelled", model_step(model)).inputs
        assert "features/labelled" in inputs
        assert "features/unlabelled" not in inputs
    for job in OF_UNLABELLED:
        refused = runs.job(job, "labelled")
        assert refused.code == 2, refused.err
        assert "has no features of unlabelled speech" in refused.err
        assert f"--labelled-from {runs.uri('labelled')}" in refused.err
    for job in ("evaluate", "report"):
        runs.done(job, "labelled")
    report = json.loads(Path(runs.uri("labelled"), "report", "report.json").read_text())
    assert report["wer"].keys() == {"baseline", "teacher", "baseline_smbr"}
    assert report["hours"].keys() == {"labelled", "heldout"}
    page = Path(runs.uri("labelled"), "report", "report.html").read_text()
    assert "This run has no unlabelled speech, and so no targets and no student" in page
    assert runs.done("verify", "labelled")["findings"] == []


def require_refusals(runs: Runs, taken: tuple[str, str]) -> None:
    """What the other run's models do not fit is refused, with the key, both values, a remedy."""
    said = runs.job("check", "other", *taken, "--set", "teacher.seed=6", "--supervised-ranks=1")
    assert said.code == 2
    assert "models/teacher was made with other settings: training.seed: 5 -> 6" in said.err
    assert "begin a run without --labelled-from" in said.err
    # Ingest would write this lexicon to the run's corpus, which has none yet.
    kaldi_dir = shutil.copytree(runs.folder / "kaldi", runs.folder / "kaldi2")
    options = (*taken, "--set", f"corpus.uri='{runs.folder / 'corpus2'}'", "--supervised-ranks=1")
    options = (*options, "--student-ranks=1", "--kaldi-dir", str(kaldi_dir))
    assert runs.job("check", "other", *options).code == 0
    with (kaldi_dir / "lexicon.txt").open("a") as file:
        file.write("sees S IY S\n")
    said = runs.job("check", "other", *options)
    assert (said.code, "by another lexicon" in said.err) == (2, True)
    said = runs.job("select_utterances", "other", *taken, "--set", "models.normalization='all'")
    assert said.code == 2
    assert "models: normalization = 'all': need 'labelled' with --labelled-from" in said.err
    lexicon = runs.folder / "corpus" / "lexicon.txt"
    text = lexicon.read_bytes()
    lexicon.write_bytes(text + b"sees S IY S\n")
    said = runs.job("bootstrap", "other", *taken)
    lexicon.write_bytes(text)
    assert said.code == 2
    digests = f"SHA-256 {sha256(text)[:12]} -> {sha256(text + b'sees S IY S' + bytes([10]))[:12]}"
    assert f"lexicon.txt: {digests}" in said.err
    said = runs.job("bootstrap", "other", "--labelled-from", runs.uri("ingest"))
    assert said.code == 2
    assert "ingest is unfinished: it has no manifest of alignments/bootstrap" in said.err
    assert read_bases(runs.store, runs.uri("other")) == Bases(), "what is refused is not recorded"


def require_equal_student(runs: Runs, taken: tuple[str, str]) -> None:
    """All models but the student are the other run's, and it begins with their normalization."""
    runs.done("check", "first", *taken, "--supervised-ranks=1", "--student-ranks=1")
    runs.done("select_utterances", "first", *taken)
    steps = ("extract_features", *SUPERVISED, *OF_UNLABELLED[:3], "evaluate", "report")
    for job in steps:
        runs.done(job, "first")  # the run itself says what it takes over
    recipe = read_recipe(str(TINY), SETTINGS)
    for name, each in written(recipe).items():
        if runs.store.exists(manifest_uri(runs.uri("first"), name)):
            manifest = runs.manifest("first", name)
            assert manifest.is_inherited == (each.in_increment == "labelled"), name
    student, baseline = (
        load_model(runs.store, runs.uri("first"), name, recipe.models.student).model
        for name in ("student", "baseline")
    )
    assert torch.equal(student.mean, baseline.mean)
    assert torch.equal(student.inverse_deviation, baseline.inverse_deviation)
    assert not torch.equal(*(each.state_dict()["output.weight"] for each in (student, baseline)))
    curve = runs.manifest("first", "models/student").statistic("curve", list[dict[str, Any]])
    ended = runs.manifest("first", "models/baseline").statistic("curve", list[dict[str, Any]])
    # It goes on where the baseline has ended.
    assert curve[0]["cross_entropy"] < ended[0]["cross_entropy"]
    report = json.loads(Path(runs.uri("first"), "report", "report.json").read_text())
    assert report["labelled_from"] == [runs.uri("labelled")]
    assert {"student", "teacher"} <= report["wer"].keys()
    status = runs.done("status", "first")
    assert (status["extends"], status["labelled_from"]) == ([], [runs.uri("labelled")])
    verified = runs.job("verify", "first")
    assert verified.code == 0, verified.out
    assert f"labelled from {runs.uri('labelled')}, whose objects are verified" in verified.out
    traced = runs.job("inspect_object", "first", "labelled0-0")
    assert f"selected by {runs.uri('labelled')}" in traced.out
    assert "models" in traced.out
    traced = runs.job("inspect_object", "first", "unlabelled0-0")
    assert "partitions/unlabelled: written" in traced.out
