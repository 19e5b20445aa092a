"""Speak, place and write the utterances of one speaker, each in its own process."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from jobs.synthesis.noise import babble, pink_noise, tonal_noise
from jobs.synthesis.rooms import draw_rooms
from jobs.synthesis.sentences import draw_sentence
from jobs.synthesis.speakers import Speaker
from jobs.synthesis.speech import PhoneSegment, SpeechSynthesizer
from pipeline.audio.placements import PLACEMENTS, Acoustics, record
from pipeline.filterbank import SAMPLE_RATE_HZ


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
    # Babble comes first: the generator's first draw is the talkers, as plan.py repeats it.
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
