"""Read a user's ARPA: what is malformed is refused by its line; foreign words are dropped."""

import math

import kaldifst
import pytest

from training.decode.arpa import read_arpa, restrict_arpa
from training.decode.graph import GrammarWeights, ngram_grammar

ARPA = """\
Estimated by hand.
\\data\\
ngram 1=5
ngram 2=4
ngram 3=1

\\1-grams:
-99\t<s>\t-0.3
-1\t</s>
-0.5\ta\t-0.2
-0.7\tb\t-0.1
-0.9\twasp\t-0.4

\\2-grams:
-0.25\t<s> a\t-0.5
-0.5\ta b\t0.1
-0.6\ta wasp
-0.4\tb </s>

\\3-grams:
-0.125\t<s> a b

\\end\\
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-0.5\ta\t", "nan\ta\t", r"line 10: nan and -0\.2: need a finite log10 probability"),
        ("-0.5\ta\t", "-inf\ta\t", "line 10: -inf and"),
        ("-0.5\ta\t", "0.5\ta\t", r"line 10: 0\.5 and -0\.2: need .* of at most 0"),
        ("\ta b\t0.1", "\ta b\tinf", r"line 16: -0\.5 and inf: need"),
        ("\ta b\t0.1", "\ta b\t1e39", r"line 16: -0\.5 and 1e\+39: need .* of -100 to 100"),
        ("\ta b\t0.1", "\ta b\t-100.5", r"line 16: -0\.5 and -100\.5: need .* of -100 to 100"),
        ("\ta b\t0.1", "\ta b\tnan", r"line 16: -0\.5 and nan: need"),
        ("-0.5\ta b\t0.1", "-0.5\ta b c", "line 16: need log10 probabilities"),
        ("-0.5\ta b\t0.1", "-0.5\ta", "line 16: 2 fields: need a probability and 2 words"),
        ("-0.6\ta wasp", "-0.5\ta b", "line 17: 'a b': there twice: remove one"),
        ("-0.6\ta wasp", "-0.5\tbee a", "line 17: 'bee a': its history has no entry"),
        ("-0.6\ta wasp", "-0.5\ta <s>", "line 17: 'a <s>': need <s> first and </s> last only"),
        ("-0.6\ta wasp\n", "", "line 19: 3 2-grams end here: need the 4 that"),
        ("ngram 2=4\n", "", r"line 4: 'ngram 3=1': need `ngram 2=COUNT`"),
        ("ngram 3=1", "ngram 3=many", "line 5: 'ngram 3=many': need `ngram 3=COUNT`"),
        ("ngram 3=1", "ngram 3=-1", "line 5: 'ngram 3=-1': need `ngram 3=COUNT`"),
        ("\\3-grams:", "\\4-grams:", r"line 20: .*4-grams:': need .3-grams: here"),
        ("ngram 3=1\n", "", r"line 19: .*3-grams:': need .end. here"),
        (
            "\\3-grams:\n-0.125\t<s> a b\n",
            "",
            r"line 21: .end.: need the n-grams of lengths 1\.\.3",
        ),
        ("\\end\\\n", "", r"ends without .end.: it was cut off: write or copy it again"),
        ("\\data\\", "", "not an ARPA language model"),
    ],
)
def test_what_is_malformed_is_refused_by_its_line(old: str, new: str, message: str) -> None:
    """Numbers, fields, order and counts are checked; the error has the line and a remedy."""
    assert ARPA.count(old) == 1
    assert len(read_arpa(ARPA)) == 10
    with pytest.raises(ValueError, match=message):
        read_arpa(ARPA.replace(old, new))


@pytest.mark.parametrize("weight", ["-100", "100"])
def test_a_weight_at_the_bound_is_read(weight: str) -> None:
    """And so is the ARPA that a toolkit writes for a history that never backs off, -99."""
    (entry,) = [
        each
        for each in read_arpa(ARPA.replace("\ta b\t0.1", f"\ta b\t{weight}"))
        if each.ngram == ("a", "b")
    ]
    assert entry.log_backoff == float(weight)


def test_more_than_ten_words_an_ngram_are_refused() -> None:
    """The longest n-grams have ten words."""
    text = "\\data\\\n" + "".join(f"ngram {n}=0\n" for n in range(1, 12))
    with pytest.raises(ValueError, match=r"line 12: 'ngram 11=0': need .* of lengths 1\.\.10"):
        read_arpa(text)


def test_foreign_words_are_dropped_and_counted() -> None:
    """N-grams with a word outside the lexicon go; the others keep their numbers exactly."""
    restricted = restrict_arpa(ARPA, {"a", "b", "bee"})
    counts = restricted.num_dropped_words, restricted.num_dropped_ngrams
    assert counts == (1, 2)
    assert restricted.num_missing_words == 1
    kept = [entry for entry in read_arpa(ARPA) if "wasp" not in entry.ngram]
    assert read_arpa(restricted.text) == kept
    ngram_grammar(restricted.text, {"a": 1, "b": 2, "bee": 3, "#0": 4})


def test_a_model_without_words_or_ends_is_refused() -> None:
    """A model must end sentences and share a word with the lexicon."""
    with pytest.raises(ValueError, match=r"no word of lexicon\.txt: need the lexicon's spelling"):
        restrict_arpa(ARPA, {"A", "B"})
    without_end = ARPA.replace("-1\t</s>\n", "").replace("ngram 1=5", "ngram 1=4")
    with pytest.raises(ValueError, match="has no unigram </s>: need it to end sentences"):
        restrict_arpa(without_end, {"a", "b"})


def test_scale_and_insertion_penalty_enter_the_grammar() -> None:
    """The scale multiplies all costs of the model; the penalty is added to words alone."""
    word_ids = {"a": 1, "b": 2, "wasp": 3, "#0": 4}
    grammar = ngram_grammar(ARPA, word_ids, GrammarWeights(scale=2.0, insertion_penalty=0.75))
    arcs = {arc.ilabel: arc for arc in kaldifst.ArcIterator(grammar, grammar.start)}
    nats = math.log(10)
    assert arcs[1].weight.value == pytest.approx(2 * 0.25 * nats + 0.75, abs=1e-5)
    assert arcs[4].weight.value == pytest.approx(2 * 0.3 * nats, abs=1e-5)
    unigrams = arcs[4].nextstate
    assert grammar.final(unigrams).value == pytest.approx(2 * 1 * nats, abs=1e-5)
