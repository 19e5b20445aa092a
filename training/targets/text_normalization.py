"""Spell what a recognizer wrote in words of the lexicon: "Mr. Hill paid $20" as speech has it.

Numbers are read by num2words, in some fifty languages; rules of a language have what that lacks.
What may be said in several ways, such as 1803 or "St.", has several readings, of which alignment
chooses. Sproat et al. 2001, "Normalization of non-standard words", has the classes.
"""

import html
import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import TypeAlias

from num2words import CONVERTER_CLASSES, num2words

from infra.settings import ConfigurationError
from pipeline.records import composed
from training.decode.corpus_lexicon import plain_spelling
from training.decode.lexicon import Lexicon

Reading: TypeAlias = tuple[str, ...]
"""Words, as they are said one after the other."""

Readings: TypeAlias = tuple[Reading, ...]
"""What may have been said for some text, the likeliest first; one at least, and none empty."""

MAX_READINGS = 8
MAX_DIGITS = 15
"""Longer numbers are read digit by digit."""

YEARS = range(1100, 2100)


@dataclass(frozen=True, slots=True)
class LanguageRules:
    """LanguageRules: what num2words lacks of a language; the defaults are what all have in common.

    `abbreviations` and `symbols` have their readings, `numbered` and `units` those before and after
    digits alone, and `currencies` "one dollar", "dollars", "one cent", and "cents". `scales` are
    what amounts of money are in, as it is written and said. `minus`, `to` and `dot` may be said at
    the sign of a number, within a range of two, and in "example.com", and `point` at a decimal mark
    for which num2words has another word. `ordinals` is what follows an ordinal number's digits,
    `dotted` the endings of one whose digits a dot follows. Words that may be `omitted` in a number
    have a reading without them, and one has what `shorter` replaces. Numbers `in_pairs` may be read
    as years are, and beside `months` as ordinals. `clock` is how one o'clock is said, and what
    follows other hours; `hours` is what follows them where "10:30" is written otherwise, with the
    minutes as its group. With `compounds` a number is one word, with `elides` "l'homme" may be two.
    """

    abbreviations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    numbered: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Sequence[str]] = field(default_factory=dict)
    symbols: Mapping[str, Sequence[str]] = field(default_factory=dict)
    currencies: Mapping[str, tuple[str, str, str, str]] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    minus: str = ""
    to: str = ""
    dot: str = ""
    ordinals: str = r"(?!)"
    dotted: Sequence[str] = ()
    point: str = ""
    omitted: frozenset[str] = frozenset()
    shorter: tuple[str, str] = ("(?!)", "")
    in_pairs: range = YEARS
    zero: Sequence[str] = ()
    months: Sequence[str] = ()
    plural: Callable[[str], str] | None = None
    before_ordinal: str = ""
    clock: tuple[str, str] = ("", "")
    hours: str = "(?!)()"
    compounds: bool = True
    elides: bool = False


_MONTHS = (
    *("january", "february", "march", "april", "may", "june", "july", "august"),
    *("september", "october", "november", "december"),
)


def _table(rows: str) -> dict[str, list[str]]:
    """Return what is written, and how it may be said, of "dr. doctor|drive, jr. junior"."""
    pairs = (row.split(" ", 1) for row in rows.split(", "))
    return {written: said.split("|") for written, said in pairs}


def _english_plural(word: str) -> str:
    if word.endswith("x"):
        return f"{word}es"
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


