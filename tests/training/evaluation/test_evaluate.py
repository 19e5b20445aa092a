"""Score word errors by model and placement."""

from dataclasses import asdict

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
