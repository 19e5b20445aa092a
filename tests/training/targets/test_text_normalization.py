"""What recognizers write is read as the lexicon's words: pairs checked by hand, and invariants."""

import re
import time
import unicodedata
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from num2words import CONVERTER_CLASSES

from training.decode.lexicon import Lexicon
from training.targets.text_normalization import MAX_READINGS, Normalizer, Reading

ENGLISH = """
A I THE AND OF IN ON AT MAY PAID PERCENT PER CENT POINT DOLLAR DOLLARS CENTS POUND POUNDS PENNY
PENCE MISTER MISSUS DOCTOR DRIVE SAINT STREET NUMBER PAGE OH ZERO ONE TWO THREE FOUR FIVE SIX SEVEN
EIGHT NINE TEN ELEVEN TWELVE THIRTEEN FOURTEEN EIGHTEEN NINETEEN TWENTY THIRTY FORTY FIFTY SIXTY
SIXTIES SEVENTEEN HUNDRED THOUSAND MILLION FIRST SECOND TWENTIETH FOURTEENTH O'CLOCK M B C S U X'S
DON'T SHE'S DOGS' LOUIS CHAPTER WELL KNOWN NO HELLO 'TIS JOHN'S CAFE POLISH polish TO DOT COM FOR
EXAMPLE THAT IS HALF MINUS DEGREES SQUARED NINETIES SIXES
"""
GERMAN = """
am dritte dritten dritter Mai achtzehn hundert drei zahlte Herr Müller zwei fünfzig Euro und Cent
Doktor Komma fünf Prozent tausend um zehn Uhr dreißig ein zwanzig zum Beispiel Straße ist groß
"""
FRENCH = """
le premier mai mille huit cent trois monsieur dupont paya vingt et euros cinquante centimes pour
virgule cinq madame saint louis quatorze dix heures trente l' homme aujourd'hui soixante onze
"""
SPANISH = "mil quinientos tres coma punto uno cuatro señor García pagó euros y cincuenta céntimos"


def lexicon_of(words: str) -> Lexicon:
    return Lexicon(dict.fromkeys(words.split(), (("AX",),)))


NORMALIZERS = {
    name: Normalizer(lexicon_of(words), name)
    for name, words in (("en", ENGLISH), ("de", GERMAN), ("fr", FRENCH), ("es", SPANISH))
}
WORDS = {
    name: words.split()
    for name, words in (("en", ENGLISH), ("de", GERMAN), ("fr", FRENCH), ("es", SPANISH))
}