RULES: Mapping[str, LanguageRules] = {
    "en": LanguageRules(
        abbreviations=_table(
            "mr. mister, mrs. missus|misses, ms. miss|mizz, messrs. messrs|messieurs, "
            "dr. doctor|drive, st. saint|street, prof. professor, rev. reverend, hon. honorable, "
            "capt. captain, lieut. lieutenant, lt. lieutenant, col. colonel, gen. general, "
            "sgt. sergeant, gov. governor, sen. senator, jr. junior, sr. senior, esq. esquire, "
            "mt. mount, ave. avenue, vol. volume, ch. chapter, vs. versus, "
            "etc. etcetera|et cetera, viz. namely|viz, i.e. i e|that is, e.g. e g|for example, "
            "co. company, inc. incorporated, ltd. limited, lb. pound, lbs. pounds, "
            "oz. ounces|ounce, ft. feet|foot, sept. september"
        )
        | {f"{each[:3]}.": [each] for each in _MONTHS if each != "march"},
        numbered={"no.": "number", "nos.": "numbers", "p.": "page", "pp.": "pages"}
        | {"mar.": "march"},
        units=_table(
            "am a m, pm p m, bn billion, k thousand|k, K thousand|k, M m|million, B b|billion, "
            "km kilometers|kilometer|k m, "
            "km/h kilometers per hour|kilometers an hour|k m h, m meters|meter|m, "
            "cm centimeters|centimeter|c m, mm millimeters|millimeter|m m, "
            "kg kilograms|kilogram|kilos|k g, g grams|gram|g, l liters|liter|l, "
            "ml milliliters|milliliter|m l, mb megabytes|megabyte|m b, "
            "gb gigabytes|gigabyte|g b|gigs, ghz gigahertz, lb pounds|pound, lbs pounds, "
            "oz ounces|ounce, ft feet|foot, mph miles per hour|miles an hour|m p h"
        ),
        symbols=_table(
            "& and, @ at, % percent|per cent, + plus, = equals, # number, § section, "
            "° degrees|degree, °c degrees celsius|degrees|degrees c, "
            "°f degrees fahrenheit|degrees|degrees f, № number, ¢ cents|cent, "
            "½ half|a half|one half|and a half, ¼ a quarter|quarter|one quarter|and a quarter, "
            "¾ three quarters|and three quarters, ⅓ a third|one third|and a third, "
            "⅔ two thirds|and two thirds, ² squared, ³ cubed"
        ),
        currencies={
            "$": ("one dollar", "dollars", "one cent", "cents"),
            "£": ("one pound", "pounds", "one penny", "pence"),
            "€": ("one euro", "euros", "one cent", "cents"),
            "¥": ("one yen", "yen", "one sen", "sen"),
            "₹": ("one rupee", "rupees", "one paisa", "paise"),
        },
        scales={
            "thousand": "thousand",
            "k": "thousand",
            "million": "million",
            "m": "million",
            "billion": "billion",
            "bn": "billion",
            "b": "billion",
            "trillion": "trillion",
        },
        minus="minus",
        to="to",
        dot="dot",
        ordinals=r"st|nd|rd|th",
        omitted=frozenset({"and"}),
        shorter=("^one (?=.)", "a "),
        in_pairs=range(100, 10_000),
        zero=["zero", "oh"],
        months=_MONTHS,
        plural=_english_plural,
        before_ordinal="the",
        clock=("one o'clock", "o'clock"),
        hours=r"\.([0-5]\d)(?=\s?[ap]\.?m\b)",
        compounds=False,
    ),
    "de": LanguageRules(
        abbreviations=_table(
            "dr. doktor, prof. professor, hr. herr, hrn. herrn, fr. frau, st. sankt, str. straße, "
            "nr. nummer, bzw. beziehungsweise, usw. und so weiter, z.b. zum beispiel, "
            "d.h. das heißt, u.a. unter anderem|und andere, ca. circa, evtl. eventuell"
        ),
        units=_table(
            "km kilometer, km/h kilometer pro stunde|stundenkilometer|k m h, m meter, "
            "cm zentimeter, mm millimeter, kg kilogramm|kilo, g gramm, l liter, ml milliliter, "
            "mb megabyte, gb gigabyte, ghz gigahertz, mio millionen|million, "
            "mrd milliarden|milliarde"
        ),
        symbols=_table(
            "& und, % prozent, + plus, = gleich, § paragraf, ° grad, °c grad celsius|grad, "
            "½ einhalb|ein halb|und ein halb"
        ),
        currencies={
            "$": ("ein dollar", "dollar", "ein cent", "cent"),
            "£": ("ein pfund", "pfund", "ein penny", "pence"),
            "€": ("ein euro", "euro", "ein cent", "cent"),
        },
        scales={each: each for each in ("million", "millionen", "milliarde", "milliarden")}
        | {"mio": "millionen", "mrd": "milliarden"},
        minus="minus",
        to="bis",
        dot="punkt",
        dotted=("", "n", "r"),
        shorter=("^ein(?=hundert|tausend)|(?<=^ein)s$", ""),
        clock=("ein uhr", "uhr"),
        hours=r"(?:[:.]([0-5]\d))?\s?uhr\b",
    ),
    "fr": LanguageRules(
        abbreviations=_table(
            "m. monsieur, mm. messieurs, mme madame, mlle mademoiselle, dr docteur, st saint, "
            "ste sainte, n° numéro, etc. et cetera|etcétéra, p. page, p.ex. par exemple"
        ),
        units=_table(
            "h heures|heure, km kilomètres|kilomètre, "
            "km/h kilomètres heure|kilomètres à l'heure|kilomètres par heure, m mètres|mètre, "
            "cm centimètres|centimètre, mm millimètres|millimètre, "
            "kg kilogrammes|kilogramme|kilos, g grammes|gramme, l litres|litre, "
            "ml millilitres|millilitre"
        ),
        symbols=_table(
            "& et, % pour cent, + plus, = égale, ° degrés, °c degrés celsius|degrés, "
            "½ demi|et demi|et demie"
        ),
        currencies={
            "$": ("un dollar", "dollars", "un cent", "cents"),
            "£": ("une livre", "livres", "un penny", "pence"),
            "€": ("un euro", "euros", "un centime", "centimes"),
        },
        scales={
            f"{each}{s}": f"{each}{s} de" for each in ("million", "milliard") for s in ("", "s")
        }
        | {"m": "millions de", "md": "milliards de", "k": "mille"},
        minus="moins",
        to="à",
        dot="point",
        ordinals=r"ers?|[èe]?res?|e|ème|èmes|nde?",
        clock=("une heure", "heures"),
        hours=r"\s?h(?:eures?)?(?:\s?([0-5]\d))?\b",
        compounds=False,
        elides=True,
    ),
    "es": LanguageRules(
        abbreviations=_table("sr. señor, sra. señora, dr. doctor, dra. doctora"),
        numbered={"n.º": "número", "nº": "número"},
        symbols=_table("& y, % por ciento"),
        currencies={
            "$": ("un dólar", "dólares", "un centavo", "centavos"),
            "€": ("un euro", "euros", "un céntimo", "céntimos"),
        },
        scales={"millón": "millón de", "millones": "millones de", "mil": "mil"},
        minus="menos",
        to="a",
        dot="punto",
        ordinals=r"\.?[ºª]",
        point="coma",
        # "Un" and "veintiún", of which the lexicon's spelling has an accent or none.
        shorter=("uno$", "ún"),
        compounds=False,
    ),
}
"""The rules of some languages; others have num2words alone."""

