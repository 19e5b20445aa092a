"""Jobs say how far they are: conflicts name keys, and status has hours and rates."""

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.log_lines import begin_log, log, progress_bar, report_error
from infra.settings import plain
from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.job import hours_read, job_parser, open_job
from jobs.run import JOBS, chosen_steps, launches
from jobs.run_table import Written
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, each_commit, step_context
from pipeline.runs.manifest import Extended, Manifest, Output
from pipeline.runs.sealed_json import seal, unseal
from tests.job_programs import RunJob
from tests.small_run import make_run
from tests.training.sequence_training.toy_run import write_toy_run
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

HOUR_MS = 3_600_000
BASELINE = "models/baseline"


def status_of(run_job: RunJob, run_uri: str, *options: str) -> dict[str, Any]:
    """Return what status says of each step, by job."""
    said = run_job("status", "--recipe", str(TINY), "--run", run_uri, *options, "--json")
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)["steps"]
    return found


def put_begun(
    run_uri: str, job: str, hours_before: Mapping[str, float], seconds: int = 100
) -> None:
    """Store that a job was started so many seconds ago, when so many hours were done."""
    began = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    note = {
        "step": job,
        "started_at": began,
        "hours_before": dict(hours_before),
        "recipe": plain(read_recipe(str(TINY))),
    }
    uri = join_uri(run_uri, "steps/started", f"{job}.json")
    ObjectStore((run_uri,)).put(uri, seal(note))


def put_manifest(run_uri: str, manifest: Manifest) -> None:
    uri = join_uri(run_uri, manifest.step, "manifest.json")
    ObjectStore((run_uri,)).put(uri, manifest.to_bytes())


def whole(step: str, hours: int) -> Manifest:
    tally = Tally(hours, hours * HOUR_MS)
    return Manifest(step, {}, {}, (), tally_in=tally, tally_out=tally)


@pytest.mark.parametrize(("before", "left_s"), [(0, 75_000), (2, 150_000)])
def test_the_rate_is_of_all_steps_of_a_kind(
    run_job: RunJob, tmp_path: Path, before: int, left_s: int
) -> None:
    """In 100,000 s a start read the labelled subset's three hours, and one of four unlabelled ones.

    Of the former, another start may have read some before.
    """
    run_uri = str(tmp_path)
    put_manifest(run_uri, whole("features/labelled", 3))
    put_manifest(run_uri, whole("selection/unlabelled", 4))
    put_begun(run_uri, "extract_features", {"features/labelled": before}, seconds=100_000)
    context = step_context(ObjectStore((run_uri,)), run_uri, "features/unlabelled", {}, {})
    tally = Tally(1, HOUR_MS)
    output = context.put_output("000000", ".parquet", b"rows", tally)
    context.commit(Commit("000000", context.fingerprint, (output,), None, tally, Tally()))
    step = status_of(run_job, run_uri)["extract_features"]["features/unlabelled"]
    assert step["left_s"] == pytest.approx(left_s, rel=0.02)


def test_the_rate_is_that_since_steps_of_other_kinds(run_job: RunJob, tmp_path: Path) -> None:
    """Labelling that began 100,000 s ago has been tuned for 1,000 s, and read an hour.

    Three more take 3,000 s: the time of tuning does not count.
    """
    run_uri, began = str(tmp_path), datetime.now(UTC).timestamp() - 1000
    for step in ("features/unlabelled", "graphs/tuning"):
        put_manifest(run_uri, whole(step, 4))
        os.utime(Path(run_uri, step, "manifest.json"), (began, began))
    put_begun(run_uri, "generate_targets", {}, seconds=100_000)
    context = step_context(ObjectStore((run_uri,)), run_uri, "targets/unlabelled", {}, {})
    tally = Tally(1, HOUR_MS)
    output = context.put_output("000000", ".parquet", b"rows", tally)
    context.commit(Commit("000000", context.fingerprint, (output,), None, tally, Tally()))
    lattice = ("--set", "targets.source='lattice'")
    step = status_of(run_job, run_uri, *lattice)["generate_targets"]["targets/unlabelled"]
    assert 2999 < step["left_s"] < 6000  # the clock of a busy machine


