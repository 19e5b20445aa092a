"""Draw speakers, each a voice variant, an accent, a pitch and a rate."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.synthesis.demo_extra import import_espeakng_loader
from pipeline.runs.names import HELDOUT, LABELLED, UNLABELLED

LABELLED_ACCENTS = ("en-us", "en")
UNLABELLED_ACCENTS = (
    "en-us",
    "en-us-nyc",
    "en",
    "en-gb-x-rp",
    "en-gb-x-gbcwmd",
    "en-gb-scotland",
)
HELDOUT_ACCENTS = ("en-gb-x-gbclan",)
# A 12-minute BLSTM errs on 52 % of DP1 frames so, on 59 % with 4 variants of one accent (one seed).
NUM_LABELLED_VARIANTS = 12
NUM_HELDOUT_VARIANTS = 14
# Robots, whispers and singers, which do not sound like people.
_ODD_VARIANT = re.compile(
    "robo|whisper|croak|Demonic|Uni|Storm|fast|Mr|klatt6|Anxious|Tweaky|Robot|zac"
)
_LOCALES = {"en": "en-GB", "en-us": "en-US", "en-us-nyc": "en-US-nyc"}


@dataclass(frozen=True, slots=True)
class Speaker:
    """Speaker is one synthetic speaker; pitch and its range are espeak-ng's 0..100."""

    speaker_id: str
    accent: str
    variant: str
    pitch: int
    pitch_range: int
    rate_wpm: int

    @property
    def voice(self) -> str:
        """Return espeak-ng's name of accent and variant."""
        return f"{self.accent}+{self.variant}"

    @property
    def locale(self) -> str:
        """Return the accent as a language tag, such as en-GB-scotland."""
        return _LOCALES.get(self.accent, self.accent.replace("en-gb", "en-GB"))


@dataclass(frozen=True, slots=True)
class VariantSplit:
    """VariantSplit holds the voice variants of each subset; training has no held-out one."""

    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...]
    heldout: tuple[str, ...]


def split_variants(seed: int) -> VariantSplit:
    """Divide espeak-ng's usable variants; the few labelled ones are among the unlabelled."""
    directory = Path(import_espeakng_loader().get_data_path()) / "voices" / "!v"
    names = sorted(path.name for path in directory.iterdir())
    usable = [name for name in names if not _ODD_VARIANT.search(name)]
    order = np.random.default_rng((seed, 0)).permutation(len(usable))
    shuffled = tuple(usable[index] for index in order)
    training = shuffled[NUM_HELDOUT_VARIANTS:]
    return VariantSplit(training[:NUM_LABELLED_VARIANTS], training, shuffled[:NUM_HELDOUT_VARIANTS])


def draw_speakers(
    seed: int, num_labelled: int, num_unlabelled: int, num_heldout: int
) -> dict[str, tuple[Speaker, ...]]:
    """Draw the speakers of each subset; held-out variants and accents occur in no other."""
    split, generator = split_variants(seed), np.random.default_rng((seed, 1))
    plans = {
        LABELLED: (num_labelled, LABELLED_ACCENTS, split.labelled),
        UNLABELLED: (num_unlabelled, UNLABELLED_ACCENTS, split.unlabelled),
        HELDOUT: (num_heldout, HELDOUT_ACCENTS, split.heldout),
    }
    speakers: dict[str, tuple[Speaker, ...]] = {}
    first = 0
    for subset, (num, accents, variants) in plans.items():
        speakers[subset] = tuple(
            _draw_speaker(first + index, accents, variants, index, generator)
            for index in range(num)
        )
        first += num
    return speakers


def _draw_speaker(
    number: int,
    accents: tuple[str, ...],
    variants: tuple[str, ...],
    index: int,
    generator: np.random.Generator,
) -> Speaker:
    return Speaker(
        speaker_id=f"s{number:04d}",
        accent=accents[index % len(accents)],
        variant=variants[index % len(variants)],
        pitch=int(generator.integers(25, 76)),
        pitch_range=int(generator.integers(30, 71)),
        rate_wpm=int(generator.integers(140, 201)),
    )
