"""The recipes of papers 000, 001 and 004 run, from speech to their models, on a few utterances."""

import shutil
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.run import JOBS
from jobs.run_table import BUILD_GRAPH, STEPS, TRAIN_BASELINE, TRAIN_TEACHER
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP
from tests.job_programs import exit_code
from tests.small_corpus import plain_loop
from tests.training.forked_programs import run_on_ranks
from tests.whole_path.processes import REPOSITORY
from tests.whole_path.reduced_an4 import write_reduced_an4

SMALL = (
    *("cluster=demo", "loss_budget=0.1", "selection.file_hours=0.01"),
    *("bootstrap.num_iterations=2", "bootstrap.max_gaussians=1", "bootstrap.max_hours=0.01"),
    *("senones.max_senones=60", "senones.min_count=100", "evaluation.max_active=1000"),
    *("aligner.num_epochs=1", "aligner.num_chunked_epochs=1"),
)
LSTM = ("models.student.num_layers=1", "models.student.num_units=8")


@dataclass(frozen=True)
class Small:
    """Small: a recipe, the step that trains its model, its ranks, and what makes it small."""

    recipe: str
    step: str
    num_ranks: int
    overrides: tuple[str, ...]

    def prepare(self, folder: Path) -> None:
        """Run each step up to alignment."""
        for name in takewhile(lambda name: name != BUILD_GRAPH, STEPS):
            own = ("--kaldi-dir", str(folder / "kaldi")) if name == "ingest" else ()
            assert exit_code(name, *self.shared(folder), *own) == 0

    def shared(self, folder: Path) -> tuple[str, ...]:
        """Return the arguments of all steps."""
        settings = [part for each in (*SMALL, *self.overrides) for part in ("--set", each)]
        return ("--recipe", self.recipe, "--run", str(folder / "run"), *settings)

    def model(self, folder: Path) -> dict[str, Any]:
        """Run each step up to the model; return its settings and its curve."""
        self.prepare(folder)
        run_on_ranks(self.num_ranks, JOBS / f"{self.step}.py", self.shared(folder), REPOSITORY)
        store, name = ObjectStore((str(folder / "run"),)), self.step.removeprefix("train_")
        manifest = read_manifest(store, str(folder / "run"), f"models/{name}")
        aligner = read_manifest(store, str(folder / "run"), "models/aligner")
        return {**manifest.config, **manifest.statistics, "aligner": aligner.statistics["curve"]}


@pytest.fixture(scope="module")
def bootstrapped(an4_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that all three recipes share: up to the bootstrap their small settings are equal."""
    folder = tmp_path_factory.mktemp("papers")
    write_reduced_an4(an4_dir, folder / "kaldi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark_steps, "distribute_on_spark", plain_loop)
        Small("htm_2000h", TRAIN_BASELINE, 1, LSTM).prepare(folder)
    shutil.rmtree(folder / "run" / "models")
    for step in (ALIGNMENT_STEP, DEV_ALIGNMENT_STEP):
        shutil.rmtree(folder / "run" / step)
    return folder


@pytest.fixture
def small(
    request: pytest.FixtureRequest,
    bootstrapped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """What a recipe's model says of its training."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    shutil.copytree(bootstrapped, tmp_path / "copy", symlinks=True)
    return request.param.model(tmp_path / "copy")


def each(recipe: str, step: str, num_ranks: int, *overrides: str) -> Any:
    return pytest.mark.parametrize(
        "small", [Small(recipe, step, num_ranks, overrides)], indirect=True, ids=[recipe]
    )


@each(
    "htm_2000h",
    TRAIN_BASELINE,
    4,
    *LSTM,
    *("baseline.trainer.group_size=2", "baseline.trainer.block_size=2"),
    *("baseline.num_epochs=2", "baseline.num_chunked_epochs=2"),
)
def test_htm_begins_with_what_one_rank_pretrained(small: dict[str, Any]) -> None:
    """An eighth of the speech for one rank, then newbob over all of it, in two tiers (000 3.2)."""
    (pretrained,) = small["aligner"]
    epochs = small["curve"]
    assert pretrained["num_ranks"] == 1
    assert 4 * pretrained["num_frames"] < epochs[0]["num_frames"]
    assert (small["warm_start"], len(epochs)) == ("aligner", 2)
    assert (small["training"]["trainer"]["name"], small["num_ranks"]) == ("htm", 4)
    assert all("validation_cross_entropy" in epoch for epoch in epochs)


@pytest.mark.chaos
@each(
    "one_bit_309h",
    TRAIN_BASELINE,
    2,
    *("models.student.num_layers=2", "models.student.num_units=8"),
    *("baseline.num_epochs=2", "baseline.num_chunked_epochs=2", "baseline.cold_start_one_in=3"),
    *("baseline.minibatch_frames=64", "baseline.minibatch_selection.factors=[1,2]"),
    *("baseline.minibatch_selection.every_hours=0.005",),
    *("baseline.minibatch_selection.trial_hours=0.001",),
)
def test_one_bit_starts_cold_and_selects_minibatches(small: dict[str, Any]) -> None:
    """Three parts of the first epoch, the first without quantization, and trials (004 4, 5.2)."""
    cold, *others = small["curve"]
    assert len(others) == 3
    assert cold["trainer"]["residual_norm"] == 0 < others[0]["trainer"]["residual_norm"]
    assert any(epoch["minibatch_trials"] for epoch in small["curve"])
    assert small["training"]["trainer"]["adagrad"]["place"] == "aggregate"


@pytest.mark.chaos
@each(
    "decentralized_2000h",
    TRAIN_TEACHER,
    2,
    *LSTM,
    *("models.teacher.num_layers=2", "models.teacher.num_units=8"),
    *("models.teacher.num_projected_units=4", "teacher.num_epochs=2"),
    "teacher.num_chunked_epochs=2",
)
def test_decentralized_ranks_average_their_models(small: dict[str, Any]) -> None:
    """The paper's network, of which both ranks send each step's model (001 4)."""
    assert (small["model"]["name"], small["num_ranks"]) == ("projected_blstm", 2)
    assert small["training"]["trainer"] == {"name": "d1d_psgd"}
    assert all(epoch["trainer"]["bytes_sent"] > 0 for epoch in small["curve"])