NO_RULES = LanguageRules()

POINTS = frozenset(
    {"am", "ar", "bn", "cy", "en", "es_GT", "es_NI", "fa", "he", "ja", "kn", "ko", "te", "th"}
)
"""Languages that write 1.5 and 1,500; all others write 1,5 and 1.500."""

MAX_LETTERS = 1000
"""No word is longer; Unicode's forms of one take a time that may grow with its length's square."""

_NOT_SPOKEN = re.compile(
    r"\[[^\[\]]*\]|<(?!\d)[\w/|][^<>\s]*>|<\d[\d:.]*>|<[a-z]+ [a-z]+>|"
    r"<(?:v|c|font|span|lang)\b[^<>]*>|(?!(?<=\d)\([a-z]\))\([^()\d]{0,30}\)|[♪♫]+|"
    r"^\s*speaker[_ ]?\d+:",
    re.IGNORECASE,
)
"""What recognizers write of noise, music and speakers; long parentheses and 401(k) are speech."""

_ENTITY = re.compile(r"&#?\w{1,31};")
_PLAIN = str.maketrans(
    {"\u2032": "'", "\u201b": "'", "\u2044": "/", "\u2012": "\u2013", "\u00ad": None}
)
"""Apostrophes, bars, dashes (see _TO), and hyphens that are seen at a line's end alone."""

_SIGNS = "$£€¥₹"
_CODES = {"USD": "$", "EUR": "€", "GBP": "£", "INR": "₹"}
_CODE = re.compile(
    rf"\b[A-Z]{{1,2}}(?=\$\d)|\b(?P<before>{'|'.join(_CODES)})\s?(?=\d)"
    rf"|(?<=\d)\s?(?P<after>{'|'.join(_CODES)}|[Ee]uros?)\b"
)
"""Such as US$5, USD 5 and 5 euros."""

_APART = re.compile(
    rf"(?<!\d[{_SIGNS}])(?<!\d\s[{_SIGNS}])(?<=[{_SIGNS}§№#])\s+(?=\d)|"
    rf"(?<=\d)(?:,[-\u2013]\s*|\s+)(?=[{_SIGNS}%](?!\d))"
)
"""The blanks of "$ 5" and "5 €", but not that behind "5 €"."""

_POINT_OF_MONEY = re.compile(rf"([{_SIGNS}]\d+)\.(?=\d(?![\d.,]*\d))")
_EXACT_HOUR = re.compile(r"\b(\d{1,2}):00(?=\s?[ap]\.?m\b)", re.IGNORECASE)
_NUMERO = re.compile(r"\b(n\.?[°º])(?=\d)", re.IGNORECASE)
_GROUPED = re.compile(r"\b\d{1,3}(?:[ \u00a0\u202f]\d{3})+\b")
_TIGHT = re.compile(r"\b\d{1,3}(?:[\u00a0\u202f]\d{3})+\b")
_DATE = re.compile(r"\b(0?[1-9]|[12]\d|3[01])\.(0?[1-9]|1[0-2])\.(?=\d{4}\b|\s|$)")
_ROMAN = r"(?=[XVI]{2}|[LXVIC]{3}|Ier|[XV]e)(?P<roman>(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3}))"
"""Without C and two letters with L, which often are acronyms, as CD and XL."""

_TITLES = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "mme", "mlle", "ste", "sra")
)
"""Abbreviations that are written without a dot, too; most others would be words: oz, co, ft."""

_DOTLESS = {"tr": str.maketrans("I\u0130", "\u0131i"), "az": str.maketrans("I\u0130", "\u0131i")}
"""Languages in which I is the capital of another letter than i."""

_MARKS = "".join(
    each for each in map(chr, range(0x300, 0x10000)) if unicodedata.category(each)[0] == "M"
)
_SOME_MARKS = rf"[{_MARKS}\u200c\u200d]{{1,8}}(?![{_MARKS}])"
"""Accents, vowel signs and joiners within a word; no word has more of them at once."""

_LETTERS = re.compile(r"[^\W\d_]\.(?:[^\W\d_]\.)+")
_PARTS = re.compile(rf"\d+(?:[.,:]\d+)*|[^\W\d_](?:[^\W\d]|['\u2019.]|{_SOME_MARKS})*|°[CF]\b|\S")
_TO = "\u2012"
"""A dash that stands between the ends of a range."""

_RANGE = re.compile(
    rf"(?<![\w.,:{_SIGNS}\-\u2012\u2013])(?P<unit>[{_SIGNS}]?)"
    rf"(?P<first>\d[\d.,:]*(?:[%{_SIGNS}]|[ap]m|bn|[kmb])?)"
    rf"[-\u2012\u2013](?=(?P<other>[{_SIGNS}]?)\d[\d.,:]*(?![\d.,:\-\u2012\u2013]))",
    re.IGNORECASE,
)
"""Two numbers with what may be beside them, no more: 2020-01-05 is none."""

_FRACTIONS = {"1/2": "½", "1/4": "¼", "3/4": "¾", "1/3": "⅓", "2/3": "⅔"}
_FRACTION = re.compile(rf"(?<![\w/.,])(?:{'|'.join(_FRACTIONS)})(?![\w/])")
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}


