"""Make one utterance's row of features from its fetched audio, or its ledger row."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from jaxtyping import Float32

from infra.configuration import LATER
from infra.ranges import Range, Seed, check_ranges
from infra.store.object_store import (
    ObjectDenied,
    ObjectNotFound,
    ObjectStore,
    ObjectTooLarge,
    PrefixError,
    SizeBound,
    StoreError,
)
from infra.store.uris import resolve_audio
from pipeline.audio.conversion import NO_CONVERSION, AudioConversion
from pipeline.audio.decode import MAX_DURATION_S, decode_utterance, max_file_bytes
from pipeline.audio.errors import AudioError
from pipeline.audio_parts import AudioPart
from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.filterbank.log_mel import Engine, log_mel_energies
from pipeline.normalization import CausalMean, MeanNormalization
from pipeline.records import Quarantined, Utterance
from pipeline.runs.names import ACCESS_DENIED, MISSING_OBJECT, OUTSIDE_PREFIXES
from pipeline.shards import FeatureRow, Storage, as_stored
from pipeline.splicing import STACK
from pipeline.steps.audio_objects import AudioObjects
from pipeline.steps.increments.stream_means import NO_STREAMS, Streams
from pipeline.steps.part_requests import FoundAudio, WantedAudio

MIN_FRAMES = 2 * STACK - 1
"""The fewest 10 ms frames that leave one spliced frame at each of the three offsets."""

PCM_BYTES_PER_SAMPLE = 2

REFUSALS = {
    ObjectNotFound: MISSING_OBJECT,
    ObjectDenied: ACCESS_DENIED,
    PrefixError: OUTSIDE_PREFIXES,
    ObjectTooLarge: "too_large",
}


@dataclass(frozen=True, slots=True)
class ExtractionConfig:
    """GETs in flight per task, the seed of both levels of the shuffle, engine, storage and mean.

    At most so many GETs: fewer while long utterances are in flight, within 256 MB in all. By
    default audio of another rate than 16 kHz, or of several channels, is quarantined. With the
    mean "none" nothing is subtracted: for an ablation, or where gains never differ.
    """

    gets_in_flight: Annotated[int, Range(1, 64)]
    seed: Seed
    engine: Engine = "fast"
    storage: Storage = "float16"
    conversion: AudioConversion = field(default=NO_CONVERSION, metadata=LATER)
    mean: MeanNormalization = field(default="causal", metadata=LATER)

    __post_init__ = check_ranges


def audio_objects(
    store: ObjectStore,
    corpus_uri: str,
    utterances: Sequence[Utterance],
    gets_in_flight: int,
    conversion: AudioConversion = NO_CONVERSION,
) -> AudioObjects:
    """Return the audio objects of a task's utterances, to be read within bounded memory."""
    wanted = [
        wanted_audio(corpus_uri, each.audio_uri, each.part, each.duration_s, conversion)
        for each in utterances
    ]
    return AudioObjects(store, wanted, gets_in_flight)


def wanted_audio(
    corpus_uri: str,
    audio_uri: str,
    part: AudioPart | None,
    declared_s: float,
    conversion: AudioConversion = NO_CONVERSION,
) -> WantedAudio:
    """Say which bytes an utterance's audio is, and how many there may be."""
    uri = resolve_audio(corpus_uri, audio_uri)
    return WantedAudio(uri, size_bound(declared_s, conversion), part, conversion)


def extract_rows(
    utterances: Sequence[Utterance],
    audio: Iterable[FoundAudio],
    config: ExtractionConfig,
    streams: Streams | None = None,
) -> Iterator[FeatureRow | Quarantined]:
    """Yield the features of each utterance, or its ledger row, in order.

    A speaker's utterances follow each other in `stream_order`: by time, then utterance id. They
    are one stream for the causal mean, or one for each name in `stream`. The next speaker begins
    others, where `streams` were left before, and `streams` keep where they end.
    """
    streams = streams or Streams(NO_STREAMS)
    speaker, means = "", dict[str | None, CausalMean]()
    for utterance, found in zip(utterances, audio, strict=True):
        if utterance.speaker_id != speaker:
            speaker, means = utterance.speaker_id, {}
        if utterance.stream not in means:
            means[utterance.stream] = streams.begin(utterance)
        mean = means[utterance.stream]
        row = extract_utterance(utterance, found, mean, config)
        if isinstance(row, FeatureRow):
            streams.advance(utterance, mean)
        yield row


def size_bound(declared_s: float, conversion: AudioConversion = NO_CONVERSION) -> SizeBound:
    """Expect the bytes of 16-bit PCM, an hour of which is 115 MB; refuse what no container needs.

    Audio beyond the longest that can be decoded is refused whatever its metadata declare.
    """
    longest_s = min(declared_s, float(MAX_DURATION_S))
    pcm_bytes_per_s = PCM_BYTES_PER_SAMPLE * conversion.max_samples_per_s
    return SizeBound(round(longest_s * pcm_bytes_per_s), max_file_bytes(longest_s, conversion))


def extract_utterance(
    utterance: Utterance,
    found: FoundAudio,
    mean: CausalMean,
    config: ExtractionConfig,
) -> FeatureRow | Quarantined:
    """Decode, filter and subtract the causal mean; what fails does not touch the mean."""
    if isinstance(found, StoreError):
        reason = REFUSALS.get(type(found))
        if reason is None:
            raise found
        return quarantine(utterance, reason, str(found), 0)
    if isinstance(found, AudioError):
        return quarantine(utterance, found.reason, found.detail, 0)
    try:
        energies, audio_form = _energies(utterance, found.data, config.engine, config.conversion)
    except AudioError as error:
        return quarantine(utterance, error.reason, error.detail, len(found.data))
    is_causal = config.mean == "causal"
    features = mean.subtract(energies, np.float16) if is_causal else energies.astype(np.float16)
    return FeatureRow(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_ms=utterance.duration_ms,
        created_at=utterance.created_at,
        audio_uri=utterance.audio_uri,
        audio_etag=found.etag,
        text=utterance.text,
        placement=utterance.placement,
        features=as_stored(features, config.storage),
        storage=config.storage,
        audio_form=audio_form,
        audio_part=utterance.part,
    )


def _energies(
    utterance: Utterance, data: bytes, engine: Engine, conversion: AudioConversion
) -> tuple[Float32[np.ndarray, "frames 64"], str | None]:
    about = utterance.utterance_id, utterance.duration_s, engine, conversion
    decoded = decode_utterance(data, *about)
    energies = log_mel_energies(decoded.samples, engine)
    if len(energies) < MIN_FRAMES:
        detail = f"{len(energies)} frames of {FRAME_SHIFT_MS} ms: need at least {MIN_FRAMES}"
        raise AudioError("too_short", detail)
    return energies, decoded.audio_form


def quarantine(utterance: Utterance, reason: str, detail: str, num_bytes: int) -> Quarantined:
    """Make the ledger row of an utterance whose audio cannot be used."""
    return Quarantined(
        utterance.utterance_id,
        utterance.audio_uri,
        reason,
        detail[:300],
        num_bytes,
        utterance.duration_ms,
    )
