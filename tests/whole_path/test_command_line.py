"""The jobs explain help, bad recipes, missing inputs and stores out of reach, by exit code."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import boto3
import pytest

from infra.settings import digest
from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from jobs.run_table import STEPS
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import SUBSETS
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.job_programs import RunJob, Said
from tests.s3_server import CREDENTIALS, free_port, set_endpoint
from tests.small_corpus import local_store, plain_loop, serially, write_corpus, write_metadata
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe
from training.settings.trainers import TRAINERS


def usual(step: str, run_uri: object, *more: str) -> tuple[str, ...]:
    """Return the step and the fewest arguments that it needs."""
    needed = ("--kaldi-dir", "nowhere") if step == "ingest" else ()
    return (step, "--recipe", str(TINY), "--run", str(run_uri), *needed, *more)


def require_message(said: Said, code: int, *parts: str) -> None:
    """Require the exit code, and on standard error one line that holds `parts`, beside the log."""
    assert said.code == code, said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    (line,) = [each for each in said.err.splitlines() if " begins: recipe " not in each]
    for part in parts:
        assert part in line


@pytest.mark.parametrize("step", STEPS)
def test_help_teaches(run_job: RunJob, step: str) -> None:
    """Help says what the step does, each option, the exit codes, and that it may be repeated."""
    said = run_job(step, "--help")
    text = " ".join(said.out.split())
    assert (said.code, said.err) == (0, "")
    assert text.startswith(f"usage: megahour {step}")
    for option in ("--recipe", "--run", "--set SECTION.KEY=VALUE", "--dry-run", "--json"):
        assert option in text
    assert "Exit codes: 0 done or nothing to do, 1 failed, 2 bad usage or recipe" in text
    assert "never done again" in text


def test_any_trainer_can_be_chosen_for_any_recipe(run_job: RunJob, tmp_path: Path) -> None:
    """Its blocks and thresholds are its own; other names are refused."""
    arguments = ("--run", str(tmp_path), "--dry-run", "--json", "--recipe", str(TINY))
    for trainer in TRAINERS:
        said = run_job("train_student", *arguments, "--trainer", trainer)
        recipe = read_recipe(str(TINY), (), {"student": trainer})
        assert json.loads(said.out)["recipe_digest"] == digest(recipe)
    said = run_job("train_student", *arguments, "--trainer", "hmt")
    assert said.code == 2
    assert "invalid choice: 'hmt' (choose from" in said.err


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "inf", "1e300"])
def test_a_time_limit_that_is_none_is_bad_usage(
    run_job: RunJob, tmp_path: Path, limit: str
) -> None:
    """The exit code is 2, with the range."""
    said = run_job(*usual("train_student", tmp_path, "--time-limit-s", limit))
    assert said.code == 2
    assert "need 1..1000000" in said.err


def test_missing_arguments_are_bad_usage(run_job: RunJob) -> None:
    """The exit code is 2, with the usage."""
    said = run_job("evaluate", "--run", "somewhere")
    assert said.code == 2
    assert "the following arguments are required: --recipe" in said.err


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("selection.hour=1", ("tiny.toml", "unknown key hour", "did you mean hours?")),
        ("student.trainer.name=hmt", ("'hmt'", "one of 'synchronous', 'gtc', 'bmuf', 'htm'")),
        ("selection.hours=-1", ("hours = -1", "need 0 (all) or 2e-07..1e+09")),
        ("selection.hours=many", ("'many'", "need a finite number")),
        ("selection.hours", ("--set selection.hours: need section.key=value",)),
        ("name.first=1", ("--set name.first=1: name = 'tiny' is no section",)),
        ("cluster=moon", ("cluster 'moon'", "one of", "demo")),
        (
            "corpus.uri=ftp://host/corpus",
            ("ftp://host/corpus", "need s3://bucket/key or a local path"),
        ),
    ],
)
def test_a_bad_value_of_the_recipe_is_explained(
    run_job: RunJob, tmp_path: Path, override: str, parts: tuple[str, ...]
) -> None:
    """The exit code is 2; the message names the key, the value and a remedy."""
    require_message(run_job(*usual("evaluate", tmp_path, "--set", override)), 2, *parts)


def test_a_misspelt_key_in_a_recipe_is_explained(run_job: RunJob, tmp_path: Path) -> None:
    """The message names the file or --set, the key, and the nearest known one."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text(TINY.read_text().replace("file_hours", "files_hours"))
    said = run_job("evaluate", "--recipe", str(recipe), "--run", str(tmp_path))
    require_message(said, 2, str(recipe), "unknown key files_hours: did you mean file_hours?")


