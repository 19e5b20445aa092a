"""A workflow has the steps of `megahour run`, with what a scheduler needs of each."""

import json
import re
from pathlib import Path

import pytest

from jobs.run import launches
from tests.infra.platforms.account_files import account_file
from tests.job_programs import RunJob
from tests.whole_path.processes import TINY

ROOT = Path(__file__).parents[2]
RUN = "s3://bucket/runs/{{ ds }}"
SHARED = ("--recipe", str(TINY), "--run", RUN, "--kaldi-dir", "/data/{{ ds }}")
ACCOUNT = ("--set", "cluster=''", "--account", account_file("emr"))


def test_steps_are_those_of_run(run_job: RunJob) -> None:
    """The same steps in the same order, with the same commands, under a supervisor."""
    document = json.loads(run_job("workflow", *SHARED).out)
    expected = launches(["--kaldi-dir", "/data/{{ ds }}"], 2, 4, num_alignment_rounds=2)
    names = [re.sub(r"_2$", "", step["name"]) for step in document["steps"]]
    assert names == [each.step for each in expected]
    shared = ["--recipe", str(TINY), "--run", RUN]
    for step, launch in zip(document["steps"], expected, strict=True):
        command = launch.command(shared)
        assert step["command"][-len(command) :] == command
        assert step["command"][-len(command) - 2].endswith("infra/supervisor.py")
        assert step["command"][-len(command) - 1] == "0", "whichever process starts it"
    assert set(document["environment"]) == {"JAVA_HOME", "PATH", "PYSPARK_PYTHON"}
    by_name = {step["name"]: step["manifests"] for step in document["steps"]}
    assert by_name["repartition"] == [f"{RUN}/partitions/unlabelled/manifest.json"]
    assert not any("/dev/" in uri for uris in by_name.values() for uri in uris), "not in every run"


def test_rounds_have_names_and_manifests_of_their_own(run_job: RunJob) -> None:
    """Airflow's groups are unique: the second round's steps end in _2, and write what is due."""
    said = run_job("workflow", *SHARED, "--set", "targets.rounds=2")
    steps = {step["name"]: step for step in json.loads(said.out)["steps"]}
    names = list(steps)
    assert len(names) == len(json.loads(said.out)["steps"]) == 20
    assert names.index("train_aligner_2") == names.index("realign") + 1
    assert names.index("train_teacher_2") == names.index("repartition") + 1
    written = {
        "train_aligner": "models/aligner_1",
        "realign": "alignments/round_1",
        "train_aligner_2": "models/aligner",
        "realign_2": "alignments/labelled",
        "train_teacher": "models/teacher",
        "repartition": "partitions/round_1",
        "train_teacher_2": "models/teacher_round_2",
        "repartition_2": "partitions/unlabelled",
    }
    for name, made in written.items():
        assert steps[name]["manifests"] == [f"{RUN}/{made}/manifest.json"], name


def test_manifests_are_ingested_where_they_are(run_job: RunJob) -> None:
    """Speech that stays in S3 is named by its manifest, whose URI may hold the date."""
    uri = "s3://bucket/days/{{ ds }}.jsonl"
    said = run_job("workflow", *SHARED[:4], "--manifest", uri, "--cluster", "demo")
    ingest = json.loads(said.out)["steps"][0]
    assert ingest["name"] == "ingest"
    assert ingest["command"][ingest["command"].index("--manifest") + 1] == uri
    assert ingest["command"][ingest["command"].index("--cluster") + 1] == "demo"


def test_an_account_gives_each_step_its_cluster(run_job: RunJob) -> None:
    """All but the copy of a directory are launched by request_cluster --send."""
    said = run_job("workflow", *SHARED, *ACCOUNT)
    ingest, *others = json.loads(said.out)["steps"]
    assert any(word.endswith("jobs/ingest.py") for word in ingest["command"])
    for step in others:
        assert step["command"][1].endswith("jobs/request_cluster.py")
        name = step["name"].removesuffix("_2")
        assert step["command"][2:5] == ["--step", name, "--send"]
        assert step["command"][-2:] == [*ACCOUNT[-2:]]
    said = run_job("workflow", *SHARED, *ACCOUNT[-2:])
    assert said.code == 2
    assert "cluster with master local[2] is this computer: give --cluster" in said.err