def test_a_selection_under_way_has_the_hours_that_were_ingested(
    run_job: RunJob, tmp_path: Path
) -> None:
    """Its tasks' commits lie in its scratch; those that index or pack do not count again."""
    _, run_uri = make_run(tmp_path)
    path = Path(run_uri, "selection/unlabelled/manifest.json")
    selected = json.loads(path.read_text())
    path.unlink()
    put_begun(run_uri, "select_utterances", {})
    step = status_of(run_job, run_uri)["select_utterances"]["selection/unlabelled"]
    assert (step["state"], step["hours_in"], step["left_s"]) == ("under way", 0.0, -1.0)
    assert step["hours_done"] == selected["tally_out"]["duration_ms"] / HOUR_MS
    assert step["quarantined"] == 1
    read_ms = selected["tally_in"]["duration_ms"]
    key = "metadata/unlabelled/date=2026-01-01/speaker_bucket=00/a.jsonl.gz"
    output = Output(key, 9, "0" * 64, 60, 2 * read_ms)
    other = Output(key.replace("unlabelled", "labelled"), 9, "0" * 64, 9, read_ms)
    tally = output.tally + other.tally
    ingested = Manifest("ingest", {}, {}, (output, other), tally_in=tally, tally_out=tally)
    put_manifest(run_uri, ingested)
    step = status_of(run_job, run_uri)["select_utterances"]["selection/unlabelled"]
    assert step["hours_in"] == 2 * read_ms / HOUR_MS
    assert 99 < step["left_s"] < 1000  # half is read; the clock of a busy machine


def test_an_evaluation_under_way_counts_each_hour_once(run_job: RunJob, tmp_path: Path) -> None:
    """Three models decode four hours: a model's two commits are a third of them, 200 s are left."""
    run_uri = str(tmp_path)
    put_manifest(run_uri, whole("features/heldout", 4))
    put_begun(run_uri, "evaluate", {})
    context = step_context(ObjectStore((run_uri,)), run_uri, "evaluation/scratch", {}, {})
    for part in range(2):
        tally = Tally(2, 2 * HOUR_MS)
        output = context.put_output(f"teacher-{part}", ".json", b"words", tally)
        context.commit(
            Commit(f"teacher-{part}", context.fingerprint, (output,), None, tally, Tally())
        )
    step = status_of(run_job, run_uri)["evaluate"]["evaluation"]
    assert (step["hours_done"], step["hours_in"]) == (pytest.approx(4 / 3), 4.0)
    assert 199 < step["left_s"] < 2000


def test_a_training_under_way_is_at_its_newest_checkpoint(run_job: RunJob, tmp_path: Path) -> None:
    """Of its sub-epochs all but the last are done. A start that resumes says what was before."""
    _, run_uri, corpus_uri = write_toy_run(tmp_path)
    place = ("--set", f'corpus.uri="{corpus_uri}"')
    train = ("train_baseline", "--recipe", str(TINY), "--run", run_uri, *place)
    for left in Path(run_uri, "models").glob("*"):
        left.rename(tmp_path / left.name)
    said = run_job(*train)
    assert said.code == 0, said.err
    manifest = Path(run_uri, BASELINE, "manifest.json")
    hours = json.loads(manifest.read_text())["tally_out"]["duration_ms"] / HOUR_MS
    num_epochs = len(json.loads(manifest.read_text())["statistics"]["curve"])
    assert num_epochs > 1
    manifest.unlink()
    records = sorted(Path(run_uri, BASELINE, "checkpoints").glob("*.json"))
    assert len(records) == 2
    records[-1].unlink()
    put_begun(run_uri, "train_baseline", {})
    step = status_of(run_job, run_uri, *place)["train_baseline"][BASELINE]
    done = hours * (num_epochs - 1) / num_epochs
    assert (step["state"], step["hours_in"]) == ("under way", pytest.approx(hours))
    assert step["hours_done"] == pytest.approx(done)
    assert {"cross_entropy", "frame_accuracy"} <= step["measures"].keys()
    assert 100 / num_epochs < step["left_s"] < 1000
    said = run_job("status", "--recipe", str(TINY), "--run", run_uri, *place)
    assert re.search(r"models/baseline\s+under way.* of .*about", said.out)
    assert re.search(r"\n +training cross-entropy \d\.\d+, frame accuracy [\d.]+%", said.out)
    # A start that fails before its first checkpoint leaves its note.
    for shard in Path(run_uri, "alignments/labelled").rglob("*.parquet"):
        shard.rename(shard.with_suffix(".away"))
    assert run_job(*train).code == 1
    note = unseal(Path(run_uri, "steps/started/train_baseline.json").read_bytes(), "")
    assert note["hours_before"] == {BASELINE: pytest.approx(done)}
    assert datetime.now(UTC) - datetime.fromisoformat(note["started_at"]) < timedelta(seconds=90)
    step = status_of(run_job, run_uri, *place)["train_baseline"][BASELINE]
    assert (step["hours_done"], step["left_s"]) == (pytest.approx(done), -1.0)


