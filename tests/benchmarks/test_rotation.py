"""The rotation holds every speaker out once, and its table counts what its files say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from jobs.cli.arguments import recipe_path
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest
from tests.benchmarks.rotation.__main__ import (
    SEEDED,
    Experiment,
    begun_before,
    link_scores,
    recipe_digest,
)
from tests.benchmarks.rotation.folds import NUM_FOLDS, Corpus, Fold, fold_of
from tests.benchmarks.rotation.lanes import link_run
from tests.benchmarks.rotation.scores import RECIPE, Scoring, collect
from tests.benchmarks.rotation.table import (
    Measured,
    ablation_table,
    pair_table,
    require_one_recipe,
    whole_table,
)
from training.settings.recipe import read_recipe

SPEAKERS = [f"{'f' if number < 21 else 'm'}{number:02d}" for number in range(74)]


def test_every_speaker_is_held_out_once() -> None:
    """Folds partition the speakers; a fold's subsets are disjoint, and hold women and men."""
    folds = [fold_of(SPEAKERS, number) for number in range(NUM_FOLDS)]
    assert sorted(name for fold in folds for name in fold.heldout) == SPEAKERS
    assert sorted(name for fold in folds for name in fold.labelled) == SPEAKERS
    for fold in folds:
        subsets = fold.subsets()
        assert sorted(name for some in subsets.values() for name in some) == SPEAKERS
        assert [len(subsets[name]) // 3 for name in ("heldout", "labelled", "dev")] == [4, 4, 1]
        assert all({name[0] for name in some} == {"f", "m"} for some in subsets.values())
        assert fold_of(SPEAKERS[::-1], folds.index(fold)) == fold


def test_the_oracle_hears_the_same_speakers() -> None:
    """It transcribes all but one of the unlabelled speakers, and never one that is held out."""
    fold = fold_of(SPEAKERS, 0)
    words = dict.fromkeys(SPEAKERS, 70) | {fold.unlabelled[5]: 3}
    oracle = fold.transcribed(words)
    assert oracle.unlabelled == (fold.unlabelled[5],)
    assert {*oracle.labelled, *oracle.unlabelled} == {*fold.labelled, *fold.unlabelled}
    assert (oracle.heldout, oracle.dev) == (fold.heldout, fold.dev)
    half = fold.transcribed(words, 2)
    assert half.labelled == tuple(each for each in oracle.labelled if each in half.labelled)
    assert len(half.labelled) == -(-len(oracle.labelled) // 2)
    assert half.unlabelled[0] == fold.unlabelled[5]
    assert sorted((*half.labelled, *half.unlabelled)) == sorted(
        (*oracle.labelled, fold.unlabelled[5])
    )


def test_baseline_and_oracle_read_as_many_frames_as_the_student(
    tmp_path: Path, an4_dir: Path
) -> None:
    """All 5,442 words are held out; epochs times hours are the student's, within half an epoch."""
    corpus = Corpus(an4_dir)
    words = corpus.words()
    folds = [fold_of(corpus.speakers, number) for number in range(NUM_FOLDS)]
    assert sum(words[name] for fold in folds for name in fold.heldout) == 5442
    experiment = Experiment(corpus, folds[0], tmp_path, ("student.num_passes=4",), ())
    # Four passes of six sub-epochs, after each of which a quarter of the labelled speech is read.
    labelled, unlabelled = (corpus.hours(getattr(folds[0], n)) for n in ("labelled", "unlabelled"))
    hours = 4 * unlabelled + 6 * labelled
    for speakers in (folds[0].labelled, (*folds[0].labelled, *folds[0].unlabelled)):
        epochs, chunked = (int(each.partition("=")[2]) for each in experiment.epochs(speakers))
        assert abs(epochs * corpus.hours(speakers) - hours) <= corpus.hours(speakers) / 2
        assert epochs - chunked == round(epochs * 4 / 24)
    experiment.write_data()
    lists = (tmp_path / "oracle_data" / "labelled.speakers").read_text().split()
    assert len(lists) == len(folds[0].labelled) + len(folds[0].unlabelled) - 1
    assert Path((tmp_path / "run_data" / "wav.scp").read_text().split()[1]).exists()


def test_the_measured_recipe_is_shipped(tmp_path: Path, an4_dir: Path) -> None:
    """`placements` is what fold 0 trains its run by, but for the name."""
    corpus = Corpus(an4_dir)
    fold = fold_of(corpus.speakers, 0)
    seeds = tuple(f"{section}.seed=17" for section in SEEDED)
    experiment = Experiment(corpus, fold, tmp_path, seeds, ())
    measured = experiment.recipe(*experiment.epochs(fold.labelled))
    assert replace(measured, name="placements") == read_recipe(recipe_path("placements"))


def test_another_recipe_needs_another_label(tmp_path: Path, an4_dir: Path) -> None:
    """A fold resumes with the settings that it began with, and is refused with others."""
    corpus = Corpus(an4_dir)
    fold = fold_of(corpus.speakers, 0)
    experiment = Experiment(corpus, fold, tmp_path, ("student.seed=1",), ())
    assert [begun_before(experiment) for _ in range(2)] == [False, True]
    other = Experiment(corpus, fold, tmp_path, ("student.seed=2",), ())
    with pytest.raises(SystemExit, match="was begun with another recipe: give another --label"):
        begun_before(other)


def scored(folder: Path, row: str, errors: list[int]) -> Scoring:
    """Write the score of a model: two speakers of two utterances of ten words, at one placement."""
    utterances = [
        {
            "utterance_id": f"{speaker}-{n}",
            "speaker_id": speaker,
            "placement": "DP1",
            "words": 10,
            "errors": errors.pop(0),
        }
        for speaker in ("ann", "bob")
        for n in (1, 2)
    ]
    facts = {"frames": 9, "updates": 3, "parameters": 7, "senones": 5, "acoustic_scale": 0.4}
    result = folder / f"{row}.json"
    result.write_text(json.dumps({"facts": facts, "utterances": utterances[::-1]}))
    return Scoring(row, row, folder, folder, read_recipe(str(RECIPE)), result)


def measured(folder: Path, label: str, student: list[int], fold: int = 0) -> Measured:
    folder.mkdir()
    found = [
        scored(folder, "baseline", [4, 4, 4, 4]),
        scored(folder, "student", student),
        scored(folder, "oracle", [2, 2, 2, 2]),
    ]
    about: dict[str, Any] = {"condition": "multi", "fold": fold, "seed": 1, "label": label}
    target = folder / "results" / f"{label}.jsonl"
    collect(found, about, target)
    return Measured.read(target)


def test_the_table_pools_errors_over_files(tmp_path: Path) -> None:
    """WER is of all words, WERR of all errors, recovery of what the oracle gains."""
    first = measured(tmp_path / "0", "plain", [3, 3, 3, 3])
    second = measured(tmp_path / "1", "plain", [2, 4, 3, 3], fold=1)
    assert [each.errors["student"] for each in second.speakers] == [6, 6]
    table = "\n".join(whole_table([first, second]))
    assert "fold/seed 0/1, 1/1; 2 speakers held out" in table
    assert "| baseline: WER | 40.0 (40.0..40.0) |" in table
    assert "| student: WERR | 25.0 (25.0..25.0) |" in table
    assert "| student: recovery | 50.0 (50.0..50.0) |" in table
    assert "| student | 9 | 3 | 7 | 5 | 0.4 |" in table


def test_pairs_are_compared_on_folds_that_both_have(tmp_path: Path) -> None:
    """A label's model against another label's, with the folds that only one has left out."""
    files = [
        measured(tmp_path / "0", "plain", [4, 4, 4, 4]),
        measured(tmp_path / "1", "plain", [1, 1, 1, 1], fold=1),
        measured(tmp_path / "2", "other", [3, 3, 3, 3]),
    ]
    (line,) = [each for each in pair_table(files, "plain", "student") if "other" in each]
    assert line == "| other | 1 | 40.0 -> 30.0: 25.0 (25.0..25.0) |"


def test_ablations_show_the_student_before_and_after_smbr(tmp_path: Path) -> None:
    """Each label has both of its students against the reference's, errors of all placements."""
    files = []
    for label, errors, after in (("plain", [4] * 4, [2] * 4), ("other", [3] * 4, [3] * 4)):
        folder = tmp_path / label
        folder.mkdir()
        found = [scored(folder, "student", errors), scored(folder, "student_smbr", after)]
        about = {"condition": "multi", "fold": 0, "seed": 1, "label": label}
        collect(found, about, folder / "result.jsonl")
        files.append(Measured.read(folder / "result.jsonl"))
    *_, line = ablation_table(files, "plain")
    gain, loss = "40.0 -> 30.0: 25.0 (25.0..25.0)", "20.0 -> 30.0: -50.0 (-50.0..-50.0)"
    assert line == f"| other | 1 | {gain} | {loss} |"
    table = "\n".join(whole_table(files[:1]))
    assert "| student: WERR of sMBR | 50.0 (50.0..50.0) |" in table


def test_unlike_recipes_under_one_label_are_refused(tmp_path: Path) -> None:
    """The digest of the resolved recipe tells them apart, whatever seeds and epochs a fold sets."""
    files = [measured(tmp_path / str(n), "plain", [4] * 4, fold=n) for n in range(2)]
    one, other = recipe_digest([]), recipe_digest(["student.num_passes=5"])
    same, unlike = [
        [
            replace(each, about={**each.about, "recipe_sha256": found})
            for each, found in zip(files, pair, strict=True)
        ]
        for pair in ((one, one), (one, other))
    ]
    require_one_recipe(same)
    with pytest.raises(ValueError, match=f"label 'plain': recipes {one[:12]} and {other[:12]}"):
        require_one_recipe(unlike)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "x.jsonl").write_text('{"fold": 1}\n')
    with pytest.raises(ValueError, match=r"x.jsonl: KeyError\('condition'\): need a result"):
        Measured.read(tmp_path / "x.jsonl")


def test_a_run_is_taken_over_up_to_a_step(tmp_path: Path) -> None:
    """Later steps' folders are left out, bytes are shared, and a second call changes nothing."""
    source, target = tmp_path / "a", tmp_path / "b" / "run"
    for name in ("models/teacher", "models/student", "models/student_smbr", "lattices/student"):
        (source / name).mkdir(parents=True)
        (source / name / "manifest.json").write_text(name)
    link_run(source, target, "train_student")
    kept = [str(path.relative_to(target)) for path in target.rglob("*.json")]
    assert kept == ["models/teacher/manifest.json"]
    assert (target / kept[0]).samefile(source / kept[0])
    link_run(source, target, "ingest")
    assert (target / kept[0]).exists()


@pytest.mark.parametrize(
    ("override", "is_linked"), [("student.seed=3", True), ("evaluation.beam=9.0", False)]
)
def test_scores_of_models_that_were_taken_over_are_too(
    tmp_path: Path, an4_dir: Path, override: str, is_linked: bool
) -> None:
    """Unless they would be decoded otherwise; a model that is to be trained again has none."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    began = Experiment(Corpus(an4_dir), Fold((), (), (), ()), source, (), ())
    (source / "scores").mkdir(parents=True)
    begun_before(began)
    store = ObjectStore((str(tmp_path),))
    made = Manifest("models/baseline", {}, {}, ())
    write_manifest(step_context(store, f"{folder}/run", made.step, {}, {}), made)
    for row in ("baseline", "student"):
        (source / "scores" / f"{row}.json").write_text(row)
    link_scores(replace(began, folder=folder, overrides=(override,)), source)
    linked = {path.stem: path.read_text() for path in folder.rglob("scores/*.json")}
    assert linked == ({"baseline": "baseline"} if is_linked else {})
