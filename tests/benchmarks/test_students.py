"""The experiment damages as many words as it says, and its table counts what runs wrote."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cli.arguments import recipe_path
from tests.benchmarks.folds import Corpus, Fold
from tests.benchmarks.students import (
    ALL,
    EXPERIMENTS,
    ORACLE,
    OWN,
    RATES,
    TRAIN_CLEAN_5,
    Damaged,
    Experiment,
    Measured,
    Row,
    by_speaker,
    collected,
    damaged,
    fixed_fold,
    lexicon_words,
    pooled,
    shown,
    table,
)
from training.evaluate.word_errors import UtteranceErrors, WordErrors, word_errors
from training.settings.recipe import read_recipe

VOCABULARY = tuple(f"W{number}" for number in range(200))


@pytest.mark.parametrize("percent", RATES)
def test_words_are_damaged_at_the_rate_in_three_ways(percent: int) -> None:
    """Of 20,000 words, each way a third; an insertion beside a deletion is one substitution."""
    counts = [0, 0, 0]
    for seed in range(1000):
        words = [VOCABULARY[(seed + number) % 200] for number in range(20)]
        found = damaged(words, VOCABULARY, percent, seed)
        assert found == damaged(words, VOCABULARY, percent, seed)
        errors = word_errors(words, found)
        kinds = errors.substitutions, errors.insertions, errors.deletions
        counts = [count + kind for count, kind in zip(counts, kinds, strict=True)]
    share = 200 * percent
    assert sum(counts) == pytest.approx(share, rel=0.07)
    assert counts == pytest.approx([share / 3] * 3, rel=0.15)


def test_two_recognizers_err_apart(an4_dir: Path, tmp_path: Path) -> None:
    """They damage the same utterances, unlabelled ones alone, by draws of their own."""
    experiment = of_an4(an4_dir, tmp_path)
    one, other = (experiment.lines(Damaged(30, draw=draw)) for draw in (0, 1))
    assert [line["utterance_id"] for line in one] == list(experiment.references())
    assert [line["utterance_id"] for line in other] == list(experiment.references())
    same = [a["pred_text"] == b["pred_text"] for a, b in zip(one, other, strict=True)]
    assert 0.05 < sum(same) / len(same) < 0.5
    row = next(row for row in EXPERIMENTS["damage"] if row.name == "weighted_20")
    assert experiment.label_errors(row) == pytest.approx(20, abs=2)
    assert experiment.label_errors(EXPERIMENTS["damage"][0]) is None


def of_an4(an4_dir: Path, folder: Path) -> Experiment:
    corpus, fold = Corpus(an4_dir), fixed_fold(an4_dir)
    return Experiment(corpus, fold, folder, 17, "recorded", ("student.num_passes=4",))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_each_row_is_a_recipe_of_its_own(experiment: str, an4_dir: Path, tmp_path: Path) -> None:
    """All overrides are settings that the recipe has; rows differ, and their names do."""
    of_corpus = of_an4(an4_dir, tmp_path)
    of_rows = {
        row.name: read_recipe(recipe_path("recorded"), of_corpus.settings(row))
        for row in EXPERIMENTS[experiment]
    }
    assert len(of_rows) == len(EXPERIMENTS[experiment])


def utterance(key: str, **errors: int) -> UtteranceErrors:
    found = {name: WordErrors(each, 0, 0, 10) for name, each in errors.items()}
    return UtteranceErrors(key, key[0], "", 1000, found)


def test_the_table_counts_what_runs_wrote() -> None:
    """Errors of both seeds are added; the oracle's are those of its run's baseline."""
    own = [
        utterance("a1", baseline=5, teacher=4, student=4),
        utterance("b1", baseline=5, teacher=4, student=4),
    ]
    oracle = [utterance("a1", baseline=1, student=9), utterance("b1", baseline=1, student=9)]
    row = [utterance("a1", baseline=5, student=2), utterance("b1", baseline=5, student=3)]
    seed = {OWN: own, ORACLE: oracle, "weighted_10": row}
    worse = [replace(e, errors={**e.errors, "student": WordErrors(4, 0, 0, 10)}) for e in row]
    records = table(pooled([seed, {**seed, "weighted_10": worse}]), {"weighted_10": 10.0})
    found = {record["row"]: record for record in records}
    rates = {name: record["wer"]["value"] for name, record in found.items()}
    assert rates == {"baseline": 50, "teacher": 40, OWN: 40, ORACLE: 10, "weighted_10": 32.5}
    assert found["weighted_10"]["werr"]["value"] == 35
    assert found["weighted_10"]["recovery"]["value"] == pytest.approx(100 * 7 / 16)
    assert "recovery" not in found[ORACLE]
    assert "| weighted_10 | 10.0 | 32.5 (" in shown(records)


def test_models_after_smbr_are_held_against_those_after_it() -> None:
    """Of runs that have some; the oracle's is its run's baseline after it."""
    own = [utterance("a1", baseline=9, teacher=8, student=7, baseline_smbr=8, student_smbr=6)]
    oracle = [utterance("a1", baseline=5, baseline_smbr=4, student_smbr=0)]
    records = table(pooled([{OWN: own, ORACLE: oracle}]), {})
    found = {record["row"]: record for record in records}
    assert list(found) == [
        *("baseline", "teacher", OWN, ORACLE),
        *("baseline_smbr", "own_smbr", "oracle_smbr"),
    ]
    assert found["own_smbr"]["werr"]["value"] == pytest.approx(25)
    assert found["own_smbr"]["recovery"]["value"] == pytest.approx(50)
    assert found[OWN]["recovery"]["value"] == pytest.approx(50)
    assert "recovery" not in found["baseline_smbr"]


def test_files_of_rows_make_the_table_of_their_utterances(tmp_path: Path) -> None:
    """Errors by speaker suffice for it; a row that one seed lacks is left out."""
    names = ("a1", "a2", "b1", "c1")
    own = [utterance(key, baseline=9 - n, teacher=n, student=n + 1) for n, key in enumerate(names)]
    row = [
        replace(each, errors={**each.errors, "student": WordErrors(0, 1, 0, 10)}) for each in own
    ]
    folders = [tmp_path / "seed_17", tmp_path / "seed_27"]
    for folder in folders:
        folder.mkdir()
        Measured(None, by_speaker(own)).write(folder / "own.jsonl")
        Measured(6.7, by_speaker(row)).write(folder / "whisper.jsonl")
    Measured(0.0, by_speaker(row)).write(folders[0] / "reference.jsonl")
    rows = collected(folders, [OWN, "reference", "whisper"])
    assert rows == {ALL: table(pooled([{OWN: own, "whisper": row}] * 2), {"whisper": 6.7})}
    assert collected([*folders, tmp_path], [OWN]) == {}


def test_each_placement_has_a_table(tmp_path: Path) -> None:
    """Of a speaker's utterances it counts those there, and the first one counts all."""
    clean = [utterance("a1", baseline=4, teacher=4, student=2)]
    far = [replace(utterance("a2", baseline=8, teacher=8, student=6), placement="DP5")]
    Measured(None, by_speaker([*clean, *far])).write(tmp_path / "own.jsonl")
    found = collected([tmp_path], [OWN])
    assert found[ALL] == table(pooled([{OWN: [*clean, *far]}]), {})
    assert found["DP5"] == table(pooled([{OWN: far}]), {})
    assert list(found) == [ALL, "", "DP5"]