@pytest.mark.parametrize(
    ("language", "text", "spoken"),
    [
        ("en", "“Hello,” she\u2019s said; don\u00b4t!", "HELLO SHE'S SAID DON'T"),
        ("en", "Mr. & Mrs. Hill paid $20.", "MISTER AND MISSUS HILL PAID TWENTY DOLLARS"),
        ("en", "Dr. St. John's", "DOCTOR SAINT JOHN'S"),
        ("en", "$1", "ONE DOLLAR"),
        ("en", "£1.01", "ONE POUND AND ONE PENNY"),
        ("en", "$ 2.50", "TWO DOLLARS AND FIFTY CENTS"),
        ("en", "$5 million, or 3.5%", "FIVE MILLION DOLLARS OR THREE POINT FIVE PERCENT"),
        ("en", "1803", "EIGHTEEN OH THREE"),
        ("en", "1900 2007", "NINETEEN HUNDRED TWO THOUSAND AND SEVEN"),
        ("en", "1,803", "ONE THOUSAND EIGHT HUNDRED AND THREE"),
        ("en", "the 1960s", "THE NINETEEN SIXTIES"),
        ("en", "the 2nd of May, the 20th", "THE SECOND OF MAY THE TWENTIETH"),
        ("en", "at 10:30 a.m., at 5:00", "AT TEN THIRTY A M AT FIVE O'CLOCK"),
        ("en", "No. 5, no.", "NUMBER FIVE NO"),
        ("en", "Chapter XIV", "CHAPTER FOURTEEN"),
        ("en", "the BBC, the U.S.", "THE B B C THE U S"),
        ("en", "well-known — well--known", "WELL KNOWN WELL KNOWN"),
        ("en", "[Music] (laughs) ♪ hello", "HELLO"),
        ("en", "CAFÉ", "CAFE"),
        ("en", "'Tis the dogs' X's", "'TIS THE DOGS' X'S"),
        ("en", "B2B", "B TWO B"),
        ("en", "007", "ZERO ZERO SEVEN"),
        ("en", "b@c.com", "B AT C DOT COM"),
        ("en", "e.g. 10%", "FOR EXAMPLE TEN PERCENT"),
        ("en", "½ of 2½", "HALF OF TWO AND A HALF"),
        ("en", "2 1/2, 1\u20442", "TWO AND A HALF HALF"),
        ("en", "at 7pm, 10:30AM, 9 am", "AT SEVEN P M TEN THIRTY A M NINE A M"),
        ("en", "10, am I", "TEN AM I"),
        ("en", "$5.5M, £20k", "FIVE POINT FIVE MILLION DOLLARS TWENTY THOUSAND POUNDS"),
        ("en", "10-20, 5\u20136", "TEN TO TWENTY FIVE TO SIX"),
        ("en", "-5, \u22125", "MINUS FIVE MINUS FIVE"),
        ("en", "1,00,000; 3,5; 3.14.15", "ONE HUNDRED THOUSAND THREE FIVE THREE FOURTEEN FIFTEEN"),
        ("en", "'90s, 6s", "NINETIES SIXES"),
        ("en", "x\u00b2 \u2460 50°C", "X SQUARED ONE FIFTY DEGREES"),
        ("en", "hello.No", "HELLO NO"),
        ("en", "007.25, ...5, --5", "ZERO ZERO SEVEN POINT TWO FIVE FIVE FIVE"),
        ("en", ".5, -.5", "ZERO POINT FIVE MINUS ZERO POINT FIVE"),
        ("en", "$.50, $0.005", "FIFTY CENTS ZERO POINT ZERO ZERO FIVE DOLLARS"),
        ("en", "-$5, $-5", "MINUS FIVE DOLLARS MINUS FIVE DOLLARS"),
        ("en", "£5,50", "FIVE POUNDS AND FIFTY PENCE"),
        ("en", "1." + 40 * "9", "ONE POINT" + 40 * " NINE"),
        ("en", "(555) 5.", "FIVE HUNDRED AND FIFTY FIVE FIVE"),
        ("en", "(that is at ten)", ""),
        ("en", "(that is at ten, I said, or at twenty)", "THAT IS AT TEN I SAID OR AT TWENTY"),
        ("en", "x<5 and y>3, a<b and c>d", "X FIVE AND Y THREE A B AND C D"),
        ("en", "<|en|> <|0.00|> the <unk></s>", "THE"),
        ("en", "SPEAKER_00: hello", "HELLO"),
        ("en", "don&#39;t don\u2032t don\u201bt", "DON'T DON'T DON'T"),
        ("en", "per\u00adcent", "PERCENT"),
        ("en", "US$5, A$5, 5 USD, 5 EUR", 3 * "FIVE DOLLARS " + "FIVE EUROS"),
        ("en", "50¢, ₹500", "FIFTY CENTS FIVE HUNDRED RUPEES"),
        ("en", "$2.5", "TWO POINT FIVE DOLLARS"),
        ("en", "at 10.30 pm", "AT TEN THIRTY P M"),
        ("en", "Mr Hill, MRS Hill, Dr. Hill", "MISTER HILL MISSUS HILL DOCTOR HILL"),
        ("en", "Apr. 5, Mar. 5, Sep. 5", "APRIL FIVE MARCH FIVE SEPTEMBER FIVE"),
        ("en", "e. g. 10", "FOR EXAMPLE TEN"),
        ("en", "THE BBC", "THE BBC"),
        (
            "en",
            "10-20%, $10-20, $1M-$2M",
            "TEN TO TWENTY PERCENT TEN TO TWENTY DOLLARS "
            "ONE MILLION DOLLARS TO TWO MILLION DOLLARS",
        ),
        ("en", "9am-5pm, 10-20s", "NINE A M TO FIVE P M TEN TO TWENTIES"),
        ("en", "2020-01-05", "TWENTY TWENTY ZERO ONE ZERO FIVE"),
        (
            "en",
            "5 km/h, 5 m, 5GB, 5 ml",
            "FIVE KILOMETERS PER HOUR FIVE M FIVE GIGABYTES FIVE MILLILITERS",
        ),
        ("en", "5G", "FIVE G"),
        ("en", "XLII, CD", "FORTY TWO CD"),
        ("en", "3.10, v2.0", "THREE POINT ONE ZERO V TWO POINT ZERO"),
        ("de", "Am 3. Mai 1803", "am dritte Mai achtzehn hundert drei"),
        ("de", "Hr. Müller zahlte 2,50 €", "Herr Müller zahlte zwei Euro und fünfzig Cent"),
        ("de", "DR. MÜLLER: 5 %", "Doktor Müller fünf Prozent"),
        ("de", "2.000, um 10:30", "zwei tausend um zehn Uhr dreißig"),
        ("de", "z.B. 23", "zum Beispiel drei und zwanzig"),
        ("de", "Die STRASSE ist groß", "die Straße ist groß"),
        ("de", "weiß", "weiß"),
        ("de", "z. B. u. a. Mai", "zum Beispiel unter anderem Mai"),
        ("de", "am 3.3.1803", "am dritte dritte achtzehn hundert drei"),
        ("de", "um 10:30 Uhr, um 10.30 Uhr", "um zehn Uhr dreißig um zehn Uhr dreißig"),
        ("de", "10:00 Uhr, 1 Uhr", "zehn Uhr ein Uhr"),
        ("de", "5 Mio. €, 20,- €, 1 €", "fünf millionen Euro zwanzig Euro ein Euro"),
        ("fr", "Le 1er mai 1803", "le premier mai mille huit cent trois"),
        ("fr", "M. Dupont paya 20,50 €", "monsieur dupont paya vingt euros et cinquante centimes"),
        (
            "fr",
            "3,5 % ; Mme St Louis XIV",
            "trois virgule cinq pour cent madame saint louis quatorze",
        ),
        ("fr", "L\u2019homme aujourd\u2019hui", "l' homme aujourd'hui"),
        ("fr", "10 000", "dix mille"),
        ("fr", "71", "soixante et onze"),
        ("fr", "10h30, 8h05, 10 h", "dix heures trente huit heures cinq dix heures"),
        ("fr", "XXe, Louis Ier, 10 °C", "vingtième louis premier dix degrés celsius"),
        ("fr", "p. ex. dix", "par exemple dix"),
        ("fr", "1h, £1", "une heure une livre"),
        ("es", "1 €", "un euro"),
        ("es", "1.500; 3,14", "mil quinientos tres coma uno cuatro"),
        ("es", "El Sr. García pagó 3,50 €", "el señor García pagó tres euros y cincuenta céntimos"),
        ("es", "n.º 4, 4%", "número cuatro cuatro por ciento"),
    ],
)
def test_pairs(language: str, text: str, spoken: str) -> None:
    """The words of each text; those that the lexicon lacks are in its case."""
    assert " ".join(NORMALIZERS[language].words(text)) == spoken


