"""The whole path in S3, on speech at five placements, gives the bytes of a local path."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import boto3
import pytest

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli import spark_steps
from jobs.run import launches
from jobs.synthesis.corpus import SynthesisConfig, synthesize
from pipeline.runs.names import LANGUAGE_MODEL_FILES, LEXICON_FILE, SUBSETS, model_step, teachers
from pipeline.steps.ingestion.kaldi_directory import DirectoryIngestion, plan_copy
from tests.faults.killed_processes.chaos_run import run_plainly
from tests.infra.aws.role_policy import Request, Statement, allows, requests_by_step, role_of
from tests.job_programs import RunJob
from tests.notebooks.execution import SHOWN, require_shown
from tests.s3_server import CREDENTIALS, OTHER_SETTINGS, running_s3_server, set_endpoint
from tests.small_corpus import plain_loop
from tests.whole_path.manifests import manifest_bytes, require_balance
from tests.whole_path.processes import TINY, left_behind, run_all_steps, run_step
from training.settings.recipe import read_recipe

pytestmark = [pytest.mark.timeout(2400), pytest.mark.cluster]

SETTINGS = ("teacher.ensemble=2", "targets.offsets=all", "student.num_passes=3")
"""By --set: two teachers label at all offsets, of which each pass of the student reads one."""

TRAINING = ("train_baseline", "train_teacher", "train_student")
LANGUAGE_MODEL = tuple(f"corpus/{name}" for name in LANGUAGE_MODEL_FILES)
OTHER_RUNS_NEED = {
    # Subsets are found by listing; selection alone reads their records.
    *((step, "GetObject", "corpus/metadata/*") for step in ("extract_features", "bootstrap")),
    # A lexicon is replaced until the bootstrap has read it.
    ("ingest", "GetObject", "alignments/bootstrap/*"),
    # Checkpoints are removed once there are more than num_kept.
    *((step, "DeleteObject", "models/*") for step in ("train_aligner", *TRAINING)),
    # Sequence training searches lattices, with the lexicon and a language model.
    *((step, "GetObject", "corpus/lexicon.txt") for step in TRAINING),
    *((step, "GetObject", "ingest/*") for step in TRAINING),
    *((step, "PutObject", "lattices/*") for step in TRAINING),
    # So do lattice targets. A teacher of the user's own may hear the audio.
    *(
        ("generate_targets", "GetObject", place)
        for place in ("alignments/*", "corpus/lexicon.txt", "ingest/*")
    ),
    ("generate_targets", "PutObject", "graphs/*"),
    ("generate_targets", "GetObject", "corpus/audio/*"),
    # Language models of the user's own, and pronunciations of a text's words.
    *(("build_graph", "GetObject", place) for place in LANGUAGE_MODEL),
    *(("bootstrap", "GetObject", place) for place in LANGUAGE_MODEL if ".txt" in place),
    # Scales are tuned on development speakers.
    ("evaluate", "PutObject", "tuning/*"),
    # A new report replaces an older one.
    ("report", "DeleteObject", "report/*"),
}
"""The permissions of a role that this run did not need."""

PLACEMENTS = ["DP1", "DP2", "DP3", "DP4", "DP5"]
CORPUS = SynthesisConfig(
    labelled_hours=1 / 60,
    unlabelled_hours=2 / 60,
    num_labelled_speakers=2,
    num_unlabelled_speakers=4,
    num_heldout_speakers=2,
    heldout_utterances_per_placement=2,
)


@dataclass(frozen=True)
class WholeRun:
    """WholeRun is a finished run in S3: its URI, its corpus, its output, its server's log."""

    uri: str
    kaldi_dir: Path
    environment: dict[str, str]
    output: str
    requests: str

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((self.uri,))


@pytest.fixture(scope="module")
def whole(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeRun]:
    kaldi_dir = tmp_path_factory.mktemp("synthetic") / "kaldi"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.synthesis.corpus._NOISE_S", 5.0)  # of 120, which take 4 s of CPU
        synthesize(CORPUS, kaldi_dir)
    log = kaldi_dir.with_name("requests.log")
    with running_s3_server(log) as endpoint, pytest.MonkeyPatch.context() as patch:
        set_endpoint(endpoint, patch)
        boto3.client("s3").create_bucket(Bucket="megahour")
        uri = "s3://megahour/runs/tiny"
        settings = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "MEGAHOUR_TEST": str(kaldi_dir)}
        inherited = {**environment, **settings}
        for name in OTHER_SETTINGS:
            inherited.pop(name, None)
        ranks = ("--supervised-ranks", "1", "--student-ranks", "2")
        options = (*ranks, *(part for each in SETTINGS for part in ("--set", each)))
        done = run_all_steps(uri, kaldi_dir, inherited, *options)
        output = done.stdout + done.stderr
        yield WholeRun(uri, kaldi_dir, inherited, output, log.read_text())


