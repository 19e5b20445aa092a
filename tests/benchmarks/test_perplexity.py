"""The perplexity that the benchmark prints is that of the ARPA model, word by word."""

from pathlib import Path

import pytest

from tests.benchmarks.perplexity import (
    HELDOUT_SPEAKERS,
    LEFT_OUT_SPEAKERS,
    ORDERS,
    SMOOTHINGS,
    Trial,
    log_probability,
    perplexities,
    perplexity,
)
from training.decode.arpa import END, START, UNKNOWN, read_arpa
from training.decode.smoothing import kneser_ney_arpa

ARPA = """\
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99 <s> -0.1
-0.5 </s>
-0.25 a -0.125
-1 b

\\2-grams:
-0.375 <s> a
-0.75 a b

\\end\\
"""


def test_words_cost_what_the_model_lists_or_backs_off_to() -> None:
    """By hand: a listed bigram, a back-off weight, none, and no history after an unknown word."""
    sentences = [["a", "b", "b"], ["b", UNKNOWN, "a"]]
    first = -0.375 - 0.75 - 1 - 0.5
    second = -0.1 - 1 - 0.25 - 0.125 - 0.5
    found = perplexity([Trial([], sentences)], ["a", "b"], lambda *_: ARPA, 2)
    assert found == pytest.approx(10 ** (-(first + second) / 7))


def test_probabilities_of_all_words_sum_to_one() -> None:
    """After histories that occur and that do not."""
    arpa = kneser_ney_arpa([["a", "b", "a"], ["b"], ["a", "a", "b"]], ["a", "b", "c"], 3)
    entries = {each.ngram: each for each in read_arpa(arpa)}
    for history in ((START,), ("a", "b"), ("c", "c"), (START, "c"), ()):
        total = sum(10 ** log_probability(entries, history, word) for word in "abc")
        assert total + 10 ** log_probability(entries, history, END) == pytest.approx(1, abs=1e-5)


def test_speakers_are_predicted_by_others(tmp_path: Path) -> None:
    """All labelled speakers predict the held-out one, and each labelled one the other."""
    (tmp_path / "lexicon.txt").write_text("a AX\nb B\nc S\n")
    (tmp_path / "labelled.speakers").write_text("s\nt\n")
    (tmp_path / "heldout.speakers").write_text("u\n")
    texts = {"s-1": "a b", "s-2": "a b", "t-1": "a b", "t-2": "c b", "u-1": "a b wasp"}
    for name, values in {
        "text": texts,
        "utt2spk": {key: key[0] for key in texts},
        "wav.scp": dict.fromkeys(texts, "x.flac"),
    }.items():
        (tmp_path / name).write_text("".join(f"{key} {text}\n" for key, text in values.items()))
    of_s, of_t = [["a", "b"], ["a", "b"]], [["a", "b"], ["c", "b"]]
    heldout = [Trial([*of_s, *of_t], [["a", "b", UNKNOWN]])]
    left_out = [Trial(of_t, of_s), Trial(of_s, of_t)]
    for title, trials in {HELDOUT_SPEAKERS: heldout, LEFT_OUT_SPEAKERS: left_out}.items():
        for name, estimate in SMOOTHINGS.items():
            expected = [perplexity(trials, ["a", "b", "c"], estimate, order) for order in ORDERS]
            assert perplexities(tmp_path)[title][name] == pytest.approx(expected)