@pytest.mark.parametrize(
    ("language", "text", "others"),
    [
        (
            "en",
            "1803",
            {"ONE THOUSAND EIGHT HUNDRED AND THREE", "ONE THOUSAND EIGHT HUNDRED THREE"},
        ),
        ("en", "100", {"A HUNDRED", "ONE OH OH"}),
        ("en", "Dr.", {"DRIVE"}),
        ("en", "10%", {"TEN PER CENT"}),
        ("en", "XIV", {"THE FOURTEENTH", "FOURTEENTH"}),
        ("en", "½", {"A HALF", "ONE HALF", "AND A HALF"}),
        ("en", "Polish", {"polish"}),
        ("en", "-5", {"FIVE"}),
        ("en", "BBC", {"B B C"}),
        ("en", "747", {"SEVEN FORTY SEVEN", "SEVEN FOUR SEVEN"}),
        ("en", "2500", {"TWENTY FIVE HUNDRED"}),
        ("en", "3.10", {"THREE POINT ONE OH", "THREE POINT TEN", "THREE POINT ONE"}),
        ("en", "$2.50", {"TWO FIFTY", "TWO DOLLARS FIFTY", "TWO DOLLARS FIFTY CENTS"}),
        ("de", "2,50 Euro", {"zwei Euro fünfzig"}),
        ("de", "100", {"hundert"}),
        ("de", "3.", {"dritten", "dritter", "drei"}),
        ("es", "3,14", {"tres punto uno cuatro"}),
    ],
)
def test_what_may_be_said_otherwise(language: str, text: str, others: set[str]) -> None:
    """Other readings follow the first."""
    (readings,) = NORMALIZERS[language](text)
    assert others <= {" ".join(each) for each in readings[1:]}


