"""Time the steps of the data pipeline on one core, in a small run on synthetic speech."""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import soundfile
from jaxtyping import Float32

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Utterance
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import SELECTION_FOLDER, TEACHER, UNLABELLED, model_step
from pipeline.runs.step import write_manifest
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from pipeline.steps.targets import Teacher, generate_targets
from training.settings.recipe import Recipe

T = TypeVar("T")
R = TypeVar("R")

NUM_CLIPS = 16
MAX_UTTERANCES = 256
MAX_CLIP_SECONDS = 60
AUDIO_SECONDS = 900
FILE_HOURS = 0.125
NUM_RECORDS = 5_000
"""Metadata records for selection, which reads no audio."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """StepSeconds holds the processor seconds of each step, and the audio that they processed."""

    audio_seconds: float
    select_records: float
    extract: float
    targets: float
    repartition: float


def run_miniature(folder: str, recipe: Recipe, utterance_seconds: float) -> StepSeconds:
    """Run the steps below `folder`, with a teacher that costs no time."""
    store, run_uri, corpus_uri = ObjectStore((folder,)), join_uri(folder, "run"), folder
    records = write_corpus(store, corpus_uri, utterance_seconds)
    small = SelectionConfig(hours=0.0, file_hours=FILE_HOURS, seed=1)
    select(store, run_uri, corpus_uri, records, small)
    unread = [record(number, "audio/none.flac", 3.6) for number in range(NUM_RECORDS)]
    elsewhere = join_uri(folder, SELECTION_FOLDER)
    teacher_manifest = Manifest(model_step(TEACHER), {}, {}, ())
    write_manifest(step_context(store, run_uri, model_step(TEACHER), {}, {}), teacher_manifest)
    # The teacher's time is a device's, measured apart, so here it costs nothing.
    teacher = free_teacher(recipe.targets.k, recipe.targets.tail_samples)
    features, partitions = recipe.features, recipe.partitions
    return StepSeconds(
        audio_seconds=sum(each.duration_s for each in records),
        select_records=select(store, elsewhere, elsewhere, unread, small),
        extract=seconds(
            lambda: extract_features(
                store, run_uri, UNLABELLED, corpus_uri, features, 0.0, serially
            )
        ),
        targets=seconds(
            # A recipe's offsets are planned as a multiple of the work at one.
            lambda: generate_targets(
                store, run_uri, replace(recipe.targets, offsets="one"), teacher, serially
            )
        ),
        repartition=seconds(lambda: repartition(store, run_uri, partitions, serially)),
    )


def seconds(function: Callable[[], object]) -> float:
    """Return the processor seconds of one call, in all threads."""
    # Elapsed time would count whatever else the machine does.
    before = time.process_time()
    function()
    return time.process_time() - before


def write_corpus(store: ObjectStore, corpus_uri: str, utterance_seconds: float) -> list[Utterance]:
    """Write a few clips, and as many records naming them as make AUDIO_SECONDS together."""
    clip_seconds = min(utterance_seconds, MAX_CLIP_SECONDS)
    clips = [speech_like(number, clip_seconds) for number in range(NUM_CLIPS)]
    uris = [f"audio/{number}.flac" for number in range(NUM_CLIPS)]
    for uri, clip in zip(uris, clips, strict=True):
        store.put(join_uri(corpus_uri, uri), flac(clip))
    number = min(max(round(AUDIO_SECONDS / clip_seconds), NUM_CLIPS), MAX_UTTERANCES)
    duration_s = len(clips[0]) / SAMPLE_RATE_HZ
    return [record(each, uris[each % NUM_CLIPS], duration_s) for each in range(number)]


def select(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    records: Sequence[Utterance],
    config: SelectionConfig,
) -> float:
    """Write the metadata of all `records`, then time their selection in processor seconds."""
    metadata = metadata_uri(corpus_uri, UNLABELLED)
    lines = "".join(each.to_json() + "\n" for each in records).encode()
    store.put(join_uri(metadata, "speaker_bucket=00", "records.jsonl"), lines)
    return seconds(
        lambda: select_utterances(store, run_uri, UNLABELLED, metadata, config, 0.0, serially)
    )


def record(number: int, audio_uri: str, duration_s: float) -> Utterance:
    """Make a metadata record; sixteen share a speaker."""
    return Utterance(
        utterance_id=f"utterance-{number:09d}",
        speaker_id=f"speaker-{number // 16:06d}",
        duration_s=duration_s,
        created_at=f"2026-01-01T00:{number % 16:02d}:00+00:00",
        locale="en-US",
        audio_uri=audio_uri,
    )


def free_teacher(k: int, tail_samples: int = 0) -> Teacher:
    """Return a teacher that repeats the k best of one frame, which takes no time."""
    best = select_kbest(np.linspace(5, 0, 255, dtype=np.float32)[np.newaxis], k, tail_samples)

    def repeated(num_frames: int) -> KBest:
        return best.rows(np.zeros(num_frames, np.int64))

    return lambda inputs: (repeated(len(each.frames)) for each in inputs)


def speech_like(number: int, duration_s: float) -> Float32[np.ndarray, " samples"]:
    """Synthesize harmonics and noise that compress, and cost, about as speech does."""
    generator = np.random.default_rng(number)
    times_s = np.arange(round(max(duration_s, 0.1) * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    pitch_hz = generator.uniform(90, 220)
    harmonics = (np.sin(2 * np.pi * pitch_hz * order * times_s) / order for order in range(1, 20))
    syllables = 0.5 + 0.5 * np.sin(2 * np.pi * 4 * times_s + number)
    noise = 0.02 * generator.normal(size=len(times_s))
    return (0.08 * syllables * sum(harmonics) + noise * syllables + noise / 10).astype(np.float32)


def flac(samples: Float32[np.ndarray, " samples"]) -> bytes:
    """Encode `samples` as a 16-bit FLAC file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def serially(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[R]:
    """Run the tasks of a step one after the other."""
    del description
    return [function(element) for element in elements]
