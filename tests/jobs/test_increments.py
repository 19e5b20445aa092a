"""Commands extend a run by --extends, refuse what no increment could be, and name the base."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore, join_uri
from jobs.cli import spark_steps
from jobs.cli.job import require_same_language_model
from jobs.run import launches
from pipeline.runs.increment import Bases, BaseStep, read_bases
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, sha256
from pipeline.runs.names import GRAPH_STEP
from tests.job_programs import RunJob, Said
from tests.pipeline.steps.increments.nights import SUBSET, Nights
from tests.small_corpus import plain_loop
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

SPEAKERS = ["ann", "bert", "clara"]
LAST = (
    "{{ prev_data_interval_start_success | ds if prev_data_interval_start_success else 'first' }}"
)


def give(run_job: RunJob, nights: Nights, job: str, run: str, *options: str) -> Said:
    """Run a job on a run of the corpus."""
    corpus = f"corpus.uri={nights.corpus_uri}"
    shared = ("--recipe", str(TINY), "--run", nights.run_uri(run), "--set", corpus)
    return run_job(job, *shared, *options)


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """Return a corpus of one night; jobs run their tasks in a plain loop."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    found = Nights.at(str(tmp_path))
    found.add(1, SPEAKERS)
    return found


def test_a_run_is_extended_by_commands(run_job: RunJob, nights: Nights) -> None:
    """Selection and extraction do the new night alone; queries name the base, and find nothing."""
    for job in ("select_utterances", "extract_features"):
        assert give(run_job, nights, job, "night-1").code == 0
    nights.add(2, SPEAKERS)
    extends = ("--extends", nights.run_uri("night-1"))
    dry = give(run_job, nights, "select_utterances", "night-2", *extends, "--dry-run")
    assert (dry.code, nights.store.list(nights.run_uri("night-2"))) == (0, [])
    for _ in range(2):
        for job in ("select_utterances", "extract_features"):
            said = give(run_job, nights, job, "night-2", *extends)
            assert said.code == 0, said.err
    assert "nothing to do" in said.out
    found = read_manifest(nights.store, nights.run_uri("night-2"), f"features/{SUBSET}")
    assert found.tally_out.utterances == 18
    assert {each.run for each in found.outputs} == {"", nights.run_uri("night-1")}
    # Later steps need no option: the run itself says what it extends.
    status = json.loads(give(run_job, nights, "status", "night-2", "--json").out)
    assert status["extends"] == [nights.run_uri("night-1")]
    assert status["steps"]["extract_features"][f"features/{SUBSET}"]["state"] == "done"
    verified = give(run_job, nights, "verify", "night-2")
    assert verified.code == 0, verified.out
    assert f"extends {nights.run_uri('night-1')}, whose objects are verified" in verified.out
    traced = give(run_job, nights, "inspect_object", "night-2", "ann-01-0")
    assert f"selected by {nights.run_uri('night-1')}" in traced.out
    assert f"features/{SUBSET}: written" in traced.out
    own = give(run_job, nights, "inspect_object", "night-2", "ann-02-0")
    assert "selected by" not in own.out
    assert f"features/{SUBSET}: written" in own.out


def test_an_unfinished_base_is_refused(run_job: RunJob, nights: Nights) -> None:
    """The message names what the base lacks: features; with a teacher, all before the student."""
    extends = ("--extends", nights.run_uri("night-1"))
    said = give(run_job, nights, "check", "night-2", *extends)
    assert said.code == 2
    assert "is unfinished: it has no manifest of selection/unlabelled, features/unl" in said.err
    nights.select("night-1", file_hours=0.01, seed=5)
    nights.extract("night-1")
    said = give(run_job, nights, "check", "night-2", *extends)
    assert "features/unlabelled was made with other settings: seed: 3 -> 5" in said.err
    uri = manifest_uri(nights.run_uri("night-1"), "models/teacher")
    nights.store.put(uri, Manifest("models/teacher", {}, {}, ()).to_bytes())
    said = give(run_job, nights, "check", "night-2", *extends)
    assert "no manifest of selection/labelled, selection/heldout, features/labelled" in said.err
    assert read_bases(nights.store, nights.run_uri("night-2")) == Bases(), "check writes nothing"


def test_what_no_increment_can_be_is_refused(run_job: RunJob, nights: Nights) -> None:
    """Exit code 2, with the key or the URI and the remedy."""
    base = nights.run_uri("night-1")
    elsewhere = join_uri(nights.corpus_uri, "night-1")
    for options, message in (
        (
            ("--extends", elsewhere),
            f"--extends {elsewhere}: need a run in {nights.folder}/, beside",
        ),
        (("--extends", nights.run_uri("night-2")), "a run cannot be its own base"),
        (
            ("--extends", base, "--set", "corpus.uri="),
            "corpus: uri = '': with --extends a run needs",
        ),
        (("--extends", base, "--set", "targets.rounds=2"), "rounds = 2: need 1 in an increment"),
    ):
        said = give(run_job, nights, "select_utterances", "night-2", *options)
        assert (said.code, said.out) == (2, "")
        assert message in said.err


