"""Score word errors by model and placement."""

from dataclasses import asdict

from pipeline.runs.names import evaluated_models
from training.evaluation.evaluate import word_error_scores
from training.evaluation.word_errors import WordErrors


def test_the_students_werr_is_against_the_baseline() -> None:
    """WERR compares the same placement, and is left out where the baseline has no errors."""
    none, one, two = (WordErrors(substitutions=n, reference_words=4) for n in range(3))
    errors = {
        "baseline": {"far": two, "near": none},
        "teacher": {"far": none, "near": none},
        "student": {"far": one, "near": one},
    }
    scores = word_error_scores(errors)
    assert scores["wer"]["baseline"] == {"far": 50.0, "near": 0.0}
    assert scores["wer"]["student"] == {"far": 25.0, "near": 25.0}
    assert scores["werr"] == {"far": 50.0}
    assert scores["word_errors"]["student"]["near"] == asdict(one)


def test_a_placement_without_reference_words_has_no_rate() -> None:
    """An utterance with an empty transcript is alone at its placement; the others have rates."""
    one, empty = WordErrors(substitutions=1, reference_words=4), WordErrors(insertions=1)
    found = {"far": empty, "near": one}
    errors = {"baseline": found, "teacher": found, "student": found}
    scores = word_error_scores(errors)
    assert scores["wer"]["student"] == {"near": 25.0}
    assert scores["werr"] == {"near": 0.0}
    assert scores["word_errors"]["student"]["far"] == asdict(empty)


def test_models_after_sequence_training_are_compared_with_each_other() -> None:
    """Table II is of two models that sMBR trained on; one alone is compared with none."""
    one, two = (WordErrors(substitutions=n, reference_words=4) for n in (1, 2))
    plain = {"baseline": {"far": two}, "teacher": {"far": two}, "student": {"far": two}}
    both = {"baseline_smbr": {"far": two}, "student_smbr": {"far": one}}
    assert word_error_scores(plain | both)["werr_smbr"] == {"far": 50.0}
    assert word_error_scores(plain | both)["werr"] == {"far": 0.0}
    for name, rates in both.items():
        assert "werr_smbr" not in word_error_scores(plain | {name: rates})
    assert evaluated_models(["student", "baseline"])[3:] == tuple(both)
    assert evaluated_models([]) == tuple(plain)