def test_a_missing_or_broken_recipe_is_bad_usage(run_job: RunJob, tmp_path: Path) -> None:
    """The exit code is 2, with the path."""
    broken = tmp_path / "broken.toml"
    broken.write_text("name = [")
    for recipe, part in (("nowhere.toml", "cannot be read"), (str(broken), "not TOML")):
        said = run_job("evaluate", "--recipe", recipe, "--run", str(tmp_path))
        require_message(said, 2, recipe, part)


@pytest.mark.parametrize("uri", ["ftp://host/run", "s3://b/run", "s3://bucket/a/../run", ""])
def test_a_bad_run_uri_is_bad_usage(run_job: RunJob, uri: str) -> None:
    """Unknown schemes, missing buckets, paths that climb and empty ones are bad usage."""
    require_message(run_job(*usual("evaluate", uri)), 2, "evaluate: ", uri)


@pytest.mark.parametrize(
    ("step", "missing"),
    [
        ("extract_features", "selection/labelled"),
        ("bootstrap", "features/labelled"),
        ("train_aligner", "alignments/bootstrap"),
        ("realign", "features/labelled"),
        ("build_graph", "alignments/labelled"),
        ("train_baseline", "alignments/labelled"),
        ("train_teacher", "alignments/labelled"),
        ("generate_targets", "features/unlabelled"),
        ("repartition", "features/unlabelled"),
        ("train_student", "alignments/labelled"),
        ("evaluate", "features/heldout"),
        ("certify", "selection/unlabelled"),
        ("report", "evaluation"),
    ],
)
def test_a_missing_input_names_the_step_to_run(
    run_job: RunJob, tmp_path: Path, step: str, missing: str
) -> None:
    """The exit code is 1, Spark does not start, and nothing is written."""
    said = run_job(*usual(step, tmp_path / "run"))
    uri = manifest_uri(str(tmp_path / "run"), missing)
    require_message(said, 1, f"{uri} is missing: run the step that writes {missing} first")
    assert not (tmp_path / "run").exists()


def test_missing_data_is_explained(run_job: RunJob, tmp_path: Path) -> None:
    """An absent Kaldi directory and absent metadata are explained."""
    require_message(
        run_job(*usual("ingest", tmp_path)), 2, "--kaldi-dir nowhere is not a directory"
    )
    said = run_job(*usual("select_utterances", tmp_path))
    require_message(said, 1, "holds no *.jsonl metadata: run megahour ingest")


def test_a_run_lies_outside_its_corpus(run_job: RunJob, tmp_path: Path) -> None:
    """Within it, verify could not tell the run's objects from foreign ones."""
    within = usual("select_utterances", tmp_path / "runs" / "one")
    said = run_job(*within, "--set", f"corpus.uri='{tmp_path}'")
    require_message(said, 2, f"--run {tmp_path}/runs/one lies in corpus.uri = {tmp_path}: need ")


