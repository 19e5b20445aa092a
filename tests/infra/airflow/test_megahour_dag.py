"""Airflow runs every step of a run by real spark-submit and torchrun, then nightly increments.

A killed step's retry continues it; a night extends the last night that succeeded.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore, join_uri
from jobs.run_table import STEPS, written
from pipeline.runs.increment import Bases, read_bases
from pipeline.runs.manifest import manifest_uri, read_manifest
from pipeline.runs.names import SUBSETS, features_step
from pipeline.steps.features import extract_features
from pipeline.steps.ingestion.kaldi_directory import DirectoryIngestion, plan_copy
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.infra.airflow.dag_folder import DagFolder, commits_below
from tests.job_programs import RunJob
from tests.small_corpus import serially
from tests.whole_path.processes import TINY
from tests.whole_path.reduced_an4 import read_table, write_reduced_an4
from training.settings.recipe import read_recipe

pytestmark = [pytest.mark.timeout(3600), pytest.mark.chaos]

FIRST, FAILED, LAST = "2026-11-21", "2026-11-22", "2026-11-23"
NIGHT = "{{ ds }}"
LAST_SUCCESS = (
    "{{ prev_data_interval_start_success | ds if prev_data_interval_start_success else 'first' }}"
)
ALL_BUT_SELECTION = r"(?!(ingest|select_utterances)\.run$).*"
SPEAKERS = 2
"""The unlabelled speakers of AN4 of whom each night brings an utterance."""


@dataclass(frozen=True)
class Batches:
    """Batches holds what Airflow said of the first run and of the nights by date."""

    folder: DagFolder
    first: dict[str, Any]
    commits_at_the_kill: dict[Path, int]
    nights: dict[str, dict[str, Any]]

    def run_uri(self, name: str) -> str:
        return str(self.folder.run(name))

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((str(self.folder.folder / "runs"),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> DagFolder:
    return DagFolder.at(tmp_path_factory.mktemp("airflow"))


@pytest.fixture
def batches(folder: DagFolder, run_job: RunJob, an4_dir: Path, kept: dict[str, Batches]) -> Batches:
    """Run the DAG of the first run, and that of three nights, the second of which fails."""
    if "batches" not in kept:
        kept["batches"] = run_batches(folder, run_job, an4_dir)
    return kept["batches"]


@pytest.fixture(scope="module")
def kept() -> dict[str, Batches]:
    """Hold the batches for all tests; `run_job` is each test's own."""
    return {}


def run_batches(folder: DagFolder, run_job: RunJob, an4_dir: Path) -> Batches:
    kaldi_dir = write_reduced_an4(an4_dir, folder.folder / "kaldi")
    folder.add(run_job, "first", "first", "--kaldi-dir", str(kaldi_dir))
    with folder.running("first", FIRST) as running:
        commits = running.kill_driver(folder.run("first"))
        first = running.answer()
    manifest = str(folder.folder / "nights" / f"{NIGHT}.jsonl")
    source = ("--manifest", manifest, "--format", "table", "--schedule", "@daily")
    folder.add(run_job, "nightly", NIGHT, *source, "--extends", str(folder.run(LAST_SUCCESS)))
    nights = {}
    for number, date in enumerate((FIRST, FAILED, LAST)):
        if date != FAILED:
            write_night(an4_dir, folder.folder / "nights", date, number)
        left_out = (ALL_BUT_SELECTION,) if date == LAST else ()
        with folder.running("nightly", date, *left_out) as running:
            nights[date] = running.answer()
    return Batches(folder, first, commits, nights)


def write_night(an4_dir: Path, nights: Path, date: str, number: int) -> None:
    """Write a night's manifest and its audio: an utterance of some speakers, none of them new."""
    nights.mkdir(exist_ok=True)
    audio, speaker_of = (read_table(an4_dir / name) for name in ("wav.scp", "utt2spk"))
    rows = []
    for speaker in (an4_dir / "unlabelled.speakers").read_text().split()[:SPEAKERS]:
        # The corpus has the first five.
        name = [key for key, each in speaker_of.items() if each == speaker][5 + number]
        shutil.copy(an4_dir / audio[name], nights / f"{name}.flac")
        row = {"utterance_id": name, "speaker_id": speaker, "audio_uri": f"{name}.flac"}
        rows.append({**row, "created_at": f"{date}T00:00:00+00:00"})
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (nights / f"{date}.jsonl").write_text(text)


