"""Read lexicons as Kaldi and cmudict write them, and refuse what is no pronunciation."""

import pytest

from training.decode.lexicon import decode_lexicon, parse_lexicon, rare_phones


def test_variants_come_as_more_lines_or_numbered_words() -> None:
    """Both notations give one word; equal pronunciations count once; silence is phone 0."""
    lexicon = parse_lexicon("a AX\na(2) EY\n\na AX\nbee B IY\n")
    assert lexicon.pronunciations == {"a": (("AX",), ("EY",)), "bee": (("B", "IY"),)}
    assert lexicon.phones == ("SIL", "AX", "B", "EY", "IY")
    assert lexicon.phone_ids["SIL"] == 0


BEE = {"bee": (("B", "IY"),)}


@pytest.mark.parametrize(
    ("text", "pronunciations"),
    [
        ("\ufeffbee B IY\n", BEE),
        ("bee\tB\tIY\r\n", BEE),
        ("  bee  B IY \r", BEE),
        ("bee B IY # insect, buzzing\n", BEE),
        ("bee B IY #insect\n", BEE),
        (";;; # version 0.9\n;;;\nbee B IY\n", BEE),
        ("# words and phones\n#\n## more\nbee B IY\n", BEE),
        ("bee B IY #1\n", BEE),  # Kaldi's lexicon_disambig.txt
        ("#bee B IY\nbee B IY\n;bee(1) B IY\n", {"#bee": BEE["bee"], **BEE, ";bee": BEE["bee"]}),
        ("caf\u00e9 K E\ncafe\u0301 K A\n", {"caf\u00e9": (("K", "E"), ("K", "A"))}),
        ("a\u200cb A B\n", {"a\u200cb": (("A", "B"),)}),  # Persian's half space
        ("Eu 2\nBleu B L 2\n", {"Eu": (("2",),), "Bleu": (("B", "L", "2"),)}),  # X-SAMPA
        (
            "<SIL> SIL\n!SIL SIL\n<UNK> SPN\n[noise] NSN\n",
            {
                "<SIL>": (("SIL",),),
                "!SIL": (("SIL",),),
                "<UNK>": (("SPN",),),
                "[noise]": (("NSN",),),
            },
        ),
    ],
)
def test_marks_and_comments_are_no_words(
    text: str, pronunciations: dict[str, tuple[tuple[str, ...], ...]]
) -> None:
    """Marks of the byte order, line ends, comments and forms of Unicode change no word or phone."""
    assert parse_lexicon(text).pronunciations == pronunciations


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
        ("bee B IY\nwasp # insect\n", r"line 2: 'wasp' has no phones"),
        ("", "no words"),
        (";;; bee B IY\n", "no words"),
        ("bee B IY\n<s> B\n", "line 2: '<s>' is reserved"),
        ("bee 1.0 B IY\n", r"line 1: '1.0' after 'bee' is a number .* give lexicon.txt"),
        ("bee B IY\nwasp 1 W AA\n", r"line 2: '1' after 'wasp' is a number"),
        ("bee 0.5 1.2e-1 B IY\n", "'0.5' after 'bee' is a number"),
        ("bee B IY\nwasp W ; AA\n", r"line 2: ';' after 'wasp' is no phone: a comment begins"),
        ("bee B IY // insect\n", "'//' after 'bee' is no phone"),
        ("bee B IY\n#words and phones\n", "line 2: '#words' has phones that no other word has"),
        ("bee\u00a0B IY\n", r"line 1: .* has U\+00A0, NO-BREAK SPACE: put a space"),
        ("bee B IY\nwasp\u3000W AA\n", r"line 2: .* has U\+3000, IDEOGRAPHIC SPACE"),
        ("bee B\u200b IY\n", r"U\+200B, ZERO WIDTH SPACE: remove it"),
        ("bee B IY\n\ufeffwasp W\n", r"line 2: .* U\+FEFF"),
        ("bee B IY\x85\n", r"U\+0085, a control character"),
        ("b\0e\0e\0 B\n", r"U\+0000, a control character"),
        ("b\ufffde B IY\n", r"U\+FFFD, REPLACEMENT CHARACTER: remove it"),
    ],
)
def test_unusable_lexicons_are_refused(text: str, message: str) -> None:
    """The error names the line, and the character or field that is no part of a pronunciation."""
    with pytest.raises(ValueError, match=message):
        parse_lexicon(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("bee B IY\ncaf\xe9 K\n".encode("latin-1"), "line 2 is not UTF-8: .* 0xe9: convert it"),
        ("bee B IY\n".encode("utf-16"), "in UTF-16: convert it"),
        (b"\x1f\x8b\x08\x00", "a gzip: unpack it"),
    ],
)
def test_other_encodings_are_named(data: bytes, message: str) -> None:
    """The error says how to convert the file."""
    with pytest.raises(ValueError, match=message):
        decode_lexicon(data)


def test_phones_of_one_word_are_named_with_their_lines() -> None:
    """They may be misspelt; what Kaldi gives to noises is not."""
    text = "bee B IY\nbe B IY\nbye B AY\nbye(2) B AY # farewell\n<UNK> SPN\n!SIL SIL\n"
    assert rare_phones(text) == "phones of one word alone, which may be misspelt: 'AY' (line 3)"
    assert rare_phones("bee B IY\nbe B IY\n") == ""
    many = "".join(f"w{n} P{n}\n" for n in range(11))
    assert rare_phones(many).endswith("'P9' (line 10), ...")


@pytest.mark.parametrize(("spelled", "phone"), [("<UNK> SPN", "SPN"), ("<unk> spn", "spn")])
def test_spoken_noise_is_the_lexicons_own_phone(spelled: str, phone: str) -> None:
    """Without one it is new. Transcripts alone have unknown words: no hypothesis does."""
    lexicon = parse_lexicon(f"bee B IY\n{spelled}\n").with_spoken_noise()
    assert lexicon.unknown == ((phone,),)
    assert len(lexicon.phones) == 4
    words = lexicon.transcript(["bee", "wasp", "<eps>"])
    assert words == ("bee", "<unk>", "<unk>")
    assert lexicon.restricted_to(words).pronunciations["<unk>"][0] == (phone,)
    new = parse_lexicon("bee B IY\n").with_spoken_noise()
    assert (new.phones, set(new.pronunciations)) == (("SIL", "B", "IY", "SPN"), {"bee"})
