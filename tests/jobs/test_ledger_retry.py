"""`megahour retry` takes rows back: their tasks alone are done again, and the books balance."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from jobs.retry import later_steps
from pipeline.runs import ledger
from pipeline.runs.manifest import manifest_uri, read_manifest
from tests.four_steps import OUTPUTS, four_steps, manifests, put_teacher
from tests.job_programs import RunJob, Said
from tests.small_corpus import local_store, serially, write_corpus
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

pytestmark = pytest.mark.usefixtures("quick_decisions")

FEATURES = "features/unlabelled"
LATER = ["models/teacher", "targets/unlabelled", "partitions/unlabelled"]
Run = tuple[ObjectStore, str, str]
Ask = Callable[..., Said]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run four steps in 3 files of 48 utterances, of which one's audio is elsewhere."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_corpus(store, corpus_uri, "unlabelled", 6, 8)
    audio = Path(corpus_uri) / "audio" / "unlabelled-02-003.flac"
    audio.rename(audio.with_suffix(".gone"))
    do_steps((store, run_uri, corpus_uri))
    return store, run_uri, corpus_uri


def restore(run: Run) -> None:
    gone = Path(run[2]) / "audio" / "unlabelled-02-003.gone"
    gone.rename(gone.with_suffix(".flac"))


def do_steps(run: Run) -> list[str]:
    """Do the teacher and the four steps as far as they are not done; return the tasks that ran."""
    put_teacher(*run[:2])
    ran: list[str] = []

    def recording(tasks, function, description):
        ran.extend(f"{description} {getattr(task, 'name', '')}" for task in tasks)
        return serially(tasks, function, description)

    for step in four_steps(*run, recording).values():
        step()
    return ran


@pytest.fixture
def ask(run_job: RunJob) -> Ask:
    """Return a function that runs `megahour retry` on a run."""
    return lambda run_uri, *options: run_job(
        "retry", "--recipe", str(TINY), "--run", run_uri, *options
    )


def test_what_came_back_is_read_as_if_never_lost(ask: Ask, run: Run, tmp_path: Path) -> None:
    """One task of features runs again, and the later steps; manifests are an undisturbed run's."""
    store, run_uri, corpus_uri = run
    assert read_manifest(store, run_uri, FEATURES).quarantined.utterances == 1
    restore(run)
    said = ask(run_uri, "--reason", "missing_object,access_denied", "--with-later-steps")
    assert said.code == 0
    assert "features/unlabelled: 1 missing_object, in 1 tasks" in said.out
    assert all(f"made from these: {step}" in said.out for step in LATER)
    ran = [task for task in do_steps(run) if task.startswith(FEATURES)]
    assert len(ran) == 1
    undisturbed = ObjectStore((str(tmp_path),)), str(tmp_path / "undisturbed"), corpus_uri
    do_steps(undisturbed)
    assert manifests(store, run_uri) == manifests(*undisturbed[:2])


def test_later_steps_are_removed_only_when_asked(ask: Ask, run: Run) -> None:
    """Exit code 1, the steps by name, and nothing touched; --dry-run too touches nothing."""
    store, run_uri, _ = run
    before = store.list(run_uri)
    said = ask(run_uri, "--reason", "missing_object")
    assert said.code == 1
    assert all(f"made from these: {step}" in said.out for step in LATER)
    assert "--with-later-steps removes them" in said.out
    options = ("--reason", "missing_object", "--with-later-steps", "--dry-run", "--json")
    said = ask(run_uri, *options)
    document = json.loads(said.out)
    assert (said.code, document["later_steps"]) == (0, LATER)
    assert [row["reasons"] for row in document["rows"]] == [{"missing_object": 1}]
    assert store.list(run_uri) == before


def test_other_reasons_and_steps_are_left_alone(ask: Ask, run: Run) -> None:
    """No row of such reasons, or in such a step: exit code 0, and nothing is removed."""
    store, run_uri, _ = run
    before = store.list(run_uri)
    for options in (("truncated,silent",), ("missing_object", "--step", "features/heldout")):
        said = ask(run_uri, "--reason", *options)
        assert said == Said(0, "retry: no ledger has rows of these reasons\n", "")
    assert store.list(run_uri) == before


def test_an_unknown_reason_is_bad_usage(ask: Ask, run: Run) -> None:
    """Exit code 2, with the reasons that there are."""
    said = ask(run[1], "--reason", "missing")
    assert said.code == 2
    assert "--reason 'missing': need some of missing_object, access_denied, " in said.err


def test_an_unfinished_step_is_retried_too(ask: Ask, run: Run) -> None:
    """A step that its loss budget stopped has commits and no manifest."""
    store, run_uri, _ = run
    store.delete(manifest_uri(run_uri, FEATURES))
    for step in LATER:
        ledger.remove_step(store, run_uri, step)
    assert ask(run_uri, "--reason", "missing_object").code == 0
    restore(run)
    do_steps(run)
    assert read_manifest(store, run_uri, FEATURES).quarantined.utterances == 0


class KilledError(Exception):
    """KilledError ends a retry where a kill would."""


def test_a_killed_retry_is_given_again(
    ask: Ask, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed at any deletion, the steps can run as before, or the same retry finishes."""
    restore(run)
    store, run_uri, _ = run
    options = ("--reason", "missing_object", "--with-later-steps")
    delete, allowed = ObjectStore.delete, [0]

    def limited(self: ObjectStore, uri: str) -> None:
        if allowed[0] == 0:
            raise KilledError(uri)
        allowed[0] -= 1
        delete(self, uri)

    original = tmp_path / "original"
    Path(run_uri).rename(original)
    kills = 0
    for budget in range(0, 40, 3):
        shutil.copytree(original, run_uri, dirs_exist_ok=True)
        allowed[0] = budget
        monkeypatch.setattr(ObjectStore, "delete", limited)
        try:
            ask(run_uri, *options)
        except KilledError:
            kills += 1
        monkeypatch.setattr(ObjectStore, "delete", delete)
        do_steps(run)
        assert ask(run_uri, *options).code == 0
        do_steps(run)
        assert read_manifest(store, run_uri, FEATURES).quarantined.utterances == 0
        shutil.rmtree(run_uri)
    assert kills > 5


def test_later_steps_of_development_speakers() -> None:
    """Their features decide tuning and evaluation, and models only where newbob reads them."""
    of_dev = ["alignments/dev", "tuning", "evaluation", "report"]
    recipe = read_recipe(str(TINY))
    assert later_steps(recipe, ["features/dev"]) == of_dev
    newbob = [f"{section}.schedule='newbob'" for section in ("baseline", "teacher")]
    of_newbob = later_steps(read_recipe(str(TINY), newbob), ["features/dev"])
    assert {*of_dev, "models/baseline", "models/student"} <= {*of_newbob}
    assert "models/aligner" not in of_newbob
    assert {*of_dev} <= {*later_steps(recipe, ["features/labelled"])}


def test_later_steps_are_those_of_the_jobs() -> None:
    """Held-out features decide no model; unlabelled ones decide the targets and more."""
    recipe = read_recipe(str(TINY))
    assert later_steps(recipe, ["features/heldout"]) == ["evaluation", "report"]
    of_unlabelled = later_steps(recipe, [FEATURES])
    assert {*LATER, "models/student", "certificate", "report"} <= {*of_unlabelled}
    assert "features/labelled" not in of_unlabelled
    assert OUTPUTS[0] not in {step.partition("/")[0] for step in of_unlabelled}