def test_one_may_be_shorter_before_a_noun() -> None:
    """Spanish's 21 and 1 may be said as before a masculine noun, with an accent or without."""
    normalizer = Normalizer(lexicon_of("uno un veintiuno veintiún años"), "es")
    said = [{" ".join(each) for each in readings} for readings in normalizer("21 años 1")]
    assert said == [{"veintiuno", "veintiún"}, {"años"}, {"uno", "un"}]


def test_an_acronym_may_be_a_word_or_letters() -> None:
    """Where lower case is beside it; "US" is no "us" then."""
    normalizer = Normalizer(lexicon_of("THE US U S"), "en")
    assert normalizer("the US BBC")[1:] == [(("US",), ("U", "S")), (("BBC",),)]
    assert normalizer("the US, us")[1:] == [(("US",), ("U", "S")), (("US",),)]
    assert normalizer("THE US!")[1:] == [(("US",),)]


def test_a_phone_number_may_be_digits() -> None:
    """Though it looks like a range."""
    _, readings = NORMALIZERS["en"]("555-1234")
    assert ("ONE", "TWO", "THREE", "FOUR") in readings


def test_number_may_be_no() -> None:
    """At a sentence's end, where another begins with digits."""
    assert NORMALIZERS["en"]("No. 20")[0] == (("NUMBER",), ("NO",))


def test_a_day_may_be_an_ordinal() -> None:
    """Before a month and behind one."""
    for text in ("may 2, 1803", "2 May"):
        read = [" ".join(each) for readings in NORMALIZERS["en"](text) for each in readings]
        assert {"TWO", "SECOND", "THE SECOND"} <= {*read}


@pytest.mark.parametrize("language", NORMALIZERS)
@given(data=st.data())
def test_words_of_the_lexicon_stay(language: str, data: st.DataObject) -> None:
    """Each as it is, in one reading: normalization twice is normalization once."""
    words = data.draw(st.lists(st.sampled_from(WORDS[language]), max_size=6))
    assert NORMALIZERS[language](" ".join(words)) == [((word,),) for word in words]


SYMBOLS = st.sampled_from("0123456789.,:-'\u2019$£€%&@#°§()[]<>/ \u00a0\u2014ABCabcXIVéßñ٣²½中")


