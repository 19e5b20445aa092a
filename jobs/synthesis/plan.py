"""Configure the corpus and divide it into tasks: speakers, and rooms with noise."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from infra.settings import Range, Seed, check_ranges
from jobs.synthesis.noise import draw_talkers
from jobs.synthesis.rendering import AcousticsTask, SpeakerTask
from jobs.synthesis.speakers import Speaker, draw_speakers, split_variants
from pipeline.audio.placements import PLACEMENTS
from pipeline.runs.names import HELDOUT, LABELLED, SUBSETS, UNLABELLED

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