@pytest.fixture(scope="module")
def local(whole: WholeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str]:
    """Run the same corpus and recipe on a local path, each step a plain loop, without Spark."""
    run_uri = str(tmp_path_factory.mktemp("local") / "run")
    store, corpus_uri = ObjectStore((run_uri,)), join_uri(run_uri, "corpus")
    recipe = read_recipe(str(TINY))
    plan_copy(DirectoryIngestion(whole.kaldi_dir)).write(store, corpus_uri)
    store.put(join_uri(corpus_uri, LEXICON_FILE), (whole.kaldi_dir / LEXICON_FILE).read_bytes())
    for step in ("select_utterances", "extract_features"):
        run_plainly(step, store, run_uri, corpus_uri, recipe)
    return store, run_uri


def require_same(whole: WholeRun, local: tuple[ObjectStore, str], steps: set[str]) -> None:
    """Require the manifests of `steps`, and so all bytes that they name, to agree."""
    theirs, ours = manifest_bytes(whole.store, whole.uri), manifest_bytes(*local)
    for step in sorted(steps):
        assert ours[step] == theirs[step], step


def test_the_table_has_the_five_placements(whole: WholeRun) -> None:
    """As 003's Table II, it has word error rates and their reduction at DP1 to DP5."""
    report = json.loads(whole.store.get(join_uri(whole.uri, "report", "report.json")))
    assert sorted(report["wer"]) == ["baseline", "student", "teacher", "teacher_2"]
    targets, curve = report["targets"], report["curves"]["student"]
    assert (targets["num_teachers"], targets["offsets"]) == (2, "all")
    read = sum(point["num_frames"] for point in curve if not point["labelled"])
    assert read == targets["num_frames"]
    for rates in report["wer"].values():
        assert sorted(rates) == PLACEMENTS
    assert set(report["werr"]) <= set(PLACEMENTS)
    assert re.search(r"^WER, % +" + " +".join(PLACEMENTS) + " +mean$", whole.output, re.MULTILINE)


def test_no_process_is_left_behind(whole: WholeRun) -> None:
    """No rank and no Java is left, and the teachers' servers end when they have been idle."""
    deadline = time.monotonic() + 60
    while (left := left_behind(str(whole.kaldi_dir))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.parametrize("name", sorted(SHOWN.keys() - {"inspect_shards"}))
def test_notebooks_show_the_demo_s_corpus(whole: WholeRun, name: str, tmp_path: Path) -> None:
    """Each is executed from the URI of this run of a small demo corpus, and draws its pictures.

    tests/notebooks has the one that needs the data pipeline's steps alone.
    """
    require_shown(name, whole.uri, tmp_path)


def test_hours_in_are_hours_out_and_quarantined(whole: WholeRun) -> None:
    """They agree in each manifest in S3 and from step to step; this corpus loses nothing."""
    manifests = require_balance(whole.store, whole.uri, SUBSETS, ensemble=2)
    assert not any(manifest.quarantined.utterances for manifest in manifests.values())


def test_selection_and_features_do_not_depend_on_the_place(
    whole: WholeRun, local: tuple[ObjectStore, str]
) -> None:
    """Spark on S3 and a plain loop on local paths end in the same bytes."""
    steps = {f"{step}/{subset}" for step in ("selection", "features") for subset in SUBSETS}
    require_same(whole, local, steps)


@pytest.mark.chaos
def test_alignments_do_not_depend_on_the_place(
    whole: WholeRun, local: tuple[ObjectStore, str]
) -> None:
    """Bootstrap, tree, the network trained on them and its realignment repeat on a local path."""
    for step in ("bootstrap", *("train_aligner", "realign") * 2):
        done = run_step(step, local[1], whole.environment, "--json", num_ranks=1)
        assert done.returncode == 0, done.stderr[-4000:]
        assert json.loads(done.stdout)["status"] == "done"
    require_same(whole, local, {"alignments/bootstrap", "models/aligner", "alignments/labelled"})


def test_targets_and_partitions_do_not_depend_on_the_place(
    whole: WholeRun, local: tuple[ObjectStore, str]
) -> None:
    """The teacher in this process and a plain loop give the bytes of its servers and Spark."""
    store, run_uri = local
    recipe = read_recipe(str(TINY), SETTINGS)
    for folder in map(model_step, teachers(recipe.teacher.ensemble)):
        for found in whole.store.list(join_uri(whole.uri, folder)):
            store.put(found.uri.replace(whole.uri, run_uri), whole.store.get(found.uri))
    for step in ("generate_targets", "repartition"):
        run_plainly(step, store, run_uri, join_uri(run_uri, "corpus"), recipe)
    require_same(whole, local, {"targets/unlabelled", "partitions/unlabelled"})


def written(bucket: str) -> dict[str, tuple[datetime, str]]:
    """Return each object's time of writing and the ETag of its bytes."""
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket)
    objects = [each for page in pages for each in page["Contents"]]
    return {each["Key"]: (each["LastModified"], each["ETag"]) for each in objects}


