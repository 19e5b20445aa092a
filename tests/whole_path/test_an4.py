"""Every step runs on recorded speech, from a Kaldi directory to the report."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, join_uri
from jobs.cli import spark_steps
from jobs.planning.run_plan import plan_run, planned_workload, store_plan
from jobs.run import JOBS, launches
from jobs.run_table import (
    BUILD_GRAPH,
    STEPS,
    TRAIN_STUDENT,
    optional_steps,
    step_configs,
    written_steps,
)
from pipeline.audit.verify import Expectation, Verification, verify_run
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALL_SUBSETS
from tests.job_programs import RunJob, exit_code
from tests.jobs.planning.test_throughputs import CALIBRATION
from tests.small_corpus import plain_loop
from tests.training.forked_programs import run_on_ranks
from tests.whole_path.manifests import require_balance
from tests.whole_path.processes import REPOSITORY, TINY
from tests.whole_path.reduced_an4 import write_reduced_an4
from tests.whole_path.run_damage import flipped, folders, kinds, replaced
from training.evaluate.word_errors import read_errors
from training.settings.recipe import read_recipe

pytestmark = pytest.mark.timeout(2400)

MODELS = {"baseline", "teacher", "student"}
NUM_RANKS = 4


@dataclass(frozen=True)
class WholeRun:
    """WholeRun is a finished run: its place, and what its last job printed."""

    folder: Path
    output: str

    @property
    def store(self) -> ObjectStore:
        return ObjectStore((str(self.folder),))

    def report(self) -> dict[str, dict]:
        return json.loads((self.folder / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def whole(an4_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """Run every job in this process; the student trains on four ranks, in processes of their own.

    Spark's tasks run in a plain loop: test_s3.py has the same steps as a user starts them.
    """
    folder = tmp_path_factory.mktemp("an4")
    kaldi_dir = write_reduced_an4(an4_dir, folder / "kaldi")
    shared, said = ("--recipe", str(TINY), "--run", str(folder / "run")), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark_steps, "distribute_on_spark", plain_loop)
        for launch in launches(
            ["--kaldi-dir", str(kaldi_dir)], 1, NUM_RANKS, num_alignment_rounds=2
        ):
            arguments = (*shared, *launch.arguments)
            if launch.step == TRAIN_STUDENT:
                run_on_ranks(NUM_RANKS, JOBS / f"{TRAIN_STUDENT}.py", arguments, REPOSITORY)
                continue
            with redirect_stdout(io.StringIO()) as output:
                assert exit_code(launch.step, *arguments) == 0
            said = output.getvalue()
    return WholeRun(folder / "run", said)


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
    for name, step in report["steps"].items():
        assert step.keys() == {"seconds", "utterances_in", "utterances_out", "quarantined"}
        assert step["seconds"] >= 0
        assert step["utterances_in"] == step["utterances_out"] + step["quarantined"]
        assert (step["utterances_in"] > 0) == (name != BUILD_GRAPH)  # a graph is of words alone
    for model in MODELS:  # every sub-epoch was trained by the one start of its step
        frames = [point["num_frames"] for point in report["curves"][model]]
        assert [each["num_frames"] for each in report["pace"][model]] == frames
        assert [each["sub_epoch"] for each in report["pace"][model]] == list(range(len(frames)))
        assert all(each["seconds"] > 0 for each in report["pace"][model])
    table = re.search(r"^baseline +([0-9.]+) +([0-9.]+)$", whole.output, re.MULTILINE)
    assert table is not None
    tuned = report["development"]["baseline"]["wer"]
    assert [float(each) for each in table.groups()] == pytest.approx([baseline, tuned], abs=0.05)


def test_every_heldout_utterance_is_kept(whole: WholeRun) -> None:
    """The files of errors, hypotheses and references have all of them, and add up to the scores."""
    report, folder = whole.report(), whole.folder
    heldout = [
        json.loads(line)["utterance_id"]
        for output in read_manifest(whole.store, str(folder), "selection/heldout").outputs
        for line in (folder / output.key).read_text().splitlines()
    ]
    kept = {name: (folder / key).read_bytes() for name, key in report["files"].items()}
    by_utterance = read_errors(kept["errors.jsonl"])
    assert sorted(each.utterance_id for each in by_utterance) == sorted(heldout)
    for model in MODELS:
        assert len(kept[f"{model}.trn"].splitlines()) == len(heldout)
        errors = sum(each.errors[model].errors for each in by_utterance)
        counts = report["word_errors"][model]["all"]
        assert errors == sum(counts[name] for name in ("substitutions", "insertions", "deletions"))
        assert errors == sum(each["errors"][model] for each in report["speakers"].values())
    pooled = report["statistics"]["pooled"]
    assert pooled["num_speakers"] == len({each.speaker_id for each in by_utterance})
    assert pooled["wer"]["student"]["value"] == pytest.approx(report["wer"]["student"]["all"])


def test_hours_in_are_hours_out_and_quarantined(whole: WholeRun) -> None:
    """They agree in each manifest and from step to step, though one audio file is cut short."""
    manifests = require_balance(whole.store, str(whole.folder), ALL_SUBSETS)
    features = manifests["features/unlabelled"]
    assert features.quarantined.utterances == 1
    assert features.quarantined.duration_ms > 1000
    assert ledger_reasons(features.ledgers) == {"truncated": 1}
    report = whole.report()
    assert all(
        stage["in_ms"] == stage["out_ms"] + stage["quarantined_ms"] + stage["unselected_ms"]
        for stages in report["waterfall"].values()
        for stage in stages
    )
    assert report["waterfall"]["unlabelled"][-1]["step"] == "partitions/unlabelled"
    assert report["origin"]["machines"]
    assert report["hours"]["unlabelled"] == pytest.approx(features.tally_out.hours)
    assert report["quarantine"]["features/unlabelled"] == {"truncated": 1}


def test_the_student_was_trained_in_two_tiers(whole: WholeRun) -> None:
    """Four ranks train in two groups of two, and the recipe of each step is kept with the run."""
    manifest = json.loads((whole.folder / "models" / "student" / "manifest.json").read_text())
    assert manifest["statistics"]["num_ranks"] == NUM_RANKS
    config = manifest["config"]["training"]["trainer"]
    assert (config["name"], config["group_size"]) == ("htm", 2)
    for step in STEPS:
        record = json.loads((whole.folder / "steps" / f"{step}.json").read_text())
        assert record["recipe"]["student"]["trainer"]["name"] == "htm"


@dataclass(frozen=True)
class Copy:
    """Copy is a copy of the run, with a plan, to damage and to verify within this process."""

    folder: Path

    @property
    def kinds(self) -> dict[str, list[str]]:
        """The keys by kind, without scratch, which may change and be deleted."""
        found = kinds(self.folder)
        return {kind: keys for kind, keys in found.items() if "/scratch/" not in kind}

    def verify(self) -> Verification:
        """Verify as megahour verify does."""
        store, uri = ObjectStore((str(self.folder),)), str(self.folder)
        recipe = read_recipe(str(TINY))
        jobs = {name: written_steps(recipe, name) for name in STEPS}
        configs = step_configs(recipe, recipe)
        expectation = Expectation(configs, jobs, optional_steps(recipe))
        return verify_run(store, uri, join_uri(uri, "corpus"), lambda *_: None, expectation)

    def named(self) -> set[str]:
        """Verify, and return the keys that findings and orphans name."""
        found = self.verify()
        objects = (finding.object for finding in found.findings)
        return {key.removeprefix(f"{self.folder}/") for key in (*objects, *found.orphans)}


def test_the_trained_student_is_exported_in_int8(
    whole: WholeRun, run_job: RunJob, tmp_path: Path
) -> None:
    """Both precisions hear all held-out audio; int8 is smaller, and its words are as good.

    Of AN4's few held-out words, weights of 8 bits may change one in twenty.
    """
    place, scores, sizes = ("--recipe", str(TINY), "--run", str(whole.folder)), {}, {}
    for name, more in (("float32", ()), ("int8", ("--int8",))):
        out = ("--out", str(tmp_path / f"{name}.zip"), "--score", "--json")
        said = run_job("export", *place, *out, *more)
        assert said.code == 0, said.err
        answer = json.loads(said.out)
        assert answer["precision"] == name
        scores[name], sizes[name] = answer["score"], answer["network_bytes"]
    assert sizes["int8"] < sizes["float32"]
    heard = read_manifest(whole.store, str(whole.folder), "selection/heldout").tally_out.utterances
    for score in scores.values():
        assert score["utterances"] + score["refused"] == heard > 0
    words = scores["float32"]["reference_words"]
    assert scores["int8"]["reference_words"] == words > 0
    difference = abs(scores["int8"]["errors"] - scores["float32"]["errors"])
    assert difference <= max(2, 0.05 * words), scores


@pytest.fixture(scope="module")
def copy(whole: WholeRun, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    folder = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(whole.folder, folder)
    store, recipe = ObjectStore((str(folder),)), read_recipe(str(TINY))
    plan = plan_run(planned_workload(1, 1), recipe, CALIBRATION, lambda _: load_cluster("demo"))
    store_plan(store, str(folder), plan, CALIBRATION)
    return Copy(folder)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read damaged objects again without waiting."""
    monkeypatch.setattr("infra.store.retry.FIRST_WAIT_S", 0.0)