@pytest.mark.parametrize("step", STEPS)
def test_a_dry_run_writes_nothing(run_job: RunJob, tmp_path: Path, step: str) -> None:
    """A dry run lists what is read and written, and whether it exists."""
    run_uri = tmp_path / "run"
    said = run_job(*usual(step, run_uri, "--dry-run"))
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{step}: dry run on {run_uri}\n")
    assert "  writes " in said.out
    listed = json.loads(run_job(*usual(step, run_uri, "--dry-run", "--json")).out)
    assert listed["status"] == "dry run"
    assert set(listed["reads"].values()) <= {"missing"}
    assert set(listed["writes"].values()) == {"missing"}
    assert not run_uri.exists()


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Set credentials in the environment and in the endpoint, at a port that refuses."""
    endpoint = f"http://user:endpoint-password@127.0.0.1:{free_port()}"
    set_endpoint(endpoint, monkeypatch)
    keys = (CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    return (*keys, "endpoint-password")


@pytest.mark.parametrize("step", ["select_utterances", "extract_features", "evaluate"])
def test_a_store_out_of_reach_is_explained(
    run_job: RunJob, secrets: tuple[str, ...], step: str
) -> None:
    """Exit code 1 comes with URI, endpoint and remedy; neither traceback nor credentials."""
    said = run_job(*usual(step, "s3://bucket/run"))
    require_message(said, 1, "s3://bucket/run", "127.0.0.1", "check AWS_ENDPOINT_URL")
    assert not any(secret in said.err for secret in secrets)


def test_an_absent_bucket_is_explained(
    run_job: RunJob, secrets: tuple[str, ...], s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 comes with its name, for a step that reads and for one that begins."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    for step in ("select_utterances", "evaluate"):
        said = run_job(*usual(step, "s3://nobodys/run"))
        require_message(said, 1, "no bucket 'nobodys'", "create it, or correct its name")
        assert not any(secret in said.err for secret in secrets)


@pytest.mark.usefixtures("secrets")
def test_missing_credentials_are_explained(
    run_job: RunJob, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 comes with the variables to set."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    boto3.client("s3").create_bucket(Bucket="locked")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    said = run_job(*usual("evaluate", "s3://locked/run"))
    require_message(said, 1, "no usable credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID")


def test_ingest_prints_one_json_object(run_job: RunJob, tmp_path: Path) -> None:
    """Progress and logs go to standard error; the second run has nothing to do."""
    kaldi_dir = tmp_path / "kaldi"
    audio = write_corpus(ObjectStore((str(kaldi_dir),)), str(kaldi_dir), "unlabelled", 3, 1)
    keys = [str(record["utterance_id"]) for record in audio]
    tables = {
        "wav.scp": [f"{record['utterance_id']} {record['audio_uri']}" for record in audio],
        "text": [f"{key} HELLO" for key in keys],
        "utt2spk": [f"{key} {key[:13]}" for key in keys],
        "lexicon.txt": ["HELLO HH AH L OW"],
        **{f"{subset}.speakers": [key[:13]] for subset, key in zip(SUBSETS, keys, strict=True)},
    }
    for name, lines in tables.items():
        (kaldi_dir / name).write_text("".join(f"{line}\n" for line in lines))
    arguments = ("--recipe", str(TINY), "--run", str(tmp_path / "run"), "--json")
    first, second = (
        json.loads(run_job("ingest", "--kaldi-dir", str(kaldi_dir), *arguments).out)
        for _ in range(2)
    )
    assert (first["status"], second["status"]) == ("done", "nothing to do")
    assert first["manifests"] == second["manifests"]
    assert first["manifests"]["ingest"]["utterances_out"] == 3


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """Write a store with the metadata and audio of three small subsets."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    for subset in SUBSETS:
        write_corpus(store, corpus_uri, subset, num_speakers=2, num_each=2)
    return store, run_uri, corpus_uri


def test_an_exceeded_loss_budget_has_its_exit_code(
    corpus: tuple[ObjectStore, str, str], run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audio outside the allowed prefixes is quarantined; above the budget the exit code is 3."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    store, run_uri, corpus_uri = corpus
    records = write_corpus(store, corpus_uri, "unlabelled", num_speakers=2, num_each=2)
    records[0]["audio_uri"] = "/etc/hostname"
    records[1]["audio_uri"] = "s3://somebody-elses/audio.flac"
    write_metadata(store, corpus_uri, "unlabelled", records)
    selection = read_recipe(str(TINY)).selection
    for subset in SUBSETS:
        uri = metadata_uri(corpus_uri, subset)
        select_utterances(store, run_uri, subset, uri, selection, 0.0, serially)
    said = run_job(*usual("extract_features", run_uri, "--json"))
    require_message(said, 3, "2 of 4 utterances quarantined, the loss budget is 5.00%")
    assert "{'outside_prefixes': 2}" in said.err
    assert "fix the data, or raise loss_budget" in said.err


def test_empty_metadata_is_explained(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata objects without a record give exit code 1."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_metadata(store, corpus_uri, "labelled", [])
    said = run_job(*usual("select_utterances", run_uri))
    require_message(said, 1, "metadata/labelled holds no record")


def test_an_interrupted_step_is_one_line(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C has exit code 130, and the line says that the same command resumes."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.steps.selection.select.list_metadata", interrupt)
    said = run_job(*usual("select_utterances", tmp_path))
    require_message(said, 130, "select_utterances: interrupted: the same command resumes")


def test_package_states_what_a_cluster_must_have(run_job: RunJob) -> None:
    """A cluster with another Spark or Python is found before anything is copied to it."""
    said = " ".join(run_job("package", "--help").out.split())
    assert f"for Spark {version('pyspark')}, Python {sys.version_info[0]}." in said