class Normalizer:
    """Normalizer reads text of a language as words of a lexicon, in its spelling.

    ConfigurationError for a language that num2words lacks. Words that the lexicon lacks are letters
    alone, in capitals if most of its words are.
    """

    def __init__(self, lexicon: Lexicon, language: str) -> None:
        check_language(language)
        self._language = language
        family, _, _ = language.partition("_")
        self._rules = RULES.get(family, NO_RULES)
        self._marks = ".," if {family, language} & POINTS else ",."
        self._known = lexicon.pronunciations
        found: dict[str, list[str]] = defaultdict(list)
        self._dotless = _DOTLESS.get(family, {})
        for word in lexicon.pronunciations:
            found[plain_spelling(word.translate(self._dotless))].append(word)
        self._spellings: Mapping[str, Sequence[str]] = found
        num_capitals = sum(map(str.isupper, lexicon.pronunciations))
        self._in_its_case = str.upper if 2 * num_capitals > len(lexicon.pronunciations) else str
        mark, other = map(re.escape, self._marks)
        self._number = re.compile(
            rf"(?P<sign>[-\u2212]?)(?P<unit>[{_SIGNS}]?)(?P<sign_within>[-\u2212]?)"
            # 1,00,000 is a hundred thousand, in India.
            rf"(?P<whole>\d{{1,3}}(?:{other}\d{{3}})+|\d{{1,2}}(?:{other}\d{{2}})+{other}\d{{3}}|"
            rf"\d+|(?={mark}\d))(?:{mark}(?P<part>\d+)|{other}(?P<cents>\d\d))?"
            rf"(?:(?P<percent>%)|(?P<after>[{_SIGNS}])|(?P<ordinal>{self._rules.ordinals})|(?P<plural>['\u2019]?s))?"
        )
        inner = [each[:-1].split(".") for each in self._rules.abbreviations if "." in each[:-1]]
        spaced = "|".join(map(r"\.\s?".join, inner)) or "(?!)"
        self._spaced = re.compile(rf"\b(?:{spaced})\.", re.IGNORECASE)
        units = "|".join(map(re.escape, self._rules.units)) or "(?!)"
        scales = "|".join(map(re.escape, self._rules.scales)) or "(?!)"
        self._attached = re.compile(
            rf"(?<=\d)(?=(?:{units})\b|°)|(?P<money>[{_SIGNS}]\d[\d.,]*)-?(?=(?:{scales})\b)",
            re.IGNORECASE,
        )
        self._scaled = re.compile(
            rf"(?<![\d.,])(?P<amount>\d[\d.,]*)\s?(?P<scale>(?:{scales})\b\.?)"
            rf"\s?(?P<unit>[{_SIGNS}])(?!\d)",
            re.IGNORECASE,
        )
        self._hours = re.compile(rf"(?<![\d.,:])([01]?\d|2[0-4]){self._rules.hours}", re.IGNORECASE)
        self._roman_number = re.compile(rf"{_ROMAN}(?P<ordinal>{self._rules.ordinals})?")
        self._clock = re.compile(r"(?P<hours>[01]?\d|2[0-4]):(?P<minutes>[0-5]\d)")

    def __call__(self, text: str) -> list[Readings]:
        """Return the readings of the text's words, in order; none for a text without words."""
        spoken = self._apart(text)
        tokens, before = deque(spoken.split()), ""
        if all(each in self._known for each in tokens):
            return [((each,),) for each in tokens]
        has_lower_case = any(map(str.islower, spoken))
        read: list[Readings] = []
        while tokens:
            first = tokens.popleft()
            following = tokens[0].strip(".,;:!?").casefold() if tokens else ""
            numbered = self._rules.numbered.get(first.casefold(), "")
            alone, place = _stripped(first), len(read)
            if numbered and following[:1].isdecimal():
                # "No. 20 people" may begin with the word.
                read.append(tuple(dict.fromkeys((self._spoken(numbered), *self._word(alone)))))
            elif following in self._rules.scales and self._is_money(first):
                # "$5 million" are five million dollars.
                tokens.popleft()
                read += self._amount(first, self._rules.scales[following])
            elif before[-1:].isdecimal() and (unit := self._unit(alone)):
                # It may be a word that only looks like a unit: "by 10 am I there".
                found = dict.fromkeys((*(self._kept(unit) or ()), *self._word(alone)))
                read.append(tuple(islice(found, MAX_READINGS)))
            elif before[-1:].isdecimal() and alone in self._rules.symbols:
                read += self._symbol(alone, after_number=True)
            elif self._is_day(alone, read, following):
                said = [*self._cardinals(alone), *self._ordinals(int(alone))]
                read += filter(None, [self._kept(said)])
            else:
                read += self._token(first, has_lower_case)
            if before == _TO and len(read) > place:
                read[place] = self._maybe(self._rules.to, read[place])
            before = first
        return read

    def _is_money(self, token: str) -> bool:
        found = self._number.fullmatch(_stripped(token))
        return found is not None and found["unit"] in self._rules.currencies

    def _unit(self, token: str) -> Sequence[str]:
        """Return how a unit is said; a letter is one in its own case alone: 5g is not 5G."""
        return self._rules.units.get(token if len(token) == 1 else token.casefold(), ())

    def _is_day(self, token: str, read: Sequence[Readings], following: str) -> bool:
        """Say whether a number is beside a month."""
        beside = {following, read[-1][0][-1].casefold() if read else ""}
        is_beside = not beside.isdisjoint(self._rules.months)
        return is_beside and re.fullmatch(r"[12]?\d|3[01]", token) is not None

    def _apart(self, text: str) -> str:
        """Remove what is not spoken, and set numbers apart from what is not part of them."""
        spoken = composed(_ENTITY.sub(lambda found: html.unescape(found[0]), text))
        spoken = spoken.translate(self._dotless)
        spoken = _NOT_SPOKEN.sub(lambda found: found[0] if found[0] in self._known else " ", spoken)
        spoken = _FRACTION.sub(lambda found: _FRACTIONS[found[0]], spoken.translate(_PLAIN))
        spoken = self._spaced.sub(lambda found: "".join(found[0].split()), spoken)
        spoken = "".join(map(self._number_apart, spoken))
        return self._in_one_form(spoken) if re.search(r"\d", spoken) else spoken

    def _in_one_form(self, text: str) -> str:
        """Write 1 000, 10.30 am, 10:00 am, USD 5 and 5 million € in one form.

        These are 1000, 10:30 am, 10 am, $5 and €5 million.
        """
        spoken = _APART.sub("", text)
        if self._rules.dotted:
            spoken = _DATE.sub(r"\1. \2. ", spoken)
        grouped = _GROUPED if self._marks[0] == "," else _TIGHT
        spoken = grouped.sub(lambda found: "".join(found[0].split()), spoken)
        spoken = self._hours.sub(lambda found: f"{found[1]}:{found[2] or '00'}", spoken)
        spoken = _NUMERO.sub(r"\1 ", _EXACT_HOUR.sub(r"\1", spoken))
        if self._marks[0] == ",":
            # A group has three digits: "$1.5" has a decimal point, as Mexico writes it.
            spoken = _POINT_OF_MONEY.sub(r"\1,", spoken)
        spoken = self._scaled.sub(r"\g<unit>\g<amount> \g<scale>", _CODE.sub(self._sign, spoken))
        spoken = _RANGE.sub(_as_range, spoken)
        return self._attached.sub(lambda found: f"{found['money'] or ''} ", spoken)

    def _number_apart(self, letter: str) -> str:
        """Return a character with blanks around it if it is a number and no digit, such as ½."""
        if unicodedata.category(letter) not in {"No", "Nl"}:
            return letter
        known = letter in self._rules.symbols or letter in self._known
        return f" {letter if known else unicodedata.normalize('NFKC', letter)} ".replace(
            "\u2044", "/"
        )

    def _sign(self, code: re.Match[str]) -> str:
        """Return the sign for the code of a currency that the language has."""
        named = code["before"] or code["after"] or ""
        sign = _CODES.get(named[:3].upper(), "")
        said = self._rules.currencies.get(sign)
        # "A 5 euro note" is none of five euros.
        is_word = len(named) > 3 and said is not None and named.casefold() != said[1]
        return sign if not sign or (said and not is_word) else code[0]

    def words(self, text: str) -> list[str]:
        """Return the words of the text as they are likeliest said, such as for a transcript."""
        return [word for readings in self(text) for word in readings[0]]

    def _token(self, token: str, has_lower_case: bool) -> Iterator[Readings]:
        core = _stripped(token)
        if token in self._known:
            found: Readings = ((token,),)
        else:
            word = self._word(core)
            found = (*self._abbreviation(token, core, is_word=bool(word)), *word)
        if found:
            # "US" is not "us" where not all is in capitals.
            letters = self._spelled(core) if has_lower_case else ()
            yield tuple(islice(dict.fromkeys((*found, *letters)), MAX_READINGS))
        elif numeral := self._dotted(token, core) or self._numeral(core) or self._roman(core):
            yield numeral
        else:
            yield from self._parts(core, has_lower_case)

    def _parts(self, core: str, has_lower_case: bool) -> Iterator[Readings]:
        """Yield what a token is made of: words between hyphens, digits beside letters, symbols."""
        pieces = [each for each in re.split(r"[-\u2010-\u2015\u2212/_|\\~…]+|\.\.+", core) if each]
        if len(pieces) > 1:
            for piece in pieces:
                yield from self._token(piece, has_lower_case)
            return
        for part in _PARTS.findall(core):
            # An accent without its letter is not spoken.
            if not unicodedata.combining(part[0]):
                yield from self._part(part, has_lower_case)

    def _part(self, part: str, has_lower_case: bool) -> Iterator[Readings]:
        if part.lower() in self._rules.symbols:
            yield from self._symbol(part.lower())
        elif found := self._numeral(part) or self._word(part):
            yield found
        elif self._rules.dot and self._marks[0] == "," and re.fullmatch(r"\d+\.\d+", part):
            # Such as version 2.0 where 2,0 is the number.
            whole, _, after = part.partition(".")
            begin = f"{self._cardinals(whole, is_grouped=True)[0]} {self._rules.dot}"
            ends = (*self._cardinals(after, is_grouped=True), *self._one_by_one(after))
            yield from filter(None, [self._kept(f"{begin} {each}" for each in ends)])
        elif part[0].isdecimal():
            # Such as 3,5 in English: no number, so each of its digits.
            yield from filter(None, map(self._numeral, re.findall(r"\d+", part)))
        elif _LETTERS.fullmatch(f"{part}."):
            yield (self._spoken(" ".join(part.replace(".", " "))),)
        elif elided := self._elided(part):
            yield (elided,)
        elif "." in part.strip("."):
            yield from self._domain([each for each in part.split(".") if each], has_lower_case)
        elif letters := _letters(part):
            # In capitals it may be an acronym, and is one beside lower case.
            word, spelled = ((self._in_its_case(letters),),), self._spelled(part)
            yield (*spelled, *word) if has_lower_case else (*word, *spelled)

    def _symbol(self, symbol: str, *, after_number: bool = False) -> Iterator[Readings]:
        """Yield what a symbol is called; after a number "and a half" comes before "half"."""
        said = self._rules.symbols[symbol]
        if after_number:
            also = f"{self._rules.symbols['&'][0]} "
            said = sorted(said, key=lambda each: not each.startswith(also))
        if found := self._kept(said):
            yield found

    def _domain(self, pieces: Sequence[str], has_lower_case: bool) -> Iterator[Readings]:
        """Yield the words between dots, which may be said before "com" in "www.example.com"."""
        # Of what is one token because a blank is missing, few endings are as short and small.
        is_domain = bool(self._rules.dot) and re.fullmatch(r"[a-z]{2,4}", pieces[-1]) is not None
        for number, piece in enumerate(pieces):
            for place, found in enumerate(self._token(piece, has_lower_case)):
                after_dot = is_domain and number > 0 and place == 0
                yield self._maybe(self._rules.dot, found) if after_dot else found

    def _maybe(self, word: str, readings: Readings) -> Readings:
        """Return each reading with a word before it, and without it."""
        before = self._spoken(word)
        both = ((*start, *each) for each in readings for start in (before, ()))
        return tuple(islice(dict.fromkeys(both), MAX_READINGS))

    def _elided(self, part: str) -> Reading:
        """Return the lexicon's two words of French's "l'homme"; nothing for other text."""
        if not self._rules.elides:
            return ()
        first, apostrophe, second = part.replace("\u2019", "'").partition("'")
        words = self._word(first + apostrophe), self._word(second)
        return (words[0][0][0], words[1][0][0]) if apostrophe and all(words) else ()

    def _word(self, core: str) -> Readings:
        """Return the lexicon's words for a token that is one, whatever its case and apostrophes."""
        for spelled in dict.fromkeys((core, core.strip("'\u2019\u2018"), _without_accents(core))):
            if spelled in self._known:
                return ((spelled,),)
            is_word = len(spelled) <= MAX_LETTERS
            if is_word and (found := self._spellings.get(plain_spelling(spelled))):
                return tuple((word,) for word in found[:MAX_READINGS])
        return ()

    def _abbreviation(self, token: str, core: str, *, is_word: bool) -> Readings:
        # The dot of "Mr." may be left out; "fr" may be a word, and 20 ms and MS Word have no miss.
        is_title = core.casefold() in _TITLES and (core.casefold() != "ms" or core == "Ms")
        has_dot = "." in token or (is_title and not is_word)
        for written in (token, f"{core}.", core) if has_dot else (token, core):
            if said := self._rules.abbreviations.get(written.strip("\"'(),;:!?“”„").casefold()):
                return self._kept(said) or ()
        return ()

    def _spelled(self, part: str) -> Readings:
        """Spell an acronym letter by letter; nothing for other text."""
        if not (part.isupper() and part.isalpha() and 1 < len(part) <= 5):
            return ()
        spelled = self._spoken(" ".join(part))
        return (spelled,) if all(word in self._known for word in spelled) else ()

    def _numeral(self, core: str) -> Readings | None:
        """Return how a number is said, with its unit, as an ordinal, a decade or a time of day."""
        if found := self._clock.fullmatch(core):
            return self._kept(self._times(int(found["hours"]), int(found["minutes"])))
        if not (found := self._number.fullmatch(core)):
            return None
        readings = self._kept(self._said(found))
        return self._with_sign(found, readings)

    def _with_sign(self, found: re.Match[str], readings: Readings | None) -> Readings | None:
        """Return the readings of a number, with "minus" before them where it has a sign."""
        if readings and self._rules.minus and (found["sign"] or found["sign_within"]):
            return self._maybe(self._rules.minus, readings)
        return readings

    def _said(self, found: re.Match[str]) -> list[str]:
        digits = re.sub(r"\D", "", found["whole"])
        if found["ordinal"]:
            # .5th and 3.5th are none.
            is_ordinal = digits and not (found["part"] or found["cents"])
            is_said = is_ordinal and len(digits) <= MAX_DIGITS
            said = [self._say(int(digits), "ordinal")] if is_said else []
            feminine = _FEMININE.get(found["ordinal"].rstrip("s")[-2:].casefold(), ("(?!)", ""))
            return [re.sub(*feminine, each) for each in said]
        unit = found["unit"] or found["after"]
        if unit in self._rules.currencies:
            part = found["part"] or found["cents"]
            return self._money(digits, part, self._rules.currencies[unit])
        plural = self._rules.plural
        if found["cents"] or (found["plural"] and plural is None):
            return []
        numbers = self._cardinals(digits, found["part"], is_grouped=digits != found["whole"])
        if found["percent"]:
            percents = self._rules.symbols.get("%", [""])
            return [f"{number} {percent}" for number in numbers for percent in percents]
        if found["plural"] and plural:
            pairs = (number.rpartition(" ") for number in numbers)
            return [f"{before} {plural(last)}" for before, _, last in pairs]
        return numbers

    def _cardinals(
        self, digits: str, part: str | None = None, *, is_grouped: bool = False
    ) -> list[str]:
        """Return the ways to say a number: as a year, a cardinal, or digit by digit."""
        if part:
            return self._decimals(digits, part)
        one_by_one = self._one_by_one(digits)
        if len(digits) > MAX_DIGITS or (digits[0] == "0" and len(digits) > 1):
            return one_by_one
        number = int(digits)
        cardinal = self._say(number, "cardinal")
        said = [cardinal]
        in_pairs = self._rules.in_pairs if self._language not in _NAMES_YEARS else ()
        if number in in_pairs and not is_grouped:
            said.insert(0 if number in YEARS else 1, self._say(number, "year"))
        said.append(re.sub(*self._rules.shorter, cardinal))
        without = [
            " ".join(word for word in each.split() if word not in self._rules.omitted)
            for each in said
        ]
        more = one_by_one if len(digits) > 2 and not is_grouped else []
        # What is shorter comes last: it may be beyond MAX_READINGS.
        return [*dict.fromkeys((*said[:-1], *without[:-1], *more, said[-1], without[-1]))]

    def _one_by_one(self, digits: str) -> list[str]:
        """Say each digit; a zero may have several names."""
        return [
            " ".join(
                zero if int(each) == 0 else self._say(int(each), "cardinal") for each in digits
            )
            for zero in self._rules.zero or [self._say(0, "cardinal")]
        ]

    def _decimals(self, digits: str, part: str) -> list[str]:
        """Say a decimal number as num2words does, or digits or a number after the point."""
        half, zero, five = (self._say(each, "cardinal") for each in (0.5, 0, 5))
        has_point = half.startswith(zero) and half.endswith(five)
        point = half[len(zero) : -len(five)] if has_point else ""
        point = self._rules.point or point
        whole = self._cardinals(digits or "0", is_grouped=True)[0]
        after = (*self._one_by_one(part), *self._cardinals(part, is_grouped=True))
        said = [f"{whole} {point} {each}" for each in after]
        is_plain = len(digits) <= MAX_DIGITS - 4 and (digits[:1] != "0" or len(digits) == 1)
        if is_plain and len(part) <= 4 and self._language not in _INEXACT:
            # It leaves out zeros at the end, and may have another word than the rules.
            is_last = part[-1] == "0" or self._rules.point
            number = self._say(float(f"{digits}.{part}"), "cardinal")
            said.insert(len(said) if is_last else 0, number)
        # ".5" may be "point five".
        return said if digits else [*said, *(each.partition(" ")[2] for each in said)]

    def _money(self, digits: str, part: str | None, names: tuple[str, str, str, str]) -> list[str]:
        one, several, hundredth, hundredths = names
        if part and len(part) != 2:
            return [f"{amount} {several}" for amount in self._decimals(digits, part)]
        amounts = self._cardinals(digits or "0", is_grouped=True)
        is_one = digits.lstrip("0") == "1"
        said = [one] if is_one else [f"{amount} {several}" for amount in amounts]
        if not part or not int(part):
            return said
        small = hundredth if int(part) == 1 else f"{self._say(int(part), 'cardinal')} {hundredths}"
        joined = [f"{each} {small}" for each in said]
        (also,) = self._rules.symbols["&"]
        alone = [] if digits.strip("0") else [small]
        # Cents may be a number alone, as in "two fifty" and "two oh five".
        number = self._cardinals(part)[-1]
        short = [f"{each} {number}" for each in (said[0], amounts[0])]
        return [*alone, *(f"{each} {also} {small}" for each in said), *joined, *short]

    def _amount(self, token: str, scale: str) -> Iterator[Readings]:
        found = self._number.fullmatch(_stripped(token))
        assert found is not None, "money"
        _, several, _, _ = self._rules.currencies[found["unit"]]
        digits = re.sub(r"\D", "", found["whole"])
        numbers = self._cardinals(digits, found["part"] or found["cents"], is_grouped=True)
        amounts = (f"{number} {scale} {several}" for number in numbers)
        if self._rules.elides:
            amounts = (re.sub(r"\bde (?=[aeiou])", "d' ", each) for each in amounts)
        if (readings := self._with_sign(found, self._kept(amounts))) is not None:
            yield readings

    def _times(self, hours: int, minutes: int) -> list[str]:
        one, several = self._rules.clock
        hour = self._say(hours, "cardinal")
        if hours > 1 and one:
            # French's hours are feminine: "vingt et une heures".
            hour = re.sub(rf"\b{self._say(1, 'cardinal')}$", one.split()[0], hour)
        exact = one if hours == 1 and one else f"{hour} {several}"
        if not minutes:
            return [exact, hour]
        minute = self._say(minutes, "cardinal")
        zero = [f"{hour} {each} {minute}" for each in self._rules.zero[1:]] if minutes < 10 else []
        between = [] if self._rules is RULES["en"] else [f"{exact} {minute}"]
        return [*zero, *between, f"{hour} {minute}"]

    def _dotted(self, token: str, core: str) -> Readings | None:
        """Return an ordinal number of digits and a dot, or the number at a sentence's end."""
        if not (self._rules.dotted and token.endswith(".") and core.isdecimal()):
            return None
        if len(core) > MAX_DIGITS:
            return None
        ordinal = self._say(int(core), "ordinal")
        endings = (f"{ordinal}{ending}" for ending in self._rules.dotted)
        return self._kept([*endings, *self._cardinals(core, None)])

    def _ordinals(self, number: int) -> list[str]:
        ordinal = self._say(number, "ordinal")
        before = self._rules.before_ordinal
        return [f"{before} {ordinal}", ordinal] if before else [ordinal]

    def _roman(self, core: str) -> Readings | None:
        if not (found := self._roman_number.fullmatch(core)):
            return None
        values = [_ROMAN_VALUES[each] for each in found["roman"]]
        number = sum(
            -value if value < following else value
            for value, following in zip(values, [*values[1:], 0], strict=True)
        )
        cardinals = [] if found["ordinal"] else [self._say(number, "cardinal")]
        # "The XIXth" has its article.
        ordinals = self._ordinals(number)[:: -1 if found["ordinal"] else 1]
        return self._kept([*cardinals, *ordinals])

    def _say(self, number: int | float, kind: str) -> str:
        said = _say(number, kind, self._language)
        return " ".join(re.sub(r"[-,\u2010]", " ", said).split())

    def _kept(self, said: Iterable[str]) -> Readings | None:
        """Return the readings that the lexicon has all words of, or else the first one."""
        readings = [*dict.fromkeys(self._spoken(each) for each in said if each.strip())]
        known = [each for each in readings if all(word in self._known for word in each)]
        return tuple(islice(known or readings[:1], MAX_READINGS)) or None

    def _spoken(self, said: str) -> Reading:
        """Spell words of the rules and of num2words as the lexicon does; compounds may be parts."""
        words: list[str] = []
        for word in said.split():
            if found := self._word(word):
                words.append(found[0][0])
            else:
                parts = self._compound(word.casefold()) if self._rules.compounds else []
                words += parts or [self._in_its_case(_letters(word)) or word]
        return tuple(words)

    def _compound(self, word: str) -> list[str]:
        """Cut a number that is one word into the lexicon's, the longest last; empty if it cannot.

        Such as German's "achtzehnhundertdrei". From its beginning on "einhunderteins" would be
        "ein", "hunderte" and "ins".
        """
        if not word:
            return []
        for begin in range(len(word) - 2):
            found = self._spellings.get(word[begin:])
            if found and (begin == 0 or (before := self._compound(word[:begin]))):
                return [*(before if begin else []), found[0]]
        return []


