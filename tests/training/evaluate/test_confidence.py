"""Normalized cross-entropy and calibration of words' confidences."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.training.evaluate.test_evaluate import SCLITE
from training.evaluate.confidence import (
    Bin,
    Calibration,
    calibration,
    correct_words,
    normalized_cross_entropy,
)
from training.evaluate.scores import ModelScores, model_scores
from training.evaluate.word_errors import (
    DecodedUtterance,
    DecodedWord,
    hypothesis_ctm,
    reference_stm,
)

WORDS = tuple(f"word{number}" for number in range(2000))


def utterance(number: int, reference: list[str], hypothesis: list[str], seed: int = 0):
    random = np.random.default_rng((seed, number))
    confidences = np.round(random.uniform(0.05, 0.95, len(hypothesis)), 4).tolist()
    words = tuple(
        DecodedWord(word, 100 * place, 100, confidence)
        for place, (word, confidence) in enumerate(zip(hypothesis, confidences, strict=True))
    )
    return DecodedUtterance(
        f"u{number:02d}", "s", "all", 9000, tuple(reference), words, False, 0, 0
    )


def noisy_utterances() -> list[DecodedUtterance]:
    """Words that are dropped, replaced and inserted; so many that no two alignments are as good."""
    random = np.random.default_rng(3)
    found = []
    for number in range(40):
        reference = random.choice(WORDS, 12).tolist()
        changed = [random.choice(WORDS) if random.random() < 0.3 else word for word in reference]
        heard = [word for word in changed if random.random() > 0.1]
        heard += random.choice(WORDS, random.integers(0, 3)).tolist()
        found.append(utterance(number, reference, heard))
    return found


def test_share_of_correct_words_as_confidence_tells_nothing() -> None:
    labels = np.array([True, True, True, False])
    assert normalized_cross_entropy(np.full(4, 0.75), labels) == pytest.approx(0)


def test_sure_and_right_tells_all() -> None:
    labels = np.array([True, False, True, False])
    sure = np.where(labels, 1 - 1e-12, 1e-12)
    assert normalized_cross_entropy(sure, labels) == pytest.approx(100)
    assert normalized_cross_entropy(1 - sure, labels) < -1000


@pytest.mark.parametrize("label", [True, False])
def test_equal_labels_have_no_cross_entropy(label: bool) -> None:
    assert normalized_cross_entropy(np.array([0.5, 0.9]), np.array([label, label])) is None


def test_bins_hold_all_words() -> None:
    found = Calibration.of(
        np.array([0.0625, 0.3125, 0.375, 0.9375, 0.96875]),
        np.array([False, False, True, True, True]),
    )
    assert found.bins == (Bin(0.0, 1, 0, 0.0625), Bin(0.3, 2, 1, 0.34375), Bin(0.9, 2, 2, 0.953125))
    assert (found.num_words, found.num_correct) == (5, 3)


def test_words_are_right_where_the_alignment_has_their_own() -> None:
    assert correct_words(["a", "b", "c"], ["a", "x", "c", "c"]).count(True) == 2
    assert correct_words(["a", "b"], ["b"]) == [True]
    assert correct_words([], ["b"]) == [False]
    assert correct_words(["b"], []) == []


def test_scores_have_the_confidence_of_models_that_decoded_words() -> None:
    some, none = ModelScores.of(noisy_utterances()), ModelScores.of([utterance(1, ["a"], [])])
    found = model_scores({"baseline": some, "student": none})["confidence"]
    assert found.keys() == {"baseline"}
    assert sum(each["num_words"] for each in found["baseline"]["bins"]) == sum(
        len(each.words) for each in noisy_utterances()
    )


@pytest.mark.cluster
@pytest.mark.skipif(not SCLITE.exists(), reason="run tests/install_packages.sh as root")
def test_sclite_has_the_same_cross_entropy(tmp_path: Path) -> None:
    utterances = noisy_utterances()
    (tmp_path / "reference.stm").write_bytes(reference_stm(utterances))
    (tmp_path / "student.ctm").write_bytes(hypothesis_ctm(utterances))
    pair = ["-r", "reference.stm", "stm", "-h", "student.ctm", "ctm"]
    said = subprocess.run(
        [SCLITE, "-s", "-o", "sum", "stdout", "-f", "0", *pair],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (summed,) = re.findall(r"^ *\| Sum/Avg *\|.*$", said, re.MULTILINE)
    entropy = float(re.findall(r"-?\d+\.\d+", summed)[-1])
    found = calibration(utterances)
    assert found is not None
    assert found.normalized_cross_entropy is not None
    assert found.normalized_cross_entropy / 100 == pytest.approx(entropy, abs=6e-4)
