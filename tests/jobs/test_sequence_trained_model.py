"""A training job trains its model on by sMBR where the recipe says so, and only there."""

import json
import shutil
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.audit.verify import Expectation, verify_run
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import BASELINE, lattices_step, model_step, sequence_trained
from tests.job_programs import RunJob
from tests.training.sequence_training.toy_run import write_toy_run
from tests.whole_path.processes import TINY

ON = (
    *("--set", "sequence_training.baseline=true"),
    *("--set", 'sequence_training.trainer={name="gtc", gradient_threshold=0.01}'),
    *("--set", "sequence_training.lattices.ngram_order=1"),
    *("--set", "loss_budget=0.2"),
)
MADE = (model_step(BASELINE), lattices_step(BASELINE), model_step(sequence_trained(BASELINE)))


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """A run that is aligned, without a model; the arguments that name it."""
    _, run_uri, corpus_uri = write_toy_run(tmp_path)
    shutil.rmtree(Path(run_uri) / "models")
    return ("--recipe", str(TINY), "--run", run_uri, "--set", f'corpus.uri="{corpus_uri}"')


def test_the_job_decodes_lattices_and_trains_on(options: tuple[str, ...], run_job: RunJob) -> None:
    """Three steps in one job, all in its record; again there is nothing to do; all verify."""
    listed = json.loads(run_job("train_baseline", *options, *ON, "--dry-run", "--json").out)
    assert tuple(listed["writes"]) == MADE
    done = run_job("train_baseline", *options, *ON, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert tuple(answer["manifests"]) == MADE
    assert answer["manifests"][lattices_step(BASELINE)]["quarantined"] == 1
    again = json.loads(run_job("train_baseline", *options, *ON, "--json").out)
    assert again["status"] == "nothing to do"
    run_uri = options[3]
    store = ObjectStore((str(Path(run_uri).parent),))
    found = verify_run(store, run_uri, str(Path(run_uri).parent / "corpus"), print, Expectation())
    assert [each for each in found.findings if BASELINE in each.object] == []
    trained_on = read_manifest(store, run_uri, MADE[2])
    assert trained_on.config["warm_start"] == BASELINE
    assert trained_on.config["training"]["trainer"]["name"] == "gtc"
    assert "expected_frame_accuracy" in trained_on.statistics["curve"][-1]


def test_without_the_switch_there_is_cross_entropy_alone(
    options: tuple[str, ...], run_job: RunJob
) -> None:
    """Only the model of cross-entropy is made."""
    done = json.loads(run_job("train_baseline", *options, "--json").out)
    assert tuple(done["manifests"]) == MADE[:1]
    manifest = json.loads((Path(options[3]) / MADE[0] / "manifest.json").read_text())
    assert manifest["config"]["criterion"] == "cross_entropy"
    assert "expected_frame_accuracy" not in manifest["statistics"]["curve"][-1]


def test_a_trainer_that_cannot_work_is_refused_at_once(
    options: tuple[str, ...], run_job: RunJob
) -> None:
    """HTM's groups of 2 need 2 ranks: no hours of cross-entropy come before that message."""
    htm = 'sequence_training.trainer={name="htm", group_size=2, block_size=5}'
    said = run_job("train_baseline", *options, *ON, "--set", htm)
    assert said.code == 2
    assert "baseline_smbr: trainer: " in said.err
    assert not (Path(options[3]) / "models").exists()
