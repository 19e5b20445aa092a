"""Transcripts beside a lexicon: what it lacks, in how many utterances, and how it may spell it."""

import pytest

from pipeline.runs.engine import LossBudgetExceededError
from training.align.labelled import UnknownWords, similar_words
from training.decode.lexicon import parse_lexicon

LEXICON = parse_lexicon("YES Y EH S\nDON'T D OW N T\nCAF\u00c9 K AE F EY\n")


def test_words_and_utterances_are_counted_by_frequency() -> None:
    """An utterance counts once however often it has a word; the most frequent words come first."""
    unknown = UnknownWords.of(["YES NO NO", "NO", "OH YES", "YES", ""], LEXICON)
    said = "lexicon.txt lacks 2 words, in 3 of 5 labelled utterances: 'NO', 'OH'; "
    assert unknown.note(LEXICON, "labelled") == f"{said}these utterances will not be aligned"
    noisy = LEXICON.with_spoken_noise()
    assert unknown.note(noisy, "labelled") == f"{said}they are aligned as SPN"
    assert unknown.note(noisy, "heldout").endswith("'OH'; they count as errors")
    assert UnknownWords.of(["YES"], LEXICON).note(LEXICON, "labelled") == ""


def test_ten_words_are_named() -> None:
    """More are counted."""
    said = UnknownWords.of([" ".join(f"w{n:02d}" for n in range(12))], LEXICON).note(LEXICON, "dev")
    assert "lacks 12 words" in said
    assert "'w09', ...; " in said


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("yes", "YES"),
        ("DON\u2019T", "DON'T"),
        ("don`t", "DON'T"),
        ("CAFE\u0301", "CAF\u00c9"),
        ("YES\u200b", "YES"),
        ("\uff39\uff25\uff33", "YES"),
    ],
)
def test_another_spelling_of_the_word_is_named(word: str, known: str) -> None:
    """Case, apostrophe, Unicode's form, and characters that cannot be seen."""
    assert similar_words([word, "NO"], LEXICON) == {word: known}
    said = UnknownWords.of([f"YES {word}"], LEXICON).note(LEXICON, "labelled")
    assert f"{word!r} (it has {known!r})" in said


def test_the_loss_budget_bounds_utterances_that_are_not_aligned() -> None:
    """Those with spoken noise are aligned, but not by a lexicon of other words altogether."""
    unknown, noisy = UnknownWords.of(["YES", "NO YES"], LEXICON), LEXICON.with_spoken_noise()
    unknown.check_loss(LEXICON, "labelled", 0.5)
    unknown.check_loss(noisy, "labelled", 0.0)
    with pytest.raises(LossBudgetExceededError, match=r"in 1 of 2 .*'NO'; the loss budget is 40"):
        unknown.check_loss(LEXICON, "labelled", 0.4)
    with pytest.raises(LossBudgetExceededError, match=r"give the lexicon of these transcripts"):
        UnknownWords.of(["yes", "don't"], LEXICON).check_loss(noisy, "labelled", 0.9)