_FEMININE = {"ª": (r"o\b", "a"), ".ª": (r"o\b", "a"), "re": (r"er\b", "ère")}
"""What follows a feminine ordinal's digits, and what its ending becomes."""

_INEXACT = frozenset({"ar", "bn", "fa", "tr", "vi"})
"""Languages of which num2words says another decimal number than it is given."""

_NAMES_YEARS = frozenset({"bn", "ja", "ko"})
"""Languages of which num2words says a year's era, or that it is one."""


@lru_cache(maxsize=4096, typed=True)
def _say(number: int | float, kind: str, language: str) -> str:
    # Not each language has ordinals, years, decimals and large numbers, and what num2words raises
    # then is any exception. Amharic's millions do not end.
    if not (language == "am" and number >= 10**6):
        for each in (kind, "cardinal"):
            with suppress(Exception):
                return str(num2words(number, lang=language, to=each))
    digits = re.findall(r"\d", str(number))
    return " ".join(str(num2words(int(digit), lang=language)) for digit in digits)


def _as_range(found: re.Match[str]) -> str:
    """Set the ends of a range apart; "$20-30" are twenty to thirty dollars."""
    before, after = (found["unit"], "") if found["other"] else ("", found["unit"])
    return f"{before}{found['first']} {_TO} {after}"


