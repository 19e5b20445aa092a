"""Feature extraction: one selection file to its feature shards (paper 003 IV-B2).

Audio is fetched by many GETs in flight, and each utterance becomes a row of features, or a row of
the ledger. Each speaker's utterances, in order of creation, are one stream for the causal mean. A
file makes one shard, or as many as keep a task's memory bounded however long its speakers are; each
is shuffled, and its moments are kept with the commit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from infra.settings import plain
from infra.store.object_store import ObjectStore, SizeBound
from infra.store.uris import resolve_audio
from pipeline.audio.decode import MAX_DURATION_S, decode_utterance, max_file_bytes
from pipeline.audio.errors import AudioError, AudioReason
from pipeline.audio.wav import SAMPLE_BYTES
from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean, Moments
from pipeline.records import AudioPart, Quarantined, Tally, Utterance, parse_utterance
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    Extension,
    Loss,
    LossWatch,
    NumberedTasks,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest
from pipeline.runs.names import UNLABELLED, features_step, selection_step
from pipeline.settings import NO_CONVERSION, AudioConversion, ExtractionConfig
from pipeline.shards import FeatureRow, as_stored, write_features
from pipeline.shuffling import shuffle, shuffled_order
from pipeline.steps.audio_reads import AudioObjects, FoundAudio, WantedAudio, require_audio
from pipeline.steps.stream_means import NO_STREAMS, MeansPlace, Streams, merge_means, sum_late

MIN_FRAMES = 2 * STACK - 1
"""The fewest 10 ms frames that leave one spliced frame at each of the three offsets."""

WITH_HYPOTHESES = "num_with_hypotheses"
"""The statistic of the selected utterances in which recognizers heard something, if any."""

AUDIO_REASONS = get_args(AudioReason)
"""The reasons for which the ledger says that an utterance's audio could not be used."""


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
    pcm_bytes_per_s = SAMPLE_BYTES * conversion.max_samples_per_s
    return SizeBound(round(longest_s * pcm_bytes_per_s), max_file_bytes(longest_s, conversion))


def extract_utterance(
    utterance: Utterance, found: FoundAudio, mean: CausalMean, config: ExtractionConfig
) -> FeatureRow | Quarantined:
    """Decode, filter and subtract the causal mean; what fails does not touch the mean."""
    num_bytes = 0
    try:
        audio = require_audio(found)
        num_bytes = len(audio.data)
        decoded = decode_utterance(
            audio.data,
            utterance.utterance_id,
            utterance.duration_s,
            config.engine,
            config.conversion,
        )
        energies = log_mel_energies(decoded.samples, config.engine)
        if len(energies) < MIN_FRAMES:
            detail = f"{len(energies)} frames of {FRAME_SHIFT_MS} ms: need at least {MIN_FRAMES}"
            raise AudioError("too_short", detail)
    except AudioError as error:
        return Quarantined.of(utterance, error.reason, error.detail, num_bytes)
    is_causal = config.mean == "causal"
    features = mean.subtract(energies, np.float16) if is_causal else energies.astype(np.float16)
    return FeatureRow(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_ms=utterance.duration_ms,
        created_at=utterance.created_at,
        audio_uri=utterance.audio_uri,
        audio_etag=audio.etag,
        text=utterance.text,
        placement=utterance.placement,
        features=as_stored(features, config.storage),
        storage=config.storage,
        audio_form=decoded.audio_form,
        audio_part=utterance.part,
        hypotheses=utterance.hypotheses,
    )


MAX_SHARD_FRAMES = 2_000_000
"""5.5 hours in a shard: 256 MB in memory as float16. The paper's files have 5 hours."""


LOSS_INTERVAL = 100
"""A task compares its losses with its step's loss budget after so many utterances, a second's work.

A shorter task ends as usual, with a whole ledger.
"""


@dataclass(frozen=True, slots=True)
class FileTask:
    """One selection file to turn into feature shards."""

    context: StepContext
    config: ExtractionConfig
    name: str
    selection: Output
    corpus_uri: str
    max_lost: int
    means: MeansPlace | None = None


def extract_features(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    corpus_uri: str,
    config: ExtractionConfig,
    loss_budget: float,
    distribute: Distribute,
) -> StepResult:
    """Extract the features of one subset, a task for each selection file.

    An increment extracts the files that it selected itself. Its streams of the unlabelled subset
    begin with the means with which they ended in the base.
    """
    selection, is_extended = selection_step(subset), subset == UNLABELLED

    def extract(step: StepRun) -> Manifest:
        selected = read_manifest(store, run_uri, selection)
        files = selected.own_outputs
        num_utterances = sum(each.utterances for each in files)
        max_lost = LossWatch(loss_budget, num_utterances).max_lost
        before = step.base.seen(step.base.manifest.stream_means) if step.base else ()
        means = MeansPlace(step.context.scratch, tuple(before)) if is_extended else None

        def task(name: str, output: Output) -> FileTask:
            return FileTask(step.context, config, name, output, corpus_uri, max_lost, means)

        plan = TaskPlan(
            NumberedTasks(files, task),
            extract_file,
            distribute,
            loss_budget,
            fold=add_statistics,
            # The shuffle's upper level puts the shards in a global random order (003 IV-A2).
            order=partial(shuffle, seed=config.seed),
            num_utterances=num_utterances,
            size=lambda task: task.selection.duration_ms,
        )
        made = run_tasks(step, plan)
        if means is None:
            return made
        total = selected.tally_out.utterances
        merged = merge_means(means, step.context, len(files), total, distribute)
        return replace(made, stream_means=merged)

    spec = StepSpec(
        store,
        run_uri,
        features_step(subset),
        plain(config),
        [selection],
        extension=Extension(extended_statistics) if is_extended else None,
    )
    return run_step(spec, extract)


