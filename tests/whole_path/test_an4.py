"""Every step runs on recorded speech, by the documented way to one's own corpus."""

import json
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.ledger import ledger_reasons
from tests.whole_path.manifests import manifest_bytes, require_balance
from tests.whole_path.processes import left_behind, run_all_steps, run_step
from tests.whole_path.reduced_an4 import write_reduced_an4

pytestmark = pytest.mark.timeout(1200)

STEPS = (
    *("ingest", "select_utterances", "extract_features", "align", "train_baseline"),
    *("train_teacher", "generate_targets", "repartition", "train_student"),
    *("evaluate", "certify", "report"),
)
MODELS = {"baseline", "teacher", "student"}


@dataclass(frozen=True)
class WholeRun:
    """WholeRun is a finished run: its place, its settings, and its output."""

    folder: Path
    kaldi_dir: Path
    environment: dict[str, str]
    mark: str
    output: str

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((str(self.folder),))

    def report(self) -> dict[str, dict]:
        return json.loads((self.folder / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def whole(
    an4_dir: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> WholeRun:
    folder = tmp_path_factory.mktemp("an4")
    kaldi_dir = write_reduced_an4(an4_dir, folder / "kaldi")
    mark = f"whole-path-{uuid.uuid4().hex}"
    marked = {**environment, "MEGAHOUR_TEST": mark}
    done = run_all_steps(str(folder / "run"), kaldi_dir, marked)
    return WholeRun(folder / "run", kaldi_dir, marked, mark, done.stdout)


def test_the_report_has_the_documented_shape(whole: WholeRun) -> None:
    """It has three models' word error rates under "all", their reduction, hours, and every step."""
    report = whole.report()
    assert {name: set(rates) for name, rates in report["wer"].items()} == {
        name: {"all"} for name in MODELS
    }
    baseline, student = report["wer"]["baseline"]["all"], report["wer"]["student"]["all"]
    assert 0 < baseline <= 200
    assert report["werr"]["all"] == pytest.approx(100 * (baseline - student) / baseline)
    assert set(report["steps"]) == set(STEPS) - {"report"}
    for step in report["steps"].values():
        assert step.keys() == {"seconds", "utterances_in", "utterances_out", "quarantined"}
        assert step["seconds"] >= 0
        assert step["utterances_in"] == step["utterances_out"] + step["quarantined"] > 0
    table = re.search(r"^baseline +([0-9.]+)$", whole.output, re.MULTILINE)
    assert table is not None
    assert float(table[1]) == pytest.approx(baseline, abs=0.05)


def test_the_page_needs_nothing_but_itself(whole: WholeRun) -> None:
    """report.html shows the rates, and loads neither script nor anything from elsewhere."""
    page = (whole.folder / "report" / "report.html").read_text()
    assert f"{whole.report()['wer']['student']['all']:.1f}" in page
    assert not re.search(r"<script|<link|(src|href)=[\"']?(https?:)?//|url\((?!#)|@import", page)


def test_hours_in_are_hours_out_and_quarantined(whole: WholeRun) -> None:
    """They agree in each manifest and from step to step, though one audio file is cut short."""
    manifests = require_balance(whole.store, str(whole.folder))
    features = manifests["features/unlabelled"]
    assert features.quarantined.utterances == 1
    assert features.quarantined.duration_ms > 1000
    assert ledger_reasons(whole.store, str(whole.folder), features.ledgers) == {"truncated": 1}
    report = whole.report()
    assert report["hours"]["unlabelled"] == pytest.approx(features.tally_out.hours)
    assert report["quarantine"]["features/unlabelled"] == {"truncated": 1}


def test_the_student_was_trained_in_two_tiers(whole: WholeRun) -> None:
    """Four ranks train in two groups of two, and the recipe of each step is kept with the run."""
    manifest = json.loads((whole.folder / "models" / "student" / "manifest.json").read_text())
    assert manifest["statistics"]["num_ranks"] == 4
    config = manifest["config"]
    assert (config["trainer"]["name"], config["trainer"]["group_size"]) == ("htm", 2)
    for step in STEPS:
        record = json.loads((whole.folder / "steps" / f"{step}.json").read_text())
        assert record["recipe"]["student"]["trainer"]["name"] == "htm"


def test_training_again_gives_the_same_bytes(whole: WholeRun, tmp_path: Path) -> None:
    """GTC on 2 ranks and HTM on 4 repeat, in a copy of the run; --json prints one object."""
    again = tmp_path / "run"
    shutil.copytree(whole.folder, again)
    for model in ("baseline", "student"):
        shutil.rmtree(again / "models" / model)
        done = run_step(f"train_{model}", str(again), whole.environment, "--json")
        assert done.returncode == 0, done.stderr[-4000:]
        assert json.loads(done.stdout)["status"] == "done"
    store = ObjectStore((str(again),))
    assert manifest_bytes(store, str(again)) == manifest_bytes(whole.store, str(whole.folder))


def test_no_process_is_left_behind(whole: WholeRun) -> None:
    """No rank and no Java is left, and the teacher's servers end when they have been idle."""
    deadline = time.monotonic() + 60
    while (left := left_behind(whole.mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
