"""Check the n-gram model, a distribution for every history, and the grammar built from it."""

import itertools
import math
from collections.abc import Sequence

import kaldifst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.decode.graph import ngram_grammar
from training.decode.smoothing import witten_bell_arpa

VOCABULARY = ["a", "b", "c", "d"]
SENTENCES = [["a", "b"], ["a", "b", "c"], ["b"], [], ["a", "a", "b"]]


class _Arpa:
    """_Arpa reads ARPA text independently: it backs off until the n-gram is listed."""

    def __init__(self, text: str) -> None:
        self.probabilities: dict[tuple[str, ...], float] = {}
        self.backoffs: dict[tuple[str, ...], float] = {}
        for line in text.splitlines():
            fields = line.split("\t")
            if len(fields) >= 2:
                ngram = tuple(fields[1].split())
                self.probabilities[ngram] = 10 ** float(fields[0])
                self.backoffs[ngram] = 10 ** float(fields[2]) if len(fields) == 3 else 1.0

    def probability(self, history: tuple[str, ...], word: str) -> float:
        if (*history, word) in self.probabilities:
            return self.probabilities[*history, word]
        return self.backoffs.get(history, 1.0) * self.probability(history[1:], word)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=6), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_probabilities_sum_to_one_after_every_history(
    sentences: list[list[str]], order: int
) -> None:
    """Probabilities sum to one after every history, seen or not, with or without a start."""
    arpa = _Arpa(witten_bell_arpa(sentences, VOCABULARY, order))
    for length in range(order):
        for words in itertools.product(["<s>", *VOCABULARY], repeat=length):
            if "<s>" in words[1:]:
                continue
            total = sum(arpa.probability(words, word) for word in [*VOCABULARY, "</s>"])
            assert total == pytest.approx(1, abs=1e-5)


def test_bigram_by_hand() -> None:
    """P(b | a) = (c(ab) + T(a) P(b)) / (N(a) + T(a)), P(b) = (c(b) + T / V) / (N + T)."""
    arpa = _Arpa(witten_bell_arpa(SENTENCES, VOCABULARY, 2))
    unigram = (4 + 4 / 5) / (14 + 4)  # a b c </s> occur, 14 tokens, 5 words with d
    assert arpa.probability((), "b") == pytest.approx(unigram, rel=1e-5)
    assert arpa.probability(("a",), "b") == pytest.approx((3 + 2 * unigram) / (4 + 2), rel=1e-5)


def _grammar_cost(grammar: kaldifst.StdVectorFst, sentence: Sequence[str]) -> float:
    """Return the cost of the path that backs off only if it must; labels 1.. are words, 9 is #0."""
    state, cost = grammar.start, 0.0
    for word in [*sentence, None]:
        while True:
            arcs = {arc.ilabel: arc for arc in kaldifst.ArcIterator(grammar, state)}
            if word is None and math.isfinite(grammar.final(state).value):
                return cost + float(grammar.final(state).value)
            wanted = VOCABULARY.index(word) + 1 if word is not None else 9
            arc = arcs.get(wanted) or arcs[9]
            cost, state = cost + arc.weight.value, arc.nextstate
            if arc.ilabel != 9:
                break
    raise AssertionError


@pytest.mark.parametrize("order", [1, 2, 3])
def test_grammar_scores_sentences_as_the_arpa_text_does(order: int) -> None:
    """The acceptor scores every sentence of up to three words as the ARPA reader does."""
    text = witten_bell_arpa(SENTENCES, VOCABULARY, order)
    word_ids = {word: i + 1 for i, word in enumerate(VOCABULARY)} | {"#0": 9}
    grammar, arpa = ngram_grammar(text, word_ids), _Arpa(text)
    for length in range(4):
        for sentence in itertools.product(VOCABULARY, repeat=length):
            history: tuple[str, ...] = ("<s>",)
            cost = 0.0
            for word in (*sentence, "</s>"):
                context = history[max(0, len(history) - order + 1) :] if order > 1 else ()
                cost -= math.log(arpa.probability(context, word))
                history = (*history, word)
            assert _grammar_cost(grammar, sentence) == pytest.approx(cost, abs=1e-3)


def test_words_outside_the_vocabulary_are_refused() -> None:
    """Words outside the vocabulary are refused, and the error names the word and the remedy."""
    with pytest.raises(ValueError, match=r"'e': add it to lexicon\.txt"):
        witten_bell_arpa([["a", "e"]], VOCABULARY)
    with pytest.raises(ValueError, match="no sentences"):
        witten_bell_arpa([], VOCABULARY)
    with pytest.raises(ValueError, match="order = 0"):
        witten_bell_arpa(SENTENCES, VOCABULARY, 0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\data\\", "garbage", None),
        ("\\3-grams:\n", "\\3-grams:\nx\ta b c\n", "log10"),
        ("\\3-grams:\n", "\\3-grams:\n-1\ta b\n", "3 words"),
        ("\\3-grams:\n", "\\3-grams:\n-1\ta b wasp\n", "'wasp' is not in lexicon.txt"),
        ("\\3-grams:\n", "\\3-grams:\n-1\td d d\n", "history has no entry"),
    ],
)
def test_malformed_arpa_is_refused(old: str, new: str, message: str | None) -> None:
    """Malformed text is refused, and the error gives the line and what is needed."""
    word_ids = {word: i + 1 for i, word in enumerate(VOCABULARY)} | {"#0": 9}
    text = witten_bell_arpa(SENTENCES, VOCABULARY).replace(old, new)
    if message is None:
        text, message = "garbage", "not an ARPA"
    with pytest.raises(ValueError, match=message):
        ngram_grammar(text, word_ids)