def check_language(language: str) -> None:
    """Raise ConfigurationError for a language whose numbers cannot be read."""
    if language not in CONVERTER_CLASSES:
        known = ", ".join(sorted(CONVERTER_CLASSES))
        said = f"targets.transcripts.language = {language!r}"
        raise ConfigurationError(f"{said}: need one of num2words: {known}")


_FIRST = re.compile(
    rf"(?:(?<![-\u2212])[-\u2212])?(?:[{_SIGNS}][-\u2212]?)?(?:(?<!\.)\.)?\d"
    rf"|[\w{_SIGNS}§№#&@%+=°'\u2019]"
)
_QUOTES = re.compile(r"^['\u2018\u2019]+(?=\d)")
_LAST = re.compile(rf"[\w{_SIGNS}¢%°&@+='\u2019]")


def _stripped(token: str) -> str:
    """Remove punctuation around a token; what may be a part of a number stays."""
    if (first := _FIRST.search(token)) is None:
        return ""
    last = next((at for at in reversed(range(len(token))) if _LAST.match(token[at])), -1)
    while unicodedata.category(token[last + 1 : last + 2] or ".")[0] == "M":
        last += 1
    bare = token[first.start() : last + 1]
    return _QUOTES.sub("", bare)


def _letters(word: str) -> str:
    """Keep letters, their marks and apostrophes within, in lower case."""
    kept = "".join(
        each
        # Case folding would make "ss" of "ß".
        for each in "ß".join(map(plain_spelling, word.split("ß")))
        if each == "'" or each.isalpha() or unicodedata.category(each)[0] == "M"
    )
    return kept.strip("'")


def _without_accents(word: str) -> str:
    apart = chain.from_iterable(unicodedata.normalize("NFKD", each) for each in word)
    return "".join(each for each in apart if not unicodedata.combining(each))
