"""Jobs say how far they are: conflicts name keys, status counts hours, logs have time and step."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.log_lines import begin_log, log, progress_bar
from infra.settings import plain
from infra.store.object_store import ObjectStore
from jobs.run import JOBS, Launch, chosen_steps, launches
from jobs.status import time_left
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, step_context
from pipeline.runs.manifest import Manifest
from pipeline.runs.sealed_json import seal
from tests.job_programs import RunJob
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

STEP = "features/unlabelled"


def manifest(config: dict[str, Any]) -> Manifest:
    """Return that of three utterances, two hours in all."""
    tally = Tally(3, 7_200_000)
    return Manifest(STEP, config, {}, (), tally_in=tally, tally_out=tally)


def test_a_dry_run_names_the_keys_that_differ(run_job: RunJob, tmp_path: Path) -> None:
    """Of a finished step and of one that has begun: both values and the remedy; exit code 1."""
    store, recipe = ObjectStore((str(tmp_path),)), read_recipe(str(TINY))
    made = manifest(plain(recipe.features))
    store.put(str(tmp_path / STEP / "manifest.json"), made.to_bytes())
    begun = {"step": "extract_features", "started_at": "2026-01-01T00:00:00+00:00"}
    store.put(
        str(tmp_path / "steps/begun/extract_features.json"),
        seal({**begun, "recipe": plain(recipe)}),
    )
    store.put(str(tmp_path / "features/labelled/commits/000000.json"), b"of a task")
    place = ("--recipe", str(TINY), "--run", str(tmp_path))
    same = run_job("extract_features", *place, "--dry-run")
    assert same.code == 0
    assert "another recipe" not in same.out
    seed = recipe.features.seed
    other = run_job("extract_features", *place, "--dry-run", "--set", f"features.seed={seed + 1}")
    assert other.code == 1
    assert f"{STEP} is of another recipe: seed: {seed} -> {seed + 1}: use another" in other.out
    assert f"features/labelled is of another recipe: features.seed: {seed} ->" in other.out


def test_status_counts_the_hours_of_finished_steps(run_job: RunJob, tmp_path: Path) -> None:
    """A finished step has its hours, others are to do."""
    made = manifest({})
    path = tmp_path / STEP / "manifest.json"
    ObjectStore((str(tmp_path),)).put(str(path), made.to_bytes())
    said = run_job("status", "--recipe", str(TINY), "--run", str(tmp_path), "--json")
    steps = json.loads(said.out)["steps"]["extract_features"]
    assert (steps[STEP]["state"], steps[STEP]["hours_done"]) == ("done", 2.0)
    assert steps["features/labelled"]["state"] == "to do"
    shown = run_job("inspect_object", str(tmp_path / STEP), "--json")
    assert json.loads(shown.out)["tallies"]["hours_out"] == 2.0


def test_status_of_a_step_under_way(run_job: RunJob, tmp_path: Path) -> None:
    """Two of four hours are committed 100 s after the beginning: half is done, 100 s are left."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    selected = replace(manifest({}), step="selection/unlabelled")
    whole = Tally(6, 14_400_000)
    selected = replace(selected, tally_in=whole, tally_out=whole)
    store.put(f"{run_uri}/selection/unlabelled/manifest.json", selected.to_bytes())
    began = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    note = {
        "step": "extract_features",
        "started_at": began,
        "recipe": plain(read_recipe(str(TINY))),
    }
    store.put(f"{run_uri}/steps/begun/extract_features.json", seal(note))
    context = step_context(store, run_uri, STEP, {}, {})
    shard = context.put_output("000000", ".parquet", b"rows", Tally(2, 3_600_000))
    lost = context.put_ledger("000000", [Quarantined("u", "u.flac", "silent", "", 9, 3_600_000)])
    context.commit(
        Commit(
            "000000", context.fingerprint, (shard,), lost, Tally(3, 7_200_000), Tally(1, 3_600_000)
        )
    )
    place = ("--recipe", str(TINY), "--run", run_uri)
    step = json.loads(run_job("status", *place, "--json").out)["steps"]["extract_features"][STEP]
    assert (step["state"], step["hours_done"], step["hours_in"]) == ("under way", 1.0, 4.0)
    assert step["quarantined"] == 1
    assert 99 < step["left_s"] < 1000  # the clock of a busy machine
    said = run_job("status", *place).out
    assert re.search(r"features/unlabelled\s+under way\s+1\.00 of 4\.00\s+1  about", said)


def test_status_has_a_cluster_file_of_its_own(run_job: RunJob, tmp_path: Path) -> None:
    """A recipe that names no cluster takes the file of each job, as hours_1m does."""
    said = run_job("status", "--recipe", "hours_1m", "--run", str(tmp_path))
    assert said.code == 0, said.err
    assert "0 of" in said.out


def test_the_time_left_follows_the_rate_so_far() -> None:
    """A quarter in 100 s leaves 300 s; without hours nothing can be said."""
    assert time_left(1.0, 4.0, 100.0) == 300.0
    assert time_left(0.0, 4.0, 100.0) < 0
    assert time_left(5.0, 4.0, 100.0) < 0


def test_log_lines_have_time_and_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, or as one JSON object a line; progress of short work writes no line."""
    monkeypatch.setenv("MEGAHOUR_LOG_FORMAT", "text")
    monkeypatch.setenv("MEGAHOUR_LOG_STEP", "")
    begin_log("align", "text")
    log("begins")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}Z align: begins\n", capsys.readouterr().err)
    begin_log("align", "json")
    log("begins", rank=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["step"], line["message"], line["rank"]) == ("align", "begins", 3)
    assert list(progress_bar([1, 2], description="short")) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("infra.log_lines.PROGRESS_INTERVAL_S", 0.0)
    assert list(progress_bar([1, 2], description="long")) == [1, 2]
    lines = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    assert lines[-1]["message"].startswith("long: 2 of 2 tasks,")


def test_steps_of_a_run_are_chosen() -> None:
    """--from leaves out those before it, --only all but those that it names."""

    class Arguments:
        first: str | None = None
        only: tuple[str, ...] = ()

    def chosen(first: str | None, *only: str) -> list[str]:
        given = Arguments()
        given.first, given.only = first, only
        return [each.step for each in chosen_steps(steps, given)]  # type: ignore[arg-type]

    steps: list[Launch] = launches("data", 2, 4)
    assert chosen(None) == [each.step for each in steps]
    assert chosen("certify") == ["certify", "report"]
    assert chosen(None, "align", "ingest") == ["ingest", "align"]
    assert chosen("align", "ingest", "report") == ["report"]
    assert all((JOBS / f"{each.step}.py").is_file() for each in steps)