def test_a_third_of_the_corpus_has_each_speaker(an4_dir: Path, tmp_path: Path) -> None:
    """The first of three utterances, with its text and its audio; the lexicon is whole."""
    whole, third = Corpus(an4_dir), Corpus(an4_dir, every=3)
    third.write(fixed_fold(an4_dir), tmp_path)
    written = Corpus(tmp_path)
    assert written.speakers == whole.speakers
    assert written.text_of.items() < whole.text_of.items()
    assert written.path_of.items() < whole.path_of.items()
    for speaker in whole.speakers:
        keys = [key for key, name in whole.speaker_of.items() if name == speaker]
        kept = [key for key, name in written.speaker_of.items() if name == speaker]
        assert kept == keys[::3]
    assert lexicon_words(written) == lexicon_words(whole)


def test_rows_of_transcripts_alone_hear_no_untranscribed_speaker(
    an4_dir: Path, tmp_path: Path
) -> None:
    """The oracle hears all, and `train_clean_5` all but LibriSpeech's of test-clean."""
    fold = Fold(("f1",), ("f0121", "f0019"), ("h1",), ())
    experiment = replace(of_an4(an4_dir, tmp_path), fold=fold)
    heard = {name: experiment.speakers_of(Row(name)) for name in (OWN, ORACLE, TRAIN_CLEAN_5)}
    assert heard == {
        OWN: fold,
        ORACLE: Fold(("f1", "f0121", "f0019"), (), ("h1",), ()),
        TRAIN_CLEAN_5: Fold(("f1", "f0019"), (), ("h1",), ()),
    }