@pytest.mark.parametrize("language", NORMALIZERS)
@given(text=st.text(SYMBOLS | st.characters(exclude_categories=["Cs"]), max_size=12))
def test_all_words_are_the_lexicons_or_letters(language: str, text: str) -> None:
    """Of any text: no digit, symbol or blank is left, and no reading is empty."""
    for readings in NORMALIZERS[language](text):
        assert 1 <= len(readings) <= MAX_READINGS
        assert len(set(readings)) == len(readings)
        for word in chain.from_iterable(readings):
            assert word in WORDS[language] or is_letters(word), (text, word)


@pytest.mark.parametrize("language", NORMALIZERS)
@given(text=st.text("0123456789.,:;-'$%½ ax", max_size=12))
def test_no_number_is_lost(language: str, text: str) -> None:
    """Each group of digits has a word at least, whatever is written around it."""
    groups = re.split(r"\D+", text.replace(",", "").replace(".", ""))
    assert len(NORMALIZERS[language].words(text)) >= sum(map(bool, groups))


def is_letters(word: str) -> bool:
    return bool(word) and all(
        each == "'" or each.isalpha() or unicodedata.category(each)[0] == "M" for each in word
    )


@given(st.integers(0, 10**18))
def test_numbers_are_read_whatever_their_size(number: int) -> None:
    """As words of num2words, or digit by digit."""
    (readings,) = NORMALIZERS["en"](f"{number}")
    assert readings
    assert not any(re.search(r"\d", word) for word in chain.from_iterable(readings))


@pytest.mark.parametrize(
    ("language", "text", "spoken"),
    [
        ("en", "co-founder of MS Word, 20 ms, Gen Z", "co founder of ms word twenty ms gen z"),
        ("en", "Ms Oz vs. Mr Co St Mary", "miss oz versus mister co saint mary"),
        ("en", "a 5 euro note, 5 euros", "a five euro note five euros"),
        ("en", "<00:00:19.039><c> as</c> <v Ann Lee>he <background noise>", "as he"),
        ("en", '<font color="#E5E5E5">a</font> a<b and c>d x<5', "a a b and c d x five"),
        ("en", "a \u2012 b 10\u201220 the XIXth", "a b ten to twenty the nineteenth"),
        ("en", "-3°C", "minus three degrees celsius"),
        (
            "en",
            "-$5 million, $-5m, -£5bn, a $5-million a",
            "minus five million dollars minus five million dollars minus five billion pounds a "
            "five million dollars a",
        ),
        ("en", "5 bn a, 1\u202f000 a", "five billion a one thousand a"),
        ("en", "a .5th, a 5th", "a five th a fifth"),
        ("en", "401(k), 501(c)(3), item(s)", "four oh one k five oh one c three item"),
        ("en", "costs 20 € 5 times, $ 5", "costs twenty euros five times five dollars"),
        ("en", "7:00 p.m. 5M", "seven p m five m"),
        ("fr", "2.50 millions €", "deux virgule cinq zéro millions d' euros"),
        (
            "fr",
            "5 M€, 20 k€, $3 millions",
            "cinq millions d' euros vingt mille euros trois millions de dollars",
        ),
        ("fr", "n°5, 1ère, 1re, 1er", "numéro cinq première première premier"),
        ("fr", "21h30 31", "vingt et une heures trente trente et un"),
        (
            "es",
            "$11.5 millones, $1.5, nº5",
            "once coma cinco millones de dólares uno coma cinco dólares número cinco",
        ),
        ("de", "101 hunderte ins", "ein hundert eins hunderte ins"),
        ("de", "am 24.12. um", "am vierundzwanzigsten zwölften um"),
        ("ja", "1500 円", "千五百 円"),
        ("ko", "1990", "천구백구십"),
        ("bn", "1500", "এক হাজার পাঁচশত"),
        ("bn", "1.05", "এক দশমিক শূন্য পাঁচ"),
        ("ar", "0.05", "صفر صفر خمسة"),
        ("de", "-5 Mio. €, 3 Mio. Menschen", "minus fünf millionen euro drei millionen menschen"),
        ("fr", "-3 millions €", "moins trois millions d' euros"),
        ("de", "HR-Abteilung 2.0", "hr abteilung zwei punkt null"),
        (
            "es",
            "web 2.0 1.º 1.ª 2ª 1,5",
            "web dos punto cero primero primera segunda uno coma cinco",
        ),
        ("sr", "1,50", "jedan zapeta pet nula"),
        ("th", "1.50", "หนึ่ง จุด ห้า ศูนย์"),
        ("tr", "1,05 IŞIK İşçi", "bir sıfır beş ışık işçi"),  # noqa: RUF001 - Turkish
        ("vi", "1,5", "một năm"),
        ("bn", "বলি। আমি,", "বলি আমি"),
        ("te", "మాట్లాడతాను.", "మాట్లాడతాను"),
    ],
)
def test_pairs_of_words_that_no_lexicon_has(language: str, text: str, spoken: str) -> None:
    """But those of the pair, and letters."""
    normalizer = Normalizer(lexicon_of(f"{spoken} a b c d e f g h i j k l m n o p q r s"), language)
    assert " ".join(normalizer.words(text)) == spoken