def test_a_nightly_workflow_extends_the_last_success(run_job: RunJob) -> None:
    """Each command holds Airflow's template; a base elsewhere and no corpus.uri are refused."""
    shared = ("--recipe", str(TINY), "--run", "s3://bucket/runs/{{ ds }}")
    corpus = ("--set", "corpus.uri=s3://bucket/corpus")
    some = (*shared, *corpus, "--first", "select_utterances", "--last", "repartition")
    said = run_job("workflow", *some, "--extends", f"s3://bucket/runs/{LAST}")
    steps = json.loads(said.out)["steps"]
    for step in steps:
        command = step["command"]
        assert command[command.index("--extends") + 1] == f"s3://bucket/runs/{LAST}"
        assert "training.distributed.rank_launcher" not in command, "nothing is trained"
    assert [step["name"] for step in steps][-2:] == ["generate_targets", "repartition"]
    refused = run_job("workflow", *some, "--extends", f"s3://bucket/others/{LAST}")
    assert refused.code == 2
    assert "need a run in s3://bucket/runs/" in refused.err
    without = (*shared, "--manifest", "s3://bucket/{{ ds }}.jsonl")
    refused = run_job("workflow", *without, "--extends", f"s3://bucket/runs/{LAST}")
    assert (refused.code, refused.out) == (2, "")
    assert "corpus: uri = '': with --extends a run needs" in refused.err


def test_an_increment_trains_the_student_alone_on_ranks() -> None:
    """Baseline and teacher are the base's: one process finds that, without torchrun."""
    on_ranks = [
        each.step for each in launches([], 2, 4, inherits_models=True) if len(each.prefix) > 1
    ]
    assert on_ranks == ["train_student"]


def test_another_selection_in_s3_takes_the_other_subsets_over(
    s3_bucket: str, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws its own unlabelled speech, compares it with them, and reads their objects there."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    found = Nights.at(f"s3://{s3_bucket}")
    found.add(1, SPEAKERS)
    for subset, speaker in (("labelled", "lisa"), ("heldout", "hugo")):
        key = f"metadata/{subset}/date=2026-01-01/speaker_bucket=00/part-0.jsonl"
        record = json.dumps(found.record(1, speaker, 0)).encode()
        found.store.put(join_uri(found.corpus_uri, key), record)
    labelled = ("--set", "models.normalization='labelled'")
    taken = (*labelled, "--labelled-from", found.run_uri("base"))
    assert give(run_job, found, "select_utterances", "base", *labelled).code == 0
    other = ("--set", "selection.seed=6", "--set", "selection.file_hours=0.001")
    said = give(run_job, found, "select_utterances", "other", *taken, *other)
    assert said.code == 0, said.err
    assert read_bases(found.store, found.run_uri("other")) == Bases((), (found.run_uri("base"),))
    for subset in ("labelled", "heldout"):
        before, after = (
            read_manifest(found.store, found.run_uri(run), f"selection/{subset}")
            for run in ("base", "other")
        )
        assert after.is_inherited
        assert [each.run for each in after.outputs] == [found.run_uri("base")]
        assert after.tally_out == before.tally_out
    own = read_manifest(found.store, found.run_uri("other"), f"selection/{SUBSET}")
    assert own.extends is None
    assert own.tally_out.utterances == 9
    assert give(run_job, found, "verify", "other", *labelled, *other).code == 0
    found.add(2, ["hugo"])
    said = give(run_job, found, "select_utterances", "shares", *taken)
    assert "shares 1 speaker(s) with selection/heldout" in said.err


def test_a_workflow_of_another_selection_trains_the_student_alone(run_job: RunJob) -> None:
    """Each command names the base; models of all speech are refused."""
    shared = ("--recipe", str(TINY), "--run", "s3://bucket/runs/{{ ds }}")
    corpus = ("--set", "corpus.uri=s3://bucket/corpus", "--first", "select_utterances")
    taken = ("--labelled-from", "s3://bucket/runs/first")
    refused = run_job("workflow", *shared, *corpus, *taken)
    assert refused.code == 2
    assert "models: normalization = 'all': need 'labelled' with --labelled-from" in refused.err
    labelled = ("--set", "models.normalization='labelled'")
    steps = json.loads(run_job("workflow", *shared, *corpus, *taken, *labelled).out)["steps"]
    for step in steps:
        assert step["command"][step["command"].index(taken[0]) + 1] == taken[1]
    module = "training.distributed.rank_launcher"
    assert [each["name"] for each in steps if module in each["command"]] == ["train_student"]
    (realign,) = [each for each in steps if each["name"] == "realign"]
    made = {each.partition("{{ ds }}/")[2] for each in realign["manifests"]}
    assert made == {f"alignments/{name}/manifest.json" for name in ("round_1", "labelled")}


def test_a_language_model_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """By its digest: its name in the recipe is the same."""
    text = tmp_path / "corpus" / "text.txt"
    text.parent.mkdir()
    text.write_text("see a cab\n")
    job: Any = SimpleNamespace(
        store=ObjectStore((str(tmp_path),)),
        corpus_uri=str(text.parent),
        recipe=read_recipe(str(TINY), ["evaluation.language_model_text=text.txt"]),
        bases=Bases((), ("base",)),
    )
    graph = Manifest(GRAPH_STEP, {}, {"language_model_text": sha256(text.read_bytes())}, ())
    require_same_language_model(job, BaseStep("base", graph, ""))
    text.write_text("see a wasp\n")
    said = "base: graphs/decoding was made of another language_model_text: .*text.txt: SHA-256"
    with pytest.raises(ConfigurationError, match=rf"{said}.* run without --labelled-from"):
        require_same_language_model(job, BaseStep("base", graph, ""))