def test_each_step_under_way_has_the_hours_of_its_input(run_job: RunJob, tmp_path: Path) -> None:
    """Of what it reads of this run alone: an increment makes no targets of its base's features.

    It evaluates on the held-out speech that it has inherited.
    """
    run_uri = str(tmp_path)
    for step, hours in {"features/labelled": 2, "alignments/labelled": 3}.items():
        put_manifest(run_uri, whole(step, hours))
    for step, is_whole in (("features/unlabelled", False), ("features/heldout", True)):
        base, none = Tally(4, 4 * HOUR_MS), Tally()
        extends = Extended("other", "0" * 64, base, base, none, none, is_whole)
        put_manifest(run_uri, replace(whole(step, 7), extends=extends))
    for job in (
        *("bootstrap", "realign", "train_baseline"),
        *("generate_targets", "repartition", "evaluate"),
    ):
        put_begun(run_uri, job, {})
    found = status_of(run_job, run_uri, "--set", "sequence_training.baseline=true")
    hours_in = {step: each["hours_in"] for steps in found.values() for step, each in steps.items()}
    expected = {"alignments/labelled": 3, "lattices/baseline": 3, BASELINE: 3, "evaluation": 7}
    expected |= {"alignments/bootstrap": 2, "targets/unlabelled": 3, "partitions/unlabelled": 3}
    assert {step: hours_in[step] for step in expected} == expected


def test_a_start_samples_the_commits_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 250 commits of an hour each it reads 84, and notes 250 hours."""
    run_uri = str(tmp_path)
    context = step_context(ObjectStore((run_uri,)), run_uri, "features/labelled", {}, {})
    hour = Tally(1, HOUR_MS)
    for number in range(250):
        output = context.put_output(f"{number:06}", ".json", b"{}", hour)
        context.commit(Commit(f"{number:06}", context.fingerprint, (output,), None, hour, Tally()))
    read: list[str] = []

    def counted(store: ObjectStore, uris: Sequence[str]) -> Iterator[Commit]:
        read.extend(uris)
        return each_commit(store, uris)

    monkeypatch.setattr("jobs.cli.job.each_commit", counted)
    arguments = job_parser("status", "", "").parse_args(["--recipe", str(TINY), "--run", run_uri])
    assert hours_read(open_job("status", arguments), Written("features/labelled")) == pytest.approx(
        250.0
    )
    assert len(read) == 84


STEP = "features/unlabelled"


def test_a_dry_run_names_the_keys_that_differ(run_job: RunJob, tmp_path: Path) -> None:
    """Of a finished step and of one that has begun: both values and the remedy; exit code 1."""
    store, recipe = ObjectStore((str(tmp_path),)), read_recipe(str(TINY))
    put_manifest(str(tmp_path), replace(whole(STEP, 2), config=plain(recipe.features)))
    put_begun(str(tmp_path), "extract_features", {})
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
    put_manifest(str(tmp_path), whole(STEP, 2))
    steps = status_of(run_job, str(tmp_path))["extract_features"]
    assert (steps[STEP]["state"], steps[STEP]["hours_done"]) == ("done", 2.0)
    assert steps["features/labelled"]["state"] == "to do"
    shown = run_job("inspect_object", str(tmp_path / STEP), "--json")
    assert json.loads(shown.out)["tallies"]["hours_out"] == 2.0


def test_status_of_a_step_under_way(run_job: RunJob, tmp_path: Path) -> None:
    """Two of four hours are committed 100 s after the beginning: half is done, 100 s are left."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    put_manifest(run_uri, whole("selection/unlabelled", 4))
    put_begun(run_uri, "extract_features", {})
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


def test_log_lines_have_time_and_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text that a terminal does not obey, or as JSON; progress of short work writes no line."""
    monkeypatch.setenv("MEGAHOUR_LOG_FORMAT", "text")
    monkeypatch.setenv("MEGAHOUR_LOG_STEP", "")
    begin_log("realign", "text")
    log("begins")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}Z realign: begins\n", capsys.readouterr().err)
    report_error("realign", "a\x1b]0;title\x07\nb\x9b2J")  # as an object's name may have it
    assert capsys.readouterr().err == "realign: a\\x1b]0;title\\x07\nb\\x9b2J\n"
    begin_log("realign", "json")
    log("begins", rank=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["step"], line["message"], line["rank"]) == ("realign", "begins", 3)
    assert list(progress_bar([1, 2], description="short")) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("infra.log_lines.PROGRESS_INTERVAL_S", 0.0)
    assert list(progress_bar([1, 2], description="long")) == [1, 2]
    lines = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    assert lines[-1]["message"].startswith("long: 2 of 2 tasks,")
    with progress_bar(description="by hand", total=2) as bar:
        bar.update()
        bar.update()
    said = [json.loads(each)["message"] for each in capsys.readouterr().err.splitlines()]
    assert [each[:15] for each in said if "2 of 2" in each] == ["by hand: 2 of 2"]


def test_steps_of_a_run_are_chosen() -> None:
    """--from leaves out those before it, --only all but those that it names."""

    def chosen(first: str | None, *only: str) -> list[str]:
        return [each.step for each in chosen_steps(steps, Namespace(first=first, only=only))]

    steps = launches(["--kaldi-dir", "data"], 2, 4)
    assert chosen(None) == [each.step for each in steps]
    assert chosen("certify") == ["certify", "report"]
    assert chosen(None, "realign", "ingest") == ["ingest", "realign"]
    assert chosen("realign", "ingest", "report") == ["report"]
    assert all((JOBS / f"{each.step}.py").is_file() for each in steps)