def run_again(whole: WholeRun, run_job: RunJob, run_uri: str, *options: str) -> dict[str, str]:
    """Run each step of the run's command within this process; return what each printed.

    Selection compares the digests of the metadata: in a plain loop, which saves a JVM.
    """
    settings = [part for each in SETTINGS for part in ("--set", each)]
    shared, said = ("--recipe", str(TINY), "--run", run_uri, *settings, *options), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark_steps, "distribute_on_spark", plain_loop)
        for launch in launches(["--kaldi-dir", str(whole.kaldi_dir)], 1, 2):
            done = run_job(launch.step, *shared, *launch.arguments)
            assert done.code == 0, done.err
            said[launch.step] = done.out
    return said


def test_the_same_command_again_does_nothing(whole: WholeRun, run_job: RunJob) -> None:
    """Each step says so, and not one object is written, manifests included."""
    before = written("megahour")
    for step, said in run_again(whole, run_job, whole.uri).items():
        assert re.search(rf"^{step}: nothing to do \(", said, re.MULTILINE), step
    assert written("megahour") == before


def states_of(said: str) -> set[str]:
    """Return what dry runs say of all that steps write: there, or missing."""
    return set(re.findall(r"^  writes [\w/]+: (\w+)$", said, re.MULTILINE))


def test_a_dry_run_of_a_whole_run_writes_nothing(whole: WholeRun, run_job: RunJob) -> None:
    """Each step says what it would read and write, and that it is there, in S3."""
    before = written("megahour")
    for step, said in run_again(whole, run_job, whole.uri, "--dry-run").items():
        assert f"{step}: dry run on {whole.uri}\n" in said
        assert states_of(said) == {"there"}, step
    assert written("megahour") == before


def test_credentials_are_nowhere(whole: WholeRun) -> None:
    """They are neither in the steps' output nor in any object of the run."""
    said = [whole.output.encode(), *(whole.store.get(o.uri) for o in whole.store.list(whole.uri))]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert not any(CREDENTIALS[name].encode() in data for data in said), name


def test_roles_allow_what_the_steps_asked_for(whole: WholeRun) -> None:
    """Each request of each step is allowed by its role: action, object, and prefix of a listing."""
    by_step = requests_by_step(whole.requests, "megahour/runs/tiny")
    assert list(by_step) == [launch.step for launch in launches(["--kaldi-dir", ""], 1, 2)]
    for step, requests in by_step.items():
        role = role_of(step)
        denied = sorted(map(str, (each for each in requests if not allows(role, each))))
        assert denied == [], step


def test_roles_allow_no_more_than_the_steps_need(whole: WholeRun) -> None:
    """Each folder that a role may read, write or delete in was used, or other runs need it.

    A step that is run again reads its own output.
    """
    unused = set()
    for step, requests in requests_by_step(whole.requests, "megahour/runs/tiny").items():
        role = role_of(step)
        for action, place in permitted(role):
            is_own = action == "s3:GetObject" and allows(role, Request("s3:PutObject", place))
            if not is_own and not any(Statement((action,), (place,)).allows(r) for r in requests):
                key = place.rpartition("/runs/tiny/")[2]
                unused.add((step, action.removeprefix("s3:"), key))
    assert unused - OTHER_RUNS_NEED == set()


def permitted(role: list[Statement]) -> Iterator[tuple[str, str]]:
    """Yield the actions on objects of the run that a role permits, with their resources."""
    for statement in role:
        for action in statement.actions:
            if action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
                yield from ((action, each) for each in statement.resources if "/tiny/" in each)
