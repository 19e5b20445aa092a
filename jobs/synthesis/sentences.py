"""Draw commands to a device at home from a grammar, and make the lexicon of its words.

An n-gram cannot guess the grammar's slots. The pronunciations are those of espeak-ng, in the
accents of training.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from string import Formatter

import numpy as np

from jobs.synthesis.speech import SpeechSynthesizer

_SLOTS: dict[str, tuple[str, ...]] = {
    "switch": ("on", "off"),
    "room": (
        *("kitchen", "bedroom", "living room", "bathroom", "garage", "hallway", "garden"),
        *("office", "cellar", "nursery", "dining room", "porch"),
    ),
    "device": (
        *("light", "lights", "lamp", "fan", "heater", "radio", "speaker", "camera", "oven"),
        *("kettle", "television", "vacuum", "sprinkler", "printer", "blinds", "curtains"),
    ),
    "food": (
        *("milk", "cheese", "coffee", "butter", "apples", "bread", "onions", "rice", "sugar"),
        *("pepper", "orange juice", "yogurt", "batteries", "soap", "chicken", "olive oil", "fish"),
    ),
    "amount": ("some", "more", "a box of", "two bottles of", "{digit} pounds of", "a bag of"),
    "person": (
        *("anna", "peter", "maria", "robert", "julia", "victor", "susan", "george", "emma"),
        *("oliver", "my mother", "my brother", "my doctor", "the plumber", "grandma", "uncle joe"),
    ),
    "city": (
        *("boston", "london", "chicago", "denver", "tokyo", "madrid", "austin", "berlin", "paris"),
        *("dublin", "cairo", "sydney", "new york", "vienna", "athens", "geneva"),
    ),
    "adjective": (
        *("blue", "silver", "broken", "golden", "quiet", "lonely", "crazy", "hidden", "frozen"),
        *("velvet", "purple", "ancient", "burning", "gentle", "little", "wild"),
    ),
    "noun": (
        *("river", "shadow", "horses", "window", "thunder", "island", "garden", "mirror", "roses"),
        *("highway", "ocean", "mountain", "dreamers", "pirates", "machine", "voices", "summer"),
        "bird",
    ),
    "genre": ("jazz", "rock", "piano", "country", "classical", "dance", "folk", "reggae"),
    "chore": (
        *("water the plants", "feed the cat", "pay the rent", "call {person}", "buy {food}"),
        *("charge the {device}", "clean the {room}", "wash the car", "walk the dog"),
        *("fix the chair", "tidy the toys"),
    ),
    "digit": ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "zero"),
    "hour": ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "noon"),
    "minute": ("", "thirty", "fifteen", "forty five", "twenty", "ten", "fifty"),
    "number": (
        *("ten", "twelve", "fifteen", "sixteen", "twenty", "twenty {digit}", "thirty"),
        *("forty", "fifty", "fifty {digit}", "sixty", "seventy", "eighty", "ninety {digit}"),
    ),
    "day": (
        *("today", "tomorrow", "tonight", "on monday", "on tuesday", "on wednesday"),
        *("on thursday", "on friday", "on saturday", "on sunday", "next week"),
    ),
    "when": ("", "", "now", "please", "{day}", "at {hour} {minute}", "in {number} minutes"),
}
_TEMPLATES = (
    "turn {switch} the {room} {device} {when}",
    "turn the {room} {device} {switch}",
    "set the {room} {device} to {number} {unit}",
    "dim the {room} {device} to {number} percent",
    "is the {room} {device} still {switch}",
    "add {amount} {food} to the {list} list",
    "remove {food} and {food} from my list",
    "order {amount} {food} {day}",
    "call {person} {when}",
    "send a message to {person}",
    "tell {person} that i will {chore} {day}",
    "dial {digit} {digit} {digit} {digit} {digit} {digit}",
    "the code is {digit} {digit} {digit} {digit}",
    "play {adjective} {noun} by the {adjective} {noun}",
    "play {noun} of the {adjective} {noun}",
    "play some {genre} music in the {room}",
    "find the {adjective} {noun} {genre} version",
    "remind me to {chore} {day} at {hour} {minute}",
    "wake me up at {hour} {minute} {day}",
    "set a timer for {number} minutes",
    "what is the weather in {city} {day}",
    "how far is {city} from {city}",
    "book a flight from {city} to {city} {day}",
    "what is {number} times {number}",
    "read {adjective} {noun} to me",
    "how do you spell {adjective}",
)
_SLOTS["unit"] = ("degrees", "percent", "minutes")
_SLOTS["list"] = ("shopping", "party", "weekend")


def draw_sentence(generator: np.random.Generator) -> str:
    """Draw one sentence in lower-case words."""
    return " ".join(_expand(_TEMPLATES[generator.integers(len(_TEMPLATES))], generator).split())


def vocabulary() -> tuple[str, ...]:
    """Return all words that a sentence may contain, sorted."""
    texts = [*_TEMPLATES, *(text for fillers in _SLOTS.values() for text in fillers)]
    return tuple(sorted({word for text in texts for word in re.sub(r"{\w+}", " ", text).split()}))


def _expand(template: str, generator: np.random.Generator) -> str:
    parts = []
    for literal, slot, _, _ in Formatter().parse(template):
        parts.append(literal)
        if slot is not None:
            fillers = _SLOTS[slot]
            parts.append(_expand(fillers[generator.integers(len(fillers))], generator))
    return "".join(parts)


MAX_PRONUNCIATIONS = 3
_NUM_SENTENCES = 1000
# Said this seldom, a pronunciation is a slip at a word boundary (a linking r) rather than a habit.
_MIN_SHARE = 0.02

Lexicon = dict[str, tuple[tuple[str, ...], ...]]


def make_lexicon(accents: Sequence[str], seed: int) -> Lexicon:
    """Collect up to three pronunciations of each word of the grammar, the most frequent first.

    Sentences give words in context ("a" is not "ay"). Sentences in which espeak-ng joins two words
    ("in the") are skipped. `accents` must not contain held-out ones.
    """
    generator = np.random.default_rng((seed, 2))
    texts = [draw_sentence(generator) for _ in range(_NUM_SENTENCES)]
    counts: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    synthesizer = SpeechSynthesizer()
    for accent in accents:
        synthesizer.select_voice(accent)
        for text in (*texts, *vocabulary()):
            words, said = text.split(), synthesizer.pronounce(text)
            if len(words) == len(said):
                for word, phones in zip(words, said, strict=True):
                    counts[word][phones] += 1
    return {word: _most_frequent(counts[word]) for word in vocabulary()}


def _most_frequent(counts: Counter[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    least = _MIN_SHARE * counts.total()
    return tuple(phones for phones, count in ranked[:MAX_PRONUNCIATIONS] if count >= least)
