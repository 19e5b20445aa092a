"""The rotation holds every speaker out once, and its table counts what its files say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.cli.arguments import recipe_path
from tests.benchmarks.rotation.__main__ import (
    SEEDED,
    Experiment,
)
from tests.benchmarks.rotation.folds import NUM_FOLDS, Corpus, fold_of
from tests.benchmarks.rotation.scores import RECIPE, Scoring, collect
from tests.benchmarks.rotation.table import (
    Measured,
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
