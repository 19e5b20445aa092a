"""Audio for teachers that hear it: fetched and decoded again, and cut into low-rate frames.

It is apart from the targets' step, so that tasks without audio import no decoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.filterbank import SHIFT_SAMPLES
from pipeline.filterbank.log_mel import num_frames
from pipeline.kbest import TeacherFailure
from pipeline.settings import NO_CONVERSION, AudioConversion
from pipeline.shards import FeatureRow
from pipeline.splicing import num_low_rate_frames
from pipeline.steps.audio_reads import AudioObjects, FoundAudio, require_audio
from pipeline.steps.features import wanted_audio
from pipeline.steps.targets import SAMPLES_PER_FRAME, FramesAt

GETS_IN_FLIGHT = 4
"""The audio objects that a task fetches ahead: a device labels an utterance in milliseconds."""


@dataclass(frozen=True, slots=True)
class AudioSource:
    """AudioSource: the audio that the features were extracted from, 16 kHz mono once converted.

    At an offset o, low-rate frame t has the 480 samples from 160 o + 480 t on, where the first of
    its three windows begins. Its last window ends 240 samples after them, in the next frame's.
    Audio that is gone, has changed or cannot be decoded is a failure of its utterance.
    """

    store: ObjectStore
    corpus_uri: str
    conversion: AudioConversion = NO_CONVERSION
    engines: ClassVar[tuple[str, ...]] = ("miniaudio", "scipy", "soundfile")

    def frames_of(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        """Fetch and decode the rows' audio, a few objects ahead."""
        wanted = [
            wanted_audio(
                self.corpus_uri,
                row.audio_uri,
                row.audio_part,
                row.duration_ms / 1000,
                self.conversion,
            )
            for row in rows
        ]
        audio = AudioObjects(self.store, wanted, GETS_IN_FLIGHT)
        for row, found in zip(rows, audio.read_decided(), strict=True):
            yield frames_of_audio(row, found, self.conversion)


def frames_of_audio(
    row: FeatureRow, found: FoundAudio, conversion: AudioConversion
) -> FramesAt | TeacherFailure:
    """Decode an utterance's audio, or say why it is not what its features were made of."""
    try:
        audio = require_audio(found)
        if audio.etag != row.audio_etag:
            return TeacherFailure(
                f"audio: {row.audio_uri} has changed since its features were extracted (ETag "
                f"{audio.etag}, not {row.audio_etag}): put it back, or extract the features again"
            )
        samples = decode_audio(audio.data, conversion)
    except AudioError as error:
        return TeacherFailure(f"audio: {error.reason}: {error.detail}")
    count, made = num_frames(len(samples)), len(row.features)
    if count != made:
        return TeacherFailure(f"audio: {count} frames: need {made}, as its features have")
    return partial(audio_frames, samples, count)


def audio_frames(
    samples: Float32[np.ndarray, " samples"], num_frames: int, offset: int
) -> Float32[np.ndarray, "_frames 480"]:
    """Cut audio of so many 10 ms frames into the 30 ms of each low-rate frame: a view."""
    count = num_low_rate_frames(num_frames, offset)
    first = SHIFT_SAMPLES * offset
    return samples[first : first + SAMPLES_PER_FRAME * count].reshape(count, SAMPLES_PER_FRAME)