def test_an_entity_of_many_digits_is_text() -> None:
    """Python reads at most 4,300."""
    assert NORMALIZERS["en"].words(f"A &#{'1' * 5000};")[0] == "A"


@pytest.mark.parametrize("language", CONVERTER_CLASSES)
def test_each_language_reads_all_numbers(language: str) -> None:
    """What num2words lacks of a language is read digit by digit: no text stops a run."""
    normalizer = Normalizer(lexicon_of("a"), language)
    for text in (
        "7",
        "1.5",
        "1,5",
        "1803",
        "3.",
        "2nd",
        "1234567",
        "919876543210",
        "0." + "37" * 9,
    ):
        assert len(normalizer.words(text)) >= 1


def test_a_long_token_takes_no_time() -> None:
    """Punctuation within a word, which would take an hour if an end were tried at each place."""
    assert NORMALIZERS["en"].words(f"a{'.' * 200_000}a") == ["A", "A"]
    began = time.process_time()
    assert NORMALIZERS["en"].words(f"a{40_000 * chr(0x301)}{40_000 * chr(0x316)}a") == ["A", "A"]
    assert time.process_time() - began < 5


def test_a_language_without_numbers_is_named() -> None:
    """The message has the languages that there are."""
    with pytest.raises(ValueError, match=r"language = 'xx': need one of num2words: .*, en, .*, vi"):
        Normalizer(lexicon_of("a"), "xx")


def test_a_fraction_of_the_lexicon_is_a_word() -> None:
    """Where the rules have none: it stays also after a number."""
    found = Normalizer(lexicon_of("twee \u00bd"), "nl").words("2\u00bd")
    assert found == ["twee", "\u00bd"]


@pytest.mark.parametrize(
    ("language", "spoken"),
    [
        ("it", "millecinquecento due virgola cinque zero"),
        ("pl", "tysiąc pięćset dwa przecinek pięć zero"),
        ("sv", "etttusen femhundra två komma fem noll"),
        ("es_GT", "uno coma cinco cero cero dos cincuenta"),
    ],
)
def test_the_decimal_mark_is_the_languages(language: str, spoken: str) -> None:
    """It is a comma in most, and a point in others."""
    assert " ".join(Normalizer(lexicon_of("a"), language).words("1.500 2,50")) == spoken


def test_a_language_without_rules_has_numbers() -> None:
    """Dutch, of which there is no rule here; a number that is one word may be the lexicon's two."""
    lexicon = lexicon_of("drie honderd vijf")
    expected: list[tuple[Reading, ...]] = [(("drie", "honderd", "vijf"),)]
    assert [readings[:1] for readings in Normalizer(lexicon, "nl")("305")] == expected