def test_a_whole_run_is_as_its_records_say(copy: Copy) -> None:
    """No finding, no orphan; selection's scratch apart; every other object has been read."""
    found = copy.verify()
    assert (found.findings, found.orphans, found.unfinished) == ((), (), ())
    objects = {path.relative_to(copy.folder).as_posix() for path in copy.folder.rglob("*.*")}
    assert set(found.scratch) == {key for key in objects if "/scratch/" in key}
    assert len(copy.kinds) > 30


@pytest.mark.chaos
@pytest.mark.parametrize("change", [flipped, lambda _: None], ids=["flipped", "deleted"])
def test_every_kind_of_object_is_verified(copy: Copy, change: Any) -> None:
    """One bit of one object of each kind that the run has, or the whole object, is named."""
    unnoticed = set()
    for kind, (key, *_) in copy.kinds.items():
        with replaced(copy.folder, {key: change((copy.folder / key).read_bytes())}):
            if key not in copy.named():
                unnoticed.add(kind)
    assert unnoticed == set()


def test_a_record_in_anothers_place_is_found(copy: Copy) -> None:
    """Each record is whole, and of the right kind; for other objects that is another digest."""
    unnoticed = set()
    for kind, keys in copy.kinds.items():
        if not kind.endswith(".json") and not kind.startswith("steps/"):
            continue
        data = [(copy.folder / key).read_bytes() for key in keys]
        other = next((each for each in data if each != data[0]), None)
        if other is not None:
            with replaced(copy.folder, {keys[0]: other}):
                if keys[0] not in copy.named():
                    unnoticed.add(kind)
    assert unnoticed == set()


