"""Draw the speakers of the corpus, and divide it into tasks of which each renders one speaker.

A speaker is a voice variant, an accent, a pitch and a rate. A task speaks, places and writes the
speaker's utterances in a process of its own; other tasks draw rooms and noise.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import soundfile

from infra.settings import Range, Seed, check_ranges
from jobs.synthesis.acoustics import babble, draw_rooms, draw_talkers, pink_noise, tonal_noise
from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speech import PhoneSegment, SpeechSynthesizer, import_espeakng_loader
from pipeline.audio.placements import PLACEMENTS, Acoustics, record
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.runs.names import HELDOUT, LABELLED, SUBSETS, UNLABELLED

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


@dataclass(frozen=True)
class AcousticsTask:
    """AcousticsTask describes the file of rooms and noise of training, or of other speakers."""

    path: Path
    babble_voices: tuple[str, ...]
    noise_s: float
    key: tuple[int, ...]


@dataclass(frozen=True)
class SpeakerTask:
    """SpeakerTask describes one speaker's utterances: up to `budget_s`, or `num_utterances`."""

    speaker: Speaker
    acoustics_path: Path
    directory: Path
    first_placement: int
    key: tuple[int, ...]
    budget_s: float = 0.0
    num_utterances: int = 0


@dataclass(frozen=True, slots=True)
class SpokenUtterance:
    """SpokenUtterance holds the true words, phone times, placement and length of an utterance."""

    utterance_id: str
    speaker_id: str
    text: str
    placement: str
    duration_s: float
    phones: tuple[PhoneSegment, ...]

    @property
    def path(self) -> str:
        """Return the path of its audio file, relative to the data directory."""
        return f"audio/{self.speaker_id}/{self.utterance_id}.flac"


def render_acoustics(task: AcousticsTask) -> None:
    """Draw rooms and noise, and save them."""
    # Babble comes first: development_acoustics_task repeats the first draw, the talkers.
    generator = np.random.default_rng(task.key)
    noises = (
        babble(task.babble_voices, task.noise_s, generator),
        pink_noise(task.noise_s, generator),
        tonal_noise(task.noise_s, generator),
    )
    draw_rooms(noises, generator).save(task.path)


def render_speaker(task: SpeakerTask) -> list[SpokenUtterance]:
    """Speak and write all utterances of one speaker; placements come in turn."""
    generator = np.random.default_rng(task.key)
    acoustics = Acoustics.load(task.acoustics_path)
    synthesizer = SpeechSynthesizer()
    speaker = task.speaker
    synthesizer.select_voice(speaker.voice, speaker.pitch, speaker.rate_wpm, speaker.pitch_range)
    (task.directory / "audio" / speaker.speaker_id).mkdir(parents=True, exist_ok=True)
    utterances: list[SpokenUtterance] = []
    spoken_s = 0.0
    while len(utterances) < task.num_utterances or spoken_s < task.budget_s:
        number = len(utterances)
        placement = PLACEMENTS[(task.first_placement + number) % len(PLACEMENTS)]
        text = draw_sentence(generator)
        before_s, after_s = generator.uniform(0.1, 0.4, 2)
        speech = synthesizer.speak(text).padded(before_s, after_s)
        heard = record(speech.samples, placement, acoustics, generator)
        utterance = SpokenUtterance(
            f"{speaker.speaker_id}-{number:05d}",
            speaker.speaker_id,
            text,
            placement.name,
            len(heard) / SAMPLE_RATE_HZ,
            speech.phones,
        )
        soundfile.write(task.directory / utterance.path, heard, SAMPLE_RATE_HZ, subtype="PCM_16")
        utterances.append(utterance)
        spoken_s += utterance.duration_s
    return utterances


_NOISE_S = 120.0
_ACOUSTICS_KEY, _SPEECH_KEY = 3, 4

Hours = Annotated[float, Range(1e-6, 1000)]
NumSpeakers = Annotated[int, Range(1, 1_000_000)]


@dataclass(frozen=True)
class SynthesisConfig:
    """SynthesisConfig sets hours and speakers of the corpus; its values decide every byte."""

    labelled_hours: Hours = 0.3
    unlabelled_hours: Hours = 4.0
    num_labelled_speakers: NumSpeakers = 12
    num_unlabelled_speakers: NumSpeakers = 120
    num_heldout_speakers: NumSpeakers = 12
    heldout_utterances_per_placement: Annotated[int, Range(1, 1_000_000)] = 120
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        given, least = self.heldout_utterances_per_placement, self.num_heldout_speakers
        if given < least:
            bound = f"need at least {least}, one for each held-out speaker"
            raise ValueError(f"heldout_utterances_per_placement = {given}: {bound}")

    def speakers(self) -> dict[str, tuple[Speaker, ...]]:
        """Draw the speakers of each subset."""
        numbers = (
            self.num_labelled_speakers,
            self.num_unlabelled_speakers,
            self.num_heldout_speakers,
        )
        return draw_speakers(self.seed, *numbers)


def acoustics_tasks(seed: int, scratch: Path) -> list[AcousticsTask]:
    """Make a task of rooms and noise for training, and another for the held-out speakers."""
    split = split_variants(seed)
    return [
        AcousticsTask(
            _acoustics_path(scratch, held_out=bool(index)),
            tuple(f"en-us+{variant}" for variant in variants),
            _NOISE_S,
            (seed, _ACOUSTICS_KEY, index),
        )
        for index, variants in enumerate((split.unlabelled, split.heldout))
    ]


def development_acoustics_task(seed: int, scratch: Path) -> AcousticsTask:
    """Make a task of other rooms and noise, and of voices that babble to no other speakers."""
    training, heldout = acoustics_tasks(seed, scratch)
    heard = draw_talkers(training.babble_voices, np.random.default_rng(training.key))
    # Held-out variants are in no training voice, so both subsets' talkers remain apart.
    voices = tuple(voice for voice in training.babble_voices if voice not in heard)
    index = len((training, heldout))
    return AcousticsTask(
        scratch / "development.npz", voices, _NOISE_S, (seed, _ACOUSTICS_KEY, index)
    )


def speaker_tasks(config: SynthesisConfig, directory: Path, scratch: Path) -> list[SpeakerTask]:
    """Make one task a speaker, in the order of the subsets."""
    return [
        _speaker_task(config, subset, index, speaker, directory=directory, scratch=scratch)
        for subset, speakers in config.speakers().items()
        for index, speaker in enumerate(speakers)
    ]


def _speaker_task(
    config: SynthesisConfig,
    subset: str,
    index: int,
    speaker: Speaker,
    *,
    directory: Path,
    scratch: Path,
) -> SpeakerTask:
    held_out = subset == HELDOUT
    # Held-out speakers speak as often at each placement, so that placements compare.
    rounds, more = divmod(config.heldout_utterances_per_placement, config.num_heldout_speakers)
    hours_each = {
        LABELLED: config.labelled_hours / config.num_labelled_speakers,
        UNLABELLED: config.unlabelled_hours / config.num_unlabelled_speakers,
        HELDOUT: 0.0,
    }
    return SpeakerTask(
        speaker,
        _acoustics_path(scratch, held_out=held_out),
        directory,
        first_placement=0 if held_out else index % len(PLACEMENTS),
        key=(config.seed, _SPEECH_KEY, SUBSETS.index(subset), index),
        budget_s=3600 * hours_each[subset],
        num_utterances=len(PLACEMENTS) * (rounds + (index < more)) if held_out else 0,
    )


def _acoustics_path(scratch: Path, *, held_out: bool) -> Path:
    return scratch / ("heldout.npz" if held_out else "training.npz")