def extended_statistics(before: Manifest, own: Statistics) -> Statistics:
    """Add an increment's moments to those of its base; the other statistics are its own."""
    moments = Moments.from_dict(before.statistic("moments", dict[str, Any]))
    return {**own, "moments": moments.merge(Moments.from_dict(own["moments"])).to_dict()}


def add_statistics(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the moments of tasks' features (003 IV-B2), and what their utterances are."""
    merged = Moments.zero()
    # They come in the order of tasks, so these sums repeat to the bit.
    for statistics in tasks:
        merged = merged.merge(Moments.from_dict(statistics["moments"]))
    heard = sum(each.get(WITH_HYPOTHESES, 0) for each in tasks)
    return {
        "moments": merged.to_dict(),
        **sum_late(tasks),
        **({WITH_HYPOTHESES: heard} if heard else {}),
    }


@dataclass(frozen=True, slots=True)
class Extracted:
    """Extracted holds a file's shards, its ledger rows and the moments of its features."""

    outputs: tuple[Output, ...]
    quarantined: Sequence[Quarantined]
    moments: Moments
    streams: Streams


@once
def extract_file(task: FileTask, max_shard_frames: int = MAX_SHARD_FRAMES) -> Commit | Loss:
    """Fetch, decode, filter, normalize, shuffle and store one file's utterances.

    The task ends early, over budget, if it alone loses more than its step may.
    """
    lines = task.context.read(task.selection).decode().splitlines()
    utterances = [parse_utterance(line) for line in lines]
    audio = audio_objects(
        task.context.store,
        task.corpus_uri,
        utterances,
        task.config.gets_in_flight,
        task.config.conversion,
    )
    extracted = extract_shards(task, utterances, audio, max_shard_frames)
    audio.end_reading()
    if audio.must_be_repeated:
        extracted = extract_shards(task, utterances, audio, max_shard_frames)
    num_written = sum(output.utterances for output in extracted.outputs)
    if num_written + len(extracted.quarantined) < len(utterances):
        return Loss.over_budget(task.name, extracted.quarantined)
    heard = sum(bool(utterance.hypotheses) for utterance in utterances)
    means = task.means.put(task.context, task.name, extracted.streams) if task.means else {}
    record = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=extracted.outputs,
        ledger=task.context.put_ledger(task.name, extracted.quarantined),
        tally_in=Tally.of(utterances),
        quarantined=Tally.of(extracted.quarantined),
        statistics={
            "moments": extracted.moments.to_dict(),
            **means,
            **({WITH_HYPOTHESES: heard} if heard else {}),
        },
    )
    return task.context.commit(record)


def extract_shards(
    task: FileTask, utterances: Sequence[Utterance], audio: AudioObjects, max_frames: int
) -> Extracted:
    """Read the audio once, and store its shards; all but the last if it must be read again."""
    streams = task.means.read(utterances) if task.means else Streams(NO_STREAMS)
    rows = extract_rows(utterances, audio.read(), task.config, streams)
    quarantined: list[Quarantined] = []
    outputs, moments = [], Moments.zero()

    def loses_too_much(num_rows: int) -> bool:
        is_looked_at = num_rows % LOSS_INTERVAL == 0
        # Before any object has answered, all may be refused for want of access.
        return is_looked_at and len(quarantined) > task.max_lost and audio.has_answered

    # Cut so, one speaker's 24 hours take 0.75 to 1.16 GiB of a worker.
    for number, shard in enumerate(cut(rows, quarantined, max_frames, loses_too_much)):
        if audio.must_be_repeated:
            break
        # Utterance by utterance in stream order: the same sums wherever the shards are cut.
        for row in shard:
            moments = moments.merge(Moments.of(row.features))
        outputs.append(write_shard(task, f"{task.name}-{number:03d}", shard))
    return Extracted(tuple(outputs), quarantined, moments, streams)


def cut(
    rows: Iterable[FeatureRow | Quarantined],
    quarantined: list[Quarantined],
    max_frames: int,
    loses_too_much: Callable[[int], bool],
) -> Iterator[list[FeatureRow]]:
    """Cut the stream of rows where `max_frames` are reached; ledger rows go to `quarantined`.

    End, without the last shard, after a number of rows at which the task `loses_too_much`.
    """
    shard: list[FeatureRow] = []
    num_frames = 0
    for number, row in enumerate(rows):
        if loses_too_much(number):
            return
        if isinstance(row, Quarantined):
            quarantined.append(row)
            continue
        shard.append(row)
        num_frames += len(row.features)
        if num_frames >= max_frames:
            yield shard
            shard, num_frames = [], 0
    if shard:
        yield shard


def write_shard(task: FileTask, name: str, rows: list[FeatureRow]) -> Output:
    """Shuffle and store one shard; `rows` are used up, so that they do not outlive it."""
    # The shuffle's lower level permutes the utterances within a shard (003 IV-B2).
    order = shuffled_order(len(rows), task.config.seed, "utterances", name)
    data = write_features([rows[index] for index in order])
    tally = Tally.of(rows)
    rows.clear()
    return task.context.put_output(name, ".parquet", data, tally)
