"""Synthesize the demo's corpus as a Kaldi data directory that appears only when complete.

A speaker is a voice variant, an accent, a pitch and a rate. A task speaks, places and writes one
speaker's utterances in a process of its own; other tasks draw rooms and noise. The tables are those
that pipeline.steps.ingestion.kaldi_directory reads.
"""

import json
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import soundfile

from infra.log_lines import progress_bar
from infra.settings import Range, Seed, check_ranges
from jobs.synthesis.acoustics import babble, draw_rooms, draw_talkers, pink_noise, tonal_noise
from jobs.synthesis.sentences import Lexicon, draw_sentence, make_lexicon
from jobs.synthesis.speech import (
    PhoneSegment,
    SpeechSynthesizer,
    import_espeakng_loader,
    import_pyroomacoustics,
)
from pipeline.audio.placements import PLACEMENTS, Acoustics, record
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.runs.names import DEV, HELDOUT, LABELLED, SUBSETS, UNLABELLED

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


LABELLED_ACCENTS = ("en-us", "en")
UNLABELLED_ACCENTS = ("en-us", "en-us-nyc", "en", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-gb-scotland")
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


def split_variants(seed: int) -> dict[str, tuple[str, ...]]:
    """Divide espeak-ng's usable voice variants among the subsets.

    Training has no held-out variant; the few labelled ones are among the unlabelled.
    """
    directory = Path(import_espeakng_loader().get_data_path()) / "voices" / "!v"
    names = sorted(path.name for path in directory.iterdir())
    usable = [name for name in names if not _ODD_VARIANT.search(name)]
    order = np.random.default_rng((seed, 0)).permutation(len(usable))
    shuffled = tuple(usable[index] for index in order)
    training = shuffled[NUM_HELDOUT_VARIANTS:]
    return {
        LABELLED: training[:NUM_LABELLED_VARIANTS],
        UNLABELLED: training,
        HELDOUT: shuffled[:NUM_HELDOUT_VARIANTS],
    }


def draw_speakers(config: SynthesisConfig) -> dict[str, tuple[Speaker, ...]]:
    """Draw the speakers of each subset; held-out variants and accents occur in no other."""
    variants_of = split_variants(config.seed)
    generator = np.random.default_rng((config.seed, 1))
    plans = {
        LABELLED: (config.num_labelled_speakers, LABELLED_ACCENTS),
        UNLABELLED: (config.num_unlabelled_speakers, UNLABELLED_ACCENTS),
        HELDOUT: (config.num_heldout_speakers, HELDOUT_ACCENTS),
    }
    speakers: dict[str, tuple[Speaker, ...]] = {}
    first = 0
    for subset, (num, accents) in plans.items():
        variants = variants_of[subset]
        speakers[subset] = tuple(
            Speaker(
                speaker_id=f"s{first + index:04d}",
                accent=accents[index % len(accents)],
                variant=variants[index % len(variants)],
                pitch=int(generator.integers(25, 76)),
                pitch_range=int(generator.integers(30, 71)),
                rate_wpm=int(generator.integers(140, 201)),
            )
            for index in range(num)
        )
        first += num
    return speakers


_NOISE_S = 120.0
_ACOUSTICS_KEY, _SPEECH_KEY = 3, 4
_ACOUSTICS_FILES = {UNLABELLED: "training.npz", HELDOUT: "heldout.npz", DEV: "development.npz"}


@dataclass(frozen=True)
class AcousticsTask:
    """AcousticsTask describes a file of rooms and noise."""

    path: Path
    babble_voices: tuple[str, ...]
    noise_s: float
    key: tuple[int, ...]


def acoustics_tasks(seed: int, scratch: Path) -> dict[str, AcousticsTask]:
    """Make a task of rooms and noise for training, for held-out and for development speakers.

    Babble is of the training's voices, of held-out ones, and of those that babble to neither.
    """
    variants_of = split_variants(seed)
    training, heldout = (
        tuple(f"en-us+{variant}" for variant in variants_of[subset])
        for subset in (UNLABELLED, HELDOUT)
    )
    key = (seed, _ACOUSTICS_KEY, 0)
    # Held-out variants are in no training voice.
    heard = draw_talkers(training, np.random.default_rng(key))
    voices = {
        UNLABELLED: training,
        HELDOUT: heldout,
        DEV: tuple(voice for voice in training if voice not in heard),
    }
    return {
        subset: AcousticsTask(scratch / file, voices[subset], _NOISE_S, (*key[:2], index))
        for index, (subset, file) in enumerate(_ACOUSTICS_FILES.items())
    }


def render_acoustics(task: AcousticsTask) -> None:
    """Draw rooms and noise, and save them."""
    # Babble comes first: acoustics_tasks repeats the first draw, the talkers.
    generator = np.random.default_rng(task.key)
    noises = (
        babble(task.babble_voices, task.noise_s, generator),
        pink_noise(task.noise_s, generator),
        tonal_noise(task.noise_s, generator),
    )
    draw_rooms(noises, generator).save(task.path)


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


def speaker_tasks(config: SynthesisConfig, directory: Path, scratch: Path) -> list[SpeakerTask]:
    """Make one task a speaker, in the order of the subsets."""
    hours_each = {
        LABELLED: config.labelled_hours / config.num_labelled_speakers,
        UNLABELLED: config.unlabelled_hours / config.num_unlabelled_speakers,
        HELDOUT: 0.0,
    }
    # Held-out speakers speak as often at each placement, so that placements compare.
    rounds, more = divmod(config.heldout_utterances_per_placement, config.num_heldout_speakers)
    tasks = []
    for subset, speakers in draw_speakers(config).items():
        held_out = subset == HELDOUT
        for index, speaker in enumerate(speakers):
            task = SpeakerTask(
                speaker,
                scratch / _ACOUSTICS_FILES[HELDOUT if held_out else UNLABELLED],
                directory,
                first_placement=0 if held_out else index % len(PLACEMENTS),
                key=(config.seed, _SPEECH_KEY, SUBSETS.index(subset), index),
                budget_s=3600 * hours_each[subset],
                num_utterances=len(PLACEMENTS) * (rounds + (index < more)) if held_out else 0,
            )
            tasks.append(task)
    return tasks


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


_RECORD = "synthesis.json"
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SynthesisSummary:
    """SynthesisSummary holds utterances and hours by subset, and the size of the lexicon."""

    utterances: dict[str, int]
    hours: dict[str, float]
    lexicon_words: int
    lexicon_pronunciations: int


def synthesize(
    config: SynthesisConfig, directory: Path, num_processes: int = 2
) -> SynthesisSummary:
    """Make the corpus at `directory`, unless it is complete there; summarize it.

    The bytes depend on `config` alone, not on `num_processes`. Raises ValueError if `directory`
    holds another corpus, or other files.
    """
    import_espeakng_loader()
    import_pyroomacoustics()
    directory = directory.absolute()
    if directory.exists() and any(directory.iterdir()):
        remedy = "remove it or choose another directory"
        if not (directory / _RECORD).exists():
            raise ValueError(f"{directory}: holds files that are no synthetic corpus: {remedy}")
        record = json.loads((directory / _RECORD).read_text())
        if record["config"] != asdict(config):
            raise ValueError(f"{directory}: holds a corpus of {record['config']}: {remedy}")
        return SynthesisSummary(**record["summary"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "corpus"
        made.mkdir()
        summary = _make(config, made, Path(scratch), num_processes)
        record = {"config": asdict(config), "summary": asdict(summary)}
        (made / _RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        made.replace(directory)
    return summary


def draw_acoustics(seed: int, subsets: Collection[str]) -> dict[str, Acoustics]:
    """Draw the rooms and noises of subsets, those of training for both that train, in 20 s."""
    drawn_for = {subset: UNLABELLED if subset == LABELLED else subset for subset in subsets}
    with tempfile.TemporaryDirectory() as scratch, _fresh_processes(2) as pool:
        every = acoustics_tasks(seed, Path(scratch))
        tasks = {subset: every[subset] for subset in dict.fromkeys(drawn_for.values())}
        _run(pool, render_acoustics, list(tasks.values()), "rooms and noise")
        drawn = {subset: Acoustics.load(task.path) for subset, task in tasks.items()}
    return {subset: drawn[each] for subset, each in drawn_for.items()}


def _make(
    config: SynthesisConfig, made: Path, scratch: Path, num_processes: int
) -> SynthesisSummary:
    tasks = speaker_tasks(config, made, scratch)
    with _fresh_processes(num_processes) as pool:
        making_lexicon = pool.apply_async(make_lexicon, (UNLABELLED_ACCENTS, config.seed))
        acoustics = acoustics_tasks(config.seed, scratch)
        used = [acoustics[UNLABELLED], acoustics[HELDOUT]]
        _run(pool, render_acoustics, used, "rooms and noise")
        spoken = iter(_run(pool, render_speaker, tasks, "speakers"))
        lexicon = making_lexicon.get()
    subsets = {
        subset: [(speaker, next(spoken)) for speaker in speakers]
        for subset, speakers in draw_speakers(config).items()
    }
    write_tables(made, subsets, lexicon)
    durations_s = {
        subset: [utterance.duration_s for _, some in pairs for utterance in some]
        for subset, pairs in subsets.items()
    }
    return SynthesisSummary(
        utterances={subset: len(some) for subset, some in durations_s.items()},
        hours={subset: round(sum(some) / 3600, 4) for subset, some in durations_s.items()},
        lexicon_words=len(lexicon),
        lexicon_pronunciations=sum(map(len, lexicon.values())),
    )


@contextmanager
def _fresh_processes(num_processes: int) -> Iterator[Pool]:
    """Yield processes that run one task each: espeak-ng's state outlives its re-initialization.

    They fork from a server that has imported the code, at 6 ms a task.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs.synthesis.corpus"])
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        yield pool


def _run(
    pool: Pool, function: Callable[[Task], Result], tasks: Sequence[Task], description: str
) -> list[Result]:
    results = pool.imap(function, tasks)
    return list(progress_bar(results, description=description, total=len(tasks)))


_FIRST_DAY = datetime(2020, 1, 1, tzinfo=UTC)
_PERIOD = timedelta(days=4)


def write_tables(
    directory: Path,
    subsets: dict[str, list[tuple[Speaker, list[SpokenUtterance]]]],
    lexicon: Lexicon,
) -> None:
    """Write all tables of the data directory; text never holds the unlabelled utterances.

    A speaker's utterances are spread evenly over the period, in the order spoken. phones.ctm has
    Kaldi's time-marked phones: utterance, channel, start and duration (s), phone.
    """
    everyone = [pair for pairs in subsets.values() for pair in pairs]
    utterances = [utterance for _, some in everyone for utterance in some]
    silent = {speaker.speaker_id for speaker, _ in subsets[UNLABELLED]}
    times = {
        each.utterance_id: _FIRST_DAY + index * (_PERIOD / len(some))
        for _, some in everyone
        for index, each in enumerate(some)
    }
    tables = {
        "wav.scp": [f"{each.utterance_id} {each.path}" for each in utterances],
        "text": [
            f"{each.utterance_id} {each.text}"
            for each in utterances
            if each.speaker_id not in silent
        ],
        "utt2spk": [f"{each.utterance_id} {each.speaker_id}" for each in utterances],
        "utt2placement": [f"{each.utterance_id} {each.placement}" for each in utterances],
        "utt2time": [
            f"{key} {time.isoformat(timespec='milliseconds')}" for key, time in times.items()
        ],
        "spk2locale": [f"{speaker.speaker_id} {speaker.locale}" for speaker, _ in everyone],
        "phones.ctm": [
            f"{each.utterance_id} 1 {phone.start_s:.4f} {phone.end_s - phone.start_s:.4f} "
            f"{phone.phone}"
            for each in utterances
            for phone in each.phones
        ],
        "lexicon.txt": [
            f"{word} {' '.join(phones)}" for word, some in lexicon.items() for phones in some
        ],
        **{
            f"{subset}.speakers": [speaker.speaker_id for speaker, _ in pairs]
            for subset, pairs in subsets.items()
        },
    }
    for name, lines in tables.items():
        (directory / name).write_text("".join(f"{line}\n" for line in lines))