def test_an_account_ingests_manifests_on_a_cluster(run_job: RunJob) -> None:
    """ingest is launched as the other steps are, with the options of the manifests."""
    manifest = ("--manifest", "labelled=s3://bucket/{{ ds }}.jsonl", "--lexicon", "s3://bucket/l")
    share, placed = ("--dev-share", "0.1"), ("--placements", "clean,DP3")
    said = run_job("workflow", *SHARED[:4], *manifest, *share, *placed, *ACCOUNT)
    command = json.loads(said.out)["steps"][0]["command"]
    assert command[1].endswith("jobs/request_cluster.py")
    assert command[2:5] == ["--step", "ingest", "--send"]
    for option, value in (manifest[:2], manifest[2:], share, placed):
        assert command[command.index(option) + 1] == value
    assert command[-2:] == [*ACCOUNT[-2:]]
    unlabelled = ("--manifest", "s3://bucket/{{ ds }}.jsonl")
    said = run_job("workflow", *SHARED[:4], *unlabelled, *share)
    assert (said.code, said.out) == (2, "")
    assert "--dev-share: a share of the labelled speakers: need --manifest labelled=" in said.err


def test_a_part_of_the_steps_has_whole_rounds(run_job: RunJob) -> None:
    """From the first start of one step to the last of the other."""
    said = run_job("workflow", *SHARED, "--first", "realign", "--last", "train_baseline")
    names = [step["name"] for step in json.loads(said.out)["steps"]]
    assert names == ["realign", "train_aligner_2", "realign_2", "build_graph", "train_baseline"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--first", "realign", "--last", "ingest"),
            "--first realign: need a step that --last ingest",
        ),
        (("--name", "a/b"), "a/b: need a letter, then letters, digits or _"),
        (("--set", "targets.k=0"), "k = 0: need "),
        (("--start-date", "yesterday"), "yesterday: need a date such as 2026-01-01"),
        (("--retries", "-3"), "-3: need 0..1000"),
        ((*ACCOUNT, "--student-ranks", "8"), "--student-ranks with --account: a step's cluster"),
    ],
)
def test_what_no_scheduler_could_run_is_refused(
    run_job: RunJob, options: tuple[str, ...], message: str
) -> None:
    """Exit code 2, and a line with the remedy."""
    said = run_job("workflow", *SHARED, *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    said = run_job("workflow", *SHARED[:4])
    assert "nothing to ingest: give --kaldi-dir, --manifest, or" in said.err
    said = run_job("workflow", *SHARED[:4], "--manifest", "s3://bucket/x?X-Amz-Signature=deadbeef")
    assert said.code == 2
    assert "a password or signature: take it out" in said.err
    assert "deadbeef" not in said.err
    part = ("--first", "generate_targets", "--last", "train_student")
    said = run_job("workflow", *SHARED[:4], *part, "--manifest", "labelled=s3://bucket/x.jsonl")
    assert (said.code, said.out) == (2, "")
    assert "--last train_student: this run has none of these steps" in said.err
    said = run_job("workflow", *SHARED[:4], "--first", "realign", "--placements", "clean")
    assert "--placements: nothing is ingested: give --kaldi-dir or --manifest" in said.err


def test_the_dag_knows_command_lines_alone() -> None:
    """Airflow's environment need not have megahour: its file imports none of our packages."""
    source = (ROOT / "infra/airflow/megahour_dag.py").read_text()
    modules = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    assert modules == {"airflow", "collections", "datetime", "json", "os", "pathlib", "typing"}
