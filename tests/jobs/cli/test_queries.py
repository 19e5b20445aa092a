"""verify and inspect print their findings and exit with the documented codes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.settings import plain
from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.megahour import module_of
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import DEV, features_step, model_step, realignment_rounds
from pipeline.runs.sealed_json import NamedObject, naming, seal
from tests.job_programs import RunJob, Said
from tests.jobs.job_records import RECORD
from tests.small_run import SETTINGS, copy_run, make_run, outputs, selected_ids
from tests.whole_path.processes import TINY
from training.fit.model_specs import aligner_fit, baseline_fit, student_fit, teacher_fit
from training.settings.recipe import read_recipe

Run = tuple[ObjectStore, str]
Ask = Callable[..., Said]


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run."""
    return make_run(tmp_path_factory.mktemp("undamaged"))


@pytest.fixture
def ask(run_job: RunJob) -> Ask:
    """Return a function that runs a job on a run, with the settings that made it."""
    overrides = [part for setting in SETTINGS for part in ("--set", setting)]

    def run(name: str, run_uri: str, *options: str) -> Said:
        return run_job(name, "--recipe", str(TINY), "--run", run_uri, *overrides, *options)

    return run


def test_verify_of_an_undamaged_run(ask: Ask, undamaged: Run) -> None:
    """Exit code 0, one line of figures, and what could be swept."""
    code, out, err = ask("verify", undamaged[1])
    assert (code, err) == (0, "")
    assert "all is as the manifests say" in out
    steps = "features/unlabelled, selection/unlabelled"
    assert f"scratch of the finished steps {steps}: --sweep deletes them" in out
    code, out, _ = ask("verify", undamaged[1], "--json")
    document = json.loads(out)
    assert (code, document["status"], document["findings"]) == (0, "verified", [])
    assert document["num_objects"] > 8
    assert document["orphans"] == []
    assert len(document["scratch"]) == 13
    assert document["requests"]["get"] >= document["num_objects"]
    assert document["requests"]["bytes_received"] >= document["num_bytes"]
    assert document["swept"] is False


def test_verify_compares_the_recipe(ask: Ask, undamaged: Run) -> None:
    """Exit code 1: the settings that differ, with both values, and how to give the right ones."""
    code, out, _ = ask("verify", undamaged[1], "--set", "targets.k=5", "--set", "features.seed=4")
    assert code == 1
    for part in (
        "targets/unlabelled/manifest.json",
        "k: 4 -> 5",
        "features/unlabelled/manifest.json",
        "seed: 3 -> 4",
        "give the recipe that made the run, with its --set",
        "2 findings",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("made_by", "asked_of", "expected"),
    [
        ((), ("targets.offsets=all",), "offsets: one -> all"),
        (("targets.offsets=all",), (), "offsets: all -> one"),
        (("targets.offsets=all",), ("targets.offsets=all",), "all is as the manifests say"),
    ],
)
def test_verify_compares_the_settings(
    ask: Ask, tmp_path: Path, made_by: Sequence[str], asked_of: Sequence[str], expected: str
) -> None:
    """Manifests state every setting, also one at its default."""
    config = read_recipe(str(TINY), [*SETTINGS, *made_by]).targets.settings
    step = "targets/unlabelled"
    manifest = Manifest(step, config, {}, ()).to_bytes()
    ObjectStore((str(tmp_path),)).put(join_uri(str(tmp_path), step, "manifest.json"), manifest)
    options = [part for setting in asked_of for part in ("--set", setting)]
    code, out, _ = ask("verify", str(tmp_path), *options)
    assert expected in out
    assert code == (0 if asked_of == made_by else 1)


