"""Write a run's selection, features and targets directly, without audio or a teacher.

Frames, and with them the teacher's log Z, have an effect of the file and one of the speaker, so
that utterances of one source file resemble each other, as recordings do.
"""

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.kbest import KBest
from pipeline.records import Tally, Utterance
from pipeline.runs.commit import StepContext, step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest, Output
from pipeline.shards import FeatureRow, write_features, write_targets
from pipeline.shards.targets import TargetRow
from pipeline.shuffling import shuffle, shuffled_order

NUM_FRAMES = 20
"""10 ms frames of the shortest utterance; the longest has half as many more."""


def write_run(
    store: ObjectStore, run_uri: str, num_files: int, num_speakers: int, num_each: int, seed: int
) -> dict[str, int]:
    """Write three steps' objects and manifests; return the selection file of each utterance."""
    generator = np.random.default_rng(seed)
    selection = context(store, run_uri, "selection")
    spoken = [utterances(number, num_speakers, num_each, generator) for number in range(num_files)]
    written = [
        selection.put_output(
            f"bucket-{number % 3:02d}-{number:05d}", ".jsonl", lines(file), Tally.of(file)
        )
        for number, file in enumerate(spoken)
    ]
    order = [written.index(output) for output in finish(selection, written, seed)]
    features, targets = context(store, run_uri, "features"), context(store, run_uri, "targets")
    shards, labelled = [], []
    files = {}
    for number, file in enumerate(order):
        rows, labels = shard(spoken[file], number, seed, generator)
        files.update({row.utterance_id: number for row in rows})
        tally = Tally.of(spoken[file])
        shards.append(features.put_output(f"{number:06d}", ".parquet", write_features(rows), tally))
        labelled.append(
            targets.put_output(f"{number:06d}", ".parquet", write_targets(labels), tally)
        )
    finish(features, shards, seed)
    finish(targets, labelled, seed, {"offsets": "one"})
    return files


def context(store: ObjectStore, run_uri: str, step: str) -> StepContext:
    return step_context(store, run_uri, f"{step}/unlabelled", {}, {})


def finish(
    context: StepContext, outputs: list[Output], seed: int, config: dict[str, str] | None = None
) -> tuple[Output, ...]:
    """Write a step's manifest, its outputs shuffled as every step shuffles them."""
    tally = sum((output.tally for output in outputs), Tally())
    order = tuple(shuffle(outputs, seed))
    manifest = Manifest(context.step, config or {}, {}, order, tally_in=tally, tally_out=tally)
    write_manifest(context, manifest)
    return order


def utterances(
    file: int, num_speakers: int, num_each: int, generator: np.random.Generator
) -> list[Utterance]:
    """Make the utterances of one file, speaker after speaker."""
    return [
        Utterance(
            f"utterance-{file:04d}-{speaker:02d}-{number:03d}",
            f"speaker-{file:04d}-{speaker:02d}",
            int(generator.integers(NUM_FRAMES, NUM_FRAMES * 3 // 2)) / 100,
            "2026-01-01T00:00:00+00:00",
            "en-US",
            f"audio/{file}-{speaker}-{number}.flac",
        )
        for speaker in range(num_speakers)
        for number in range(num_each)
    ]


def placement_of(utterance_id: str) -> str:
    """Name the placement of an utterance, by its number."""
    return f"DP{int(utterance_id[-3:]) % 5 + 1}"


def lines(file: list[Utterance]) -> bytes:
    return "".join(utterance.to_json() + "\n" for utterance in file).encode()


def shard(
    file: list[Utterance], number: int, seed: int, generator: np.random.Generator
) -> tuple[list[FeatureRow], list[TargetRow]]:
    """Make a shard: a tenth of the variance is the file's, a tenth is the speakers'."""
    file_effect = generator.normal() * 0.1**0.5
    effects = {
        name: generator.normal() * 0.1**0.5 for name in dict.fromkeys(u.speaker_id for u in file)
    }
    rows, targets = [], []
    for place in shuffled_order(len(file), seed, "utterances", number):
        utterance = file[place]
        level = file_effect + effects[utterance.speaker_id] + generator.normal() * 0.8**0.5
        num_frames = utterance.duration_ms // 10
        rows.append(
            FeatureRow(
                utterance.utterance_id,
                utterance.speaker_id,
                utterance.duration_ms,
                utterance.created_at,
                utterance.audio_uri,
                "",
                None,
                placement_of(utterance.utterance_id),
                np.full((num_frames, NUM_BINS), level, np.float16),
            )
        )
        log_z = np.full(num_frames // 3, max(4 + level / 2, 0), np.float16)
        kbest = KBest(
            np.zeros((len(log_z), 1), np.uint16), np.zeros((len(log_z), 1), np.float16), log_z
        )
        targets.append(TargetRow(utterance.utterance_id, 0, kbest))
    return rows, targets
