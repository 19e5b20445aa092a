"""Read Kaldi's lexicon.txt, and refuse words that it lacks."""

import pytest

from training.decoding.lexicon import parse_lexicon


def test_variants_come_as_more_lines_or_numbered_words() -> None:
    """Both notations give one word; equal pronunciations count once; silence is phone 0."""
    lexicon = parse_lexicon("a AX\na(2) EY\n\na AX\nbee B IY\n")
    assert lexicon.pronunciations == {"a": (("AX",), ("EY",)), "bee": (("B", "IY"),)}
    assert lexicon.phones == ("SIL", "AX", "B", "EY", "IY")
    assert lexicon.phone_ids["SIL"] == 0


def test_unknown_words_are_named_with_the_remedy() -> None:
    """The error names the missing words and the remedy."""
    lexicon = parse_lexicon("bee B IY\n")
    with pytest.raises(ValueError, match=r"'wasp' .*add the pronunciations to lexicon\.txt"):
        lexicon.require(["bee", "wasp"])
    with pytest.raises(ValueError, match=r"\.\.\. \(12 words\)"):
        lexicon.restricted_to([f"word{i}" for i in range(12)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bee B IY\nwasp\n", r"line 2: 'wasp' has no phones"),
        ("", "no words"),
        ("<s> B\n", "reserved"),
    ],
)
def test_unusable_lexicons_are_refused(text: str, message: str) -> None:
    """Empty pronunciations, empty lexicons and the graph's own symbols are refused."""
    with pytest.raises(ValueError, match=message):
        parse_lexicon(text)