@pytest.mark.parametrize("chosen", [{}, {"student": "gtc"}])
def test_a_trainer_chosen_on_the_command_line_is_the_recipes(
    ask: Ask, tmp_path: Path, chosen: dict[str, str]
) -> None:
    """The job's record says what --trainer was; without it, the recipe's trainer is compared."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    config = student_fit(read_recipe(str(TINY), SETTINGS, {"student": "gtc"})).config
    manifest = Manifest("models/student", config, {}, ()).to_bytes()
    named = [NamedObject.of("models/student/manifest.json", manifest)]
    record = naming({**RECORD, "step": "train_student", "trainers": chosen}, named)
    store.put(join_uri(run_uri, "models/student/manifest.json"), manifest)
    store.put(join_uri(run_uri, "steps/train_student.json"), seal(record, indent=1))
    code, out, _ = ask("verify", run_uri)
    assert code == (0 if chosen else 1)
    assert ("training.trainer." in out) is not bool(chosen)


@pytest.mark.parametrize("has_dev", [True, False])
def test_verify_expects_newbobs_loss_where_it_was_measured(
    ask: Ask, tmp_path: Path, has_dev: bool
) -> None:
    """On the development speakers where the run has some, else on labelled speakers left out."""
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    newbob = ["baseline.schedule=newbob", "teacher.schedule=newbob"]
    recipe = read_recipe(str(TINY), [*SETTINGS, *newbob])
    fits = [baseline_fit(recipe), teacher_fit(recipe)]
    aligner = aligner_fit(recipe, realignment_rounds(1)[0])
    made = {model_step(fit.name): fit.on_development_speakers().config for fit in fits}
    configs = {model_step(aligner.name): aligner.config, **made}
    if has_dev:
        configs[features_step(DEV)] = plain(recipe.features)
    for step, config in configs.items():
        store.put(
            join_uri(run_uri, step, "manifest.json"), Manifest(step, config, {}, ()).to_bytes()
        )
    options = [part for setting in newbob for part in ("--set", setting)]
    _, out, _ = ask("verify", run_uri, *options, "--json")
    differing = {
        each["object"].removesuffix("/manifest.json")
        for each in json.loads(out)["findings"]
        if "validation" in each["found"] + each["expected"]
    }
    assert differing == (set() if has_dev else set(made))


def test_verify_of_a_damaged_run(ask: Ask, undamaged: Run, tmp_path: Path) -> None:
    """Exit code 1; object, expected, found and remedy, for people and as JSON; nothing is swept."""
    store, run_uri = copy_run(undamaged[1], tmp_path)
    output = outputs(store, run_uri, "features")[0]
    store.delete(join_uri(run_uri, output.key))
    code, out, _ = ask("verify", run_uri, "--sweep")
    assert code == 1
    assert out.startswith(output.key)
    for part in ("expected", output.sha256[:16], "found     missing", "remedy", "nothing swept"):
        assert part in out
    code, out, _ = ask("verify", run_uri, "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["object"], finding["found"]) == (1, output.key, "missing")


def test_verify_sweeps_when_asked(ask: Ask, undamaged: Run, tmp_path: Path) -> None:
    """Orphans are gone afterwards, and the run is as good as before."""
    store, run_uri = copy_run(undamaged[1], tmp_path)
    orphan = join_uri(run_uri, f"features/unlabelled/ab/000000-{'ab' * 8}.parquet")
    store.put(orphan, b"never committed")
    code, out, _ = ask("verify", run_uri, "--sweep", "--json")
    assert (code, json.loads(out)["swept"]) == (0, True)
    assert not store.exists(orphan)
    document = json.loads(ask("verify", run_uri, "--json")[1])
    assert (document["orphans"], document["scratch"]) == ([], [])


def test_verify_of_no_run(ask: Ask, tmp_path: Path) -> None:
    """Exit code 1: a wrong --run is not a run in which all holds."""
    code, out, err = ask("verify", str(tmp_path / "nowhere"))
    assert (code, out) == (1, "")
    assert "holds no step of a run: check --run" in err


def test_inspect_shows_a_tree(ask: Ask, undamaged: Run) -> None:
    """Every step, its object and row, and the audio; the same as JSON."""
    store, run_uri = undamaged
    utterance_id = selected_ids(store, run_uri)[0]
    code, out, err = ask("inspect_object", run_uri, utterance_id)
    assert (code, err) == (0, "")
    assert out.startswith(f"{utterance_id}\n  metadata/unlabelled: read\n")
    for part in ("selection/unlabelled: selected", ".parquet, row", ".jsonl, line", "unchanged"):
        assert part in out
    code, out, _ = ask("inspect_object", run_uri, utterance_id, "--json")
    document = json.loads(out)
    assert (code, document["utterance_id"]) == (0, utterance_id)
    assert [each["step"] for each in document["steps"]][-1] == "partitions/unlabelled"
    assert document["audio"]["unchanged"] is True
    assert 0 < document["requests"]["get"] < 50


def test_inspect_of_an_unknown_utterance(ask: Ask, undamaged: Run) -> None:
    """Exit code 1, and where it was looked for."""
    code, out, err = ask("inspect_object", undamaged[1], "nobody")
    assert (code, out) == (1, "")
    assert "inspect: no utterance 'nobody' in the metadata of" in err


@pytest.mark.parametrize("name", ["verify", "inspect"])
def test_a_bad_run_uri_is_bad_usage(ask: Ask, name: str) -> None:
    """Exit code 2."""
    options = ("any",) if name == "inspect" else ()
    code, out, err = ask(module_of(name), "ftp://host/run", *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"{name}: ftp://host/run")
