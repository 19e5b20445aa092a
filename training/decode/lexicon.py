"""Read words and their pronunciations from Kaldi's lexicon.txt, or from a dictionary like cmudict.

A line is `WORD PHONE PHONE ...`; another line of the word, or one of `WORD(2)`, is a variant of it.
Words and phones are read in Unicode's composed form, NFC. Comments are lines that begin with `;;;`
or with `#` alone, and what follows a field that begins with `#` behind the word.
"""

import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.records import composed

SILENCE = "SIL"
SILENCE_ID = 0
SPOKEN_NOISE = "SPN"
UNKNOWN_WORD = "<unk>"
UNKNOWN = ""
"""Takes the place of a word outside the vocabulary in the sentences that a language model is of."""
RESERVED_WORDS = frozenset({"<eps>", "<s>", "</s>", "#0"})
MAX_NAMED = 10
Pronunciation = tuple[str, ...]

_NUMBER = re.compile(r"\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_VARIANT = re.compile(r"(?<=.)\(\d+\)$")
_BLANKS = re.compile(r"[ \t]+")
_PLAIN = re.compile(r"[\t -~]*").fullmatch
_JOINERS = "\u200c\u200d"  # Persian and Indic spelling needs them within words
_PROBABILITIES = "as in lexiconp.txt, which is not read: give lexicon.txt, or rename the phone"
_OTHER_ENCODINGS = {
    b"\xff\xfe": "in UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "in UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8",
    b"\x1f\x8b": "a gzip: unpack it",
}


@dataclass(frozen=True)
class Lexicon:
    """Lexicon maps words to pronunciations; `phones` lists the phone inventory, silence first.

    Any other word of a transcript is aligned as `unknown`, and not at all where that is empty. No
    hypothesis has such a word.
    """

    pronunciations: Mapping[str, tuple[Pronunciation, ...]]
    unknown: tuple[Pronunciation, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a lexicon without words, reserved words and empty pronunciations."""
        if not self.pronunciations:
            raise ValueError("the lexicon has no words: need lines `WORD PHONE PHONE ...`")
        for word, variants in self.pronunciations.items():
            if word in RESERVED_WORDS:
                raise ValueError(f"word {word!r}: reserved for the decoding graph, rename it")
            if not variants or not all(variants):
                raise ValueError(f"word {word!r} has an empty pronunciation: need its phones")

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """Return the phone inventory: silence, then the others in alphabetical order."""
        spoken = {
            phone
            for variants in (*self.pronunciations.values(), self.unknown)
            for pronunciation in variants
            for phone in pronunciation
        }
        return (SILENCE, *sorted(spoken - {SILENCE}))

    @cached_property
    def phone_ids(self) -> dict[str, int]:
        """Return the position of each phone in `phones`."""
        return {phone: index for index, phone in enumerate(self.phones)}

    def with_spoken_noise(self) -> "Lexicon":
        """Align unknown words as one phone: the lexicon's SPN or spn, or else a new SPN."""
        spelled = [phone for phone in self.phones if phone.upper() == SPOKEN_NOISE]
        return replace(self, unknown=((spelled[0] if spelled else SPOKEN_NOISE,),))

    def with_unknown_word(self) -> "Lexicon":
        """Return the lexicon whose UNKNOWN_WORD is spoken as unknown words are, if they are."""
        if not self.unknown:
            return self
        return Lexicon({**self.pronunciations, UNKNOWN_WORD: self.spoken(UNKNOWN_WORD)})

    def transcript(self, words: Iterable[str]) -> tuple[str, ...]:
        """Put UNKNOWN_WORD for each unknown word, if these are aligned."""
        if not self.unknown:
            return tuple(words)
        return tuple(word if word in self.pronunciations else UNKNOWN_WORD for word in words)

    def unaligned(self, words: Iterable[str]) -> list[str]:
        """Return the words, each once, that no alignment of a transcript can have."""
        return [] if self.unknown else sorted(set(words) - self.pronunciations.keys())

    def restricted_to(self, words: Iterable[str]) -> "Lexicon":
        """Keep the pronunciations of a `transcript` only; raise ValueError for unknown words."""
        wanted = sorted(set(words))
        self.require(wanted)
        return Lexicon({word: self.spoken(word) for word in wanted})

    def spoken(self, word: str) -> tuple[Pronunciation, ...]:
        """Return the pronunciations of a word of a `transcript`, one at least."""
        own = self.pronunciations.get(word, ())
        return (*own, *self.unknown) if word == UNKNOWN_WORD else own

    def require(self, words: Iterable[str]) -> None:
        """Raise ValueError naming the words that the lexicon lacks, ten at most."""
        missing = sorted(word for word in set(words) if not self.spoken(word))
        if missing:
            named = ", ".join(map(repr, missing[:MAX_NAMED]))
            named += ", ..." if len(missing) > MAX_NAMED else ""
            raise ValueError(
                f"out of vocabulary: {named} ({len(missing)} words): "
                "add the pronunciations to lexicon.txt"
            )


def parse_lexicon(text: str) -> Lexicon:
    """Read a lexicon; ValueError names the line of an entry that is none.

    None is a word without phones, a reserved word, a field with a character that cannot be seen,
    and a number, a probability or a comment in the place of a phone.
    """
    pronunciations: dict[str, dict[Pronunciation, None]] = {}
    entries = list(_entries(text))
    _require_phones(entries)
    for entry in entries:
        pronunciations.setdefault(entry.word, {})[entry.phones] = None
    return Lexicon({word: tuple(variants) for word, variants in pronunciations.items()})


def decode_lexicon(data: bytes) -> str:
    """Decode a lexicon's UTF-8; ValueError for another encoding, with the line and the remedy."""
    for mark, remedy in _OTHER_ENCODINGS.items():
        if data.startswith(mark):
            raise ValueError(f"the lexicon is {remedy}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        remedy = "convert it, as by iconv -f WINDOWS-1252 -t UTF-8"
        raise ValueError(
            f"lexicon line {line} is not UTF-8: it has the byte 0x{data[error.start]:02x}: {remedy}"
        ) from error


def rare_phones(text: str) -> str:
    """Name the phones that occur in one word alone, and their lines; empty if there are none.

    They may be misspelt, and have little speech to be learned from.
    """
    # Kaldi's <UNK> SPN and [noise] NSN have phones of their own.
    spoken = [entry for entry in _entries(text) if not entry.word.startswith(("<", "[", "!"))]
    found = {phone: line for phone, line in _lines_by_phone(spoken).items() if line}
    if not found:
        return ""
    named = [f"{phone!r} (line {line})" for phone, line in list(found.items())[:MAX_NAMED]]
    more = ", ..." if len(found) > MAX_NAMED else ""
    return f"phones of one word alone, which may be misspelt: {', '.join(named)}{more}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """_Entry is a line of the lexicon: its number, word and phones."""

    line: int
    word: str
    phones: Pronunciation


def _entries(text: str) -> Iterator[_Entry]:
    """Yield the entries; ValueError for a line without phones, or with an unseen character."""
    # Python's own ends of lines are a dozen more, such as U+0085, which stand within lines here.
    lines = io.StringIO(composed(text.removeprefix("\ufeff")), newline=None)
    for number, line in enumerate(lines, start=1):
        content = line.strip(" \t\n")
        if not content or content.startswith(";;;"):
            continue
        fields = _BLANKS.split(content)
        if not fields[0].strip("#"):
            continue
        # cmudict's first word may be #HASH-MARK, so a comment behind a word alone begins with #.
        if "#" in content:
            ends = (n for n, field in enumerate(fields) if n and field[0] == "#")
            fields = fields[: next(ends, len(fields))]
        for field in fields if not _PLAIN(content) else ():
            require_visible(field, f"lexicon line {number}")
        word = _VARIANT.sub("", fields[0])
        if word in RESERVED_WORDS:
            raise ValueError(
                f"lexicon line {number}: {word!r} is reserved for the decoding graph: rename it"
            )
        if len(fields) == 1:
            raise ValueError(f"lexicon line {number}: {word!r} has no phones after the word")
        yield _Entry(number, word, tuple(fields[1:]))


def require_visible(field: str, where: str) -> None:
    """Raise ValueError for a blank, a control or a format character, also of another script."""
    for place, character in enumerate(field):
        is_within = 0 < place < len(field) - 1
        if character in _JOINERS and is_within:
            continue
        is_blank = character.isspace()
        if is_blank or character == "\ufffd" or unicodedata.category(character) in ("Cc", "Cf"):
            name = unicodedata.name(character, "a control character")
            remedy = "put a space or a tab there" if is_blank else "remove it"
            raise ValueError(f"{where}: {field!r} has U+{ord(character):04X}, {name}: {remedy}")


def _require_phones(entries: Sequence[_Entry]) -> None:
    """Raise ValueError for a phone that is a number, a probability or a part of a comment."""
    first: dict[str, _Entry] = {}
    inside: set[str] = set()
    for entry in entries:
        inside.update(entry.phones[1:])
        for phone in entry.phones:
            first.setdefault(phone, entry)
    for phone, entry in first.items():
        where = f"lexicon line {entry.line}: {phone!r} after {entry.word!r}"
        # X-SAMPA has phones such as 2 and 9, but not behind words alone, where probabilities are.
        if _DECIMAL.fullmatch(phone) or (_NUMBER.fullmatch(phone) and phone not in inside):
            raise ValueError(f"{where} is a number and no phone, {_PROBABILITIES}")
        if phone.startswith((";", "//")):
            raise ValueError(f"{where} is no phone: a comment begins with #")
    marked = [entry for entry in entries if entry.word[0] in "#;"]
    of_one_word = _lines_by_phone(entries) if marked else {}
    for entry in marked:
        if any(of_one_word[phone] for phone in entry.phones):
            remedy = "a comment begins with ;;; or with # and a space"
            raise ValueError(
                f"lexicon line {entry.line}: {entry.word!r} has phones that no other word has: "
                f"{remedy}"
            )


def _lines_by_phone(entries: Iterable[_Entry]) -> dict[str, int]:
    """Return for each phone the first line of the only word that has it, or 0 if several have."""
    words: dict[str, str] = {}
    lines: dict[str, int] = {}
    for entry in entries:
        for phone in entry.phones:
            if words.setdefault(phone, entry.word) == entry.word:
                lines.setdefault(phone, entry.line)
            else:
                lines[phone] = 0
    return lines