@pytest.mark.parametrize(
    "change",
    [lambda data: data[: len(data) // 2], lambda _: b"", lambda data: data + b"\n"],
    ids=["truncated", "emptied", "lengthened"],
)
def test_all_objects_of_other_lengths_are_found(copy: Copy, change: Any) -> None:
    """Cut, emptied or longer by a blank: many at once, but for what names others of them."""
    manifests, records, others = groups = ([], [], [])
    for key, *_ in copy.kinds.values():
        is_record = re.search(r"/commits/|/checkpoints/\d+\.json|^steps/|(plan|report)\.json", key)
        (manifests if "/manifest." in key else records if is_record else others).append(key)
    for keys in groups:
        changes = {key: change((copy.folder / key).read_bytes()) for key in keys}
        with replaced(copy.folder, changes):
            assert set(keys) - copy.named() == set()


def test_a_foreign_object_in_any_folder_is_found(copy: Copy) -> None:
    """Of any name, and a copy of each kind of object under another name."""
    some = {keys[0] for keys in copy.kinds.values()}
    for name in ("notes.txt", "x.json", ".partial-0123"):
        foreign = {f"{folder}/{name}": b"{}" for folder in folders(some)}
        if name.startswith("."):
            foreign = {key: data for key, data in foreign.items() if not key.startswith("corpus")}
        with replaced(copy.folder, foreign):
            assert set(foreign) - copy.named() == set()
    copies = {
        f"{folder}/copy-of-{name}": (copy.folder / folder / name).read_bytes()
        for folder, _, name in (key.rpartition("/") for key in some)
    }
    with replaced(copy.folder, copies):
        assert set(copies) - copy.named() == set()


def test_scratch_may_be_deleted(copy: Copy) -> None:
    """No step reads it again, and verification does not miss it."""
    found = kinds(copy.folder)
    scratch = {key: None for kind, keys in found.items() if "/scratch/" in kind for key in keys}
    with replaced(copy.folder, scratch):
        verified = copy.verify()
    assert (verified.findings, verified.orphans, verified.scratch) == ((), (), ())


def test_a_changed_pronunciation_is_refused(copy: Copy, run_job: RunJob) -> None:
    """Evaluation with another lexicon than the alignment's would be of other words: exit code 1."""
    lexicon = (copy.folder / "corpus" / "lexicon.txt").read_bytes()
    spelt = lexicon.replace(b"AH", b"AA", 1)
    manifest = {"evaluation/manifest.json": None}
    with replaced(copy.folder, {"corpus/lexicon.txt": spelt, **manifest}):
        arguments = ("--recipe", str(TINY), "--run", str(copy.folder))
        said = run_job("evaluate", *arguments)
        assert said.code == 1
        for part in ("lexicon.txt is not the lexicon that made alignments/labelled", "put it back"):
            assert part in said.err
        assert run_job("bootstrap", *arguments).code == 1
        assert "corpus/lexicon.txt" in copy.named()


def test_a_job_record_is_stored_again(copy: Copy, run_job: RunJob) -> None:
    """A record that a killed job did not store, a damaged one, and names of what is there no more.

    A job that finds its step done stores what is missing; a whole record stays as it is.
    """
    arguments = ("--recipe", str(TINY), "--run", str(copy.folder))
    record = copy.folder / "steps" / "train_teacher.json"
    checkpoints = copy.folder / "models" / "teacher" / "checkpoints"
    before = record.read_bytes()

    def train() -> dict[str, Any]:
        assert run_job("train_teacher", *arguments).code == 0
        return json.loads(record.read_bytes())

    train()
    assert record.read_bytes() == before
    for damage in (None, flipped(before)):
        with replaced(copy.folder, {"steps/train_teacher.json": damage}):
            assert train()["status"] == "nothing to do"
            assert copy.named() == set()
    gone = {f"models/teacher/checkpoints/{each.name}": None for each in checkpoints.iterdir()}
    with replaced(copy.folder, {**gone, "steps/train_teacher.json": before}):
        assert len(copy.named()) == 2
        again = train()
        assert (again["status"], len(again["objects"])) == ("done", 1)
        assert copy.named() == set()


def test_a_damaged_job_record_stops_the_report(copy: Copy, run_job: RunJob) -> None:
    """The message names the record, and the job that stores it again."""
    data = flipped((copy.folder / "steps" / "realign.json").read_bytes())
    with replaced(copy.folder, {"steps/realign.json": data}):
        said = run_job("report", "--recipe", str(TINY), "--run", str(copy.folder))
    assert said.code == 1
    assert "steps/realign.json" in said.err
    assert "run megahour realign again, which stores the record again" in said.err