def assets_of(batches: Batches, run: str) -> list[str]:
    recipe, uri = read_recipe(str(TINY)), batches.run_uri(run)
    names = [name for name, each in written(recipe).items() if not each.is_optional]
    return sorted(f"file://{manifest_uri(uri, name)}" for name in names)


def test_every_step_is_run_and_a_killed_one_continues(batches: Batches) -> None:
    """All steps in order, two rounds of alignment; the killed one resumed in its second try.

    The assets are all manifests of the run, and selection and features have the bytes of a plain
    loop.
    """
    said, run = batches.first, batches.folder.run("first")
    assert said["state"] == "success"
    steps = list(STEPS)
    place = steps.index("realign") + 1
    steps[place:place] = ["train_aligner_2", "realign_2"]
    assert said["order"] == [f"{step}.{task}" for step in steps for task in ("run", "manifests")]
    tries = {f"{step}.run": ["success", 1] for step in steps}
    assert {key: said["tasks"][key] for key in tries} == tries | {
        "extract_features.run": ["success", 2]
    }
    assert said["assets"] == assets_of(batches, "first")
    assert all(Path(uri.removeprefix("file://")).exists() for uri in said["assets"])

    before, after = batches.commits_at_the_kill, commits_below(run)
    assert 0 < len(before) < len(after)
    assert before == {path: after[path] for path in before}, "a committed task was done again"

    plain = str(batches.folder.run("plain"))
    recipe, corpus = read_recipe(str(TINY)), join_uri(plain, "corpus")
    plan_copy(DirectoryIngestion(batches.folder.folder / "kaldi")).write(batches.store, corpus)
    for subset in SUBSETS:
        uri, budget = metadata_uri(corpus, subset), recipe.loss_budget
        place = batches.store, plain, subset
        select_utterances(*place, uri, recipe.selection, budget, serially)
        extract_features(*place, corpus, recipe.features, budget, serially)
        name = features_step(subset)
        stored = batches.store.get(manifest_uri(str(run), name))
        assert batches.store.get(manifest_uri(plain, name)) == stored


def test_a_night_extends_the_first_run_by_all_steps(batches: Batches, run_job: RunJob) -> None:
    """Its new speech joins the first run's, under that teacher, and `verify` finds no fault."""
    said, night, first = batches.nights[FIRST], batches.run_uri(FIRST), batches.run_uri("first")
    assert said["state"] == "success"
    assert {state for state, _ in said["tasks"].values()} == {"success"}
    assert said["assets"] == assets_of(batches, FIRST)
    assert all(Path(uri.removeprefix("file://")).exists() for uri in said["assets"])
    for step in ("features", "targets", "partitions"):
        old, new = (
            read_manifest(batches.store, uri, f"{step}/unlabelled") for uri in (first, night)
        )
        assert new.extends is not None
        assert new.extends.run == first
        assert new.tally_out.utterances == old.tally_out.utterances + SPEAKERS
    assert read_manifest(batches.store, night, "models/teacher").is_inherited
    assert not read_manifest(batches.store, night, "models/student").is_inherited
    settings = [
        part for each in batches.folder.settings.items() for part in ("--set", "=".join(each))
    ]
    verified = run_job("verify", "--recipe", str(TINY), "--run", night, *settings)
    assert verified.code == 0, verified.out


def test_a_failed_night_is_not_extended(batches: Batches) -> None:
    """Without its manifest a night fails after its retries; the next extends the one before it."""
    failed = batches.nights[FAILED]
    assert failed["state"] == "failed"
    assert failed["tasks"]["ingest.run"] == ["failed", 2]
    assert failed["tasks"]["select_utterances.run"][0] == "upstream_failed"
    assert failed["assets"] == []
    assert batches.nights[LAST]["state"] == "success"
    for date, bases in ((FIRST, ["first"]), (LAST, [FIRST, "first"])):
        found = read_bases(batches.store, batches.run_uri(date))
        assert found == Bases(tuple(map(batches.run_uri, bases)))
    selected = read_manifest(batches.store, batches.run_uri(LAST), "selection/unlabelled")
    before = read_manifest(batches.store, batches.run_uri(FIRST), "selection/unlabelled")
    assert selected.tally_out.utterances == before.tally_out.utterances + SPEAKERS
