"""Data selection: hours drawn uniformly, whole speakers in nearly equal files (003 IV-B1).

Metadata objects of one speaker bucket hold all utterances of its speakers, so a task that reads
one bucket can write whole speakers' files: nothing is transferred between tasks.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import UInt8, UInt64

from infra.object_store import ObjectStore, join_uri, normalize_uri
from pipeline.packing import balance, pack_speakers
from pipeline.records import (
    Quarantined,
    Tally,
    Utterance,
    stream_order,
)
from pipeline.shuffling import shuffled_order
from pipeline.steps.commit import (
    Commit,
    Distribute,
    StepContext,
    StepPlan,
    finished_manifest,
    run_plan,
    step_context,
)
from pipeline.steps.draw import (
    SELECTED,
    UNSELECTED,
    MetadataSummary,
    draw,
    read_records,
    summarize_metadata,
)
from pipeline.steps.manifest import Manifest, Output


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """`hours` to select from the unlabelled metadata (0 = all), in files of `file_hours`."""

    hours: float
    file_hours: float
    seed: int

    def __post_init__(self) -> None:
        if self.hours < 0:
            raise ValueError(f"hours = {self.hours}: need 0 (all) or more")
        if self.file_hours <= 0:
            raise ValueError(f"file_hours = {self.file_hours}: need more than 0")


@dataclass(frozen=True, slots=True)
class BucketTask:
    """One speaker bucket: its metadata objects and the verdict on each of their good records."""

    context: StepContext
    config: SelectionConfig
    name: str
    uris: tuple[str, ...]
    verdicts: tuple[UInt8[np.ndarray, " _records"], ...]


def select_utterances(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    metadata_uri: str,
    config: SelectionConfig,
    loss_budget: float,
    distribute: Distribute,
) -> tuple[Manifest, bool]:
    """Select one subset; the manifest, and whether it was done before.

    The budget of hours is for the unlabelled subset; labelled and held-out ones are taken whole.
    """
    uris = [found.uri for found in store.list(metadata_uri) if _is_metadata(found.uri)]
    if not uris:
        raise ValueError(
            f"{metadata_uri} holds no *.jsonl metadata: run jobs/ingest.py, or set corpus.uri"
        )
    sources = [(store, config.seed, uri) for uri in uris]
    summaries = distribute(sources, summarize_metadata, f"read {subset} metadata")
    base = normalize_uri(metadata_uri)
    inputs = {
        uri.removeprefix(base): summary.digest for uri, summary in zip(uris, summaries, strict=True)
    }
    resolved = asdict(config)
    context = step_context(store, run_uri, f"selection/{subset}", resolved, inputs)
    if (done := finished_manifest(context)) is not None:
        return done, True
    require_usable(metadata_uri, dict(zip(uris, summaries, strict=True)))
    hours = config.hours if subset == "unlabelled" else 0.0
    verdicts = dict(zip(uris, draw(summaries, hours), strict=True))
    plan = StepPlan(context, resolved, inputs, bucket_tasks(context, config, verdicts), loss_budget)
    manifest = run_plan(
        plan,
        write_bucket,
        distribute,
        lambda outputs: shuffle(outputs, config.seed),
        lambda commits: {"balance": {each.task: each.statistics["balance"] for each in commits}},
    )
    return manifest, False


def _is_metadata(uri: str) -> bool:
    return uri.endswith((".jsonl", ".jsonl.gz"))


def require_usable(metadata_uri: str, summaries: Mapping[str, MetadataSummary]) -> None:
    """Refuse metadata without a record, or with a speaker in two buckets: a stream in two files."""
    if not any(summary.num_records for summary in summaries.values()):
        raise ValueError(f"{metadata_uri} holds no record: its objects are empty; ingest again")
    speakers: dict[str, list[UInt64[np.ndarray, " _speakers"]]] = defaultdict(list)
    for uri, summary in summaries.items():
        speakers[bucket_of(uri)].append(summary.speakers)
    once = [np.unique(np.concatenate(parts)) for parts in speakers.values()]
    split = sum(map(len, once)) - len(np.unique(np.concatenate(once)))
    if split:
        raise ValueError(
            f"{metadata_uri}: {split} speakers have records in several speaker_bucket=..; put all "
            "of a speaker's records into one, as its causal mean needs the whole stream"
        )


def bucket_of(uri: str) -> str:
    """The speaker bucket that a metadata object belongs to; without one, all is one bucket."""
    match = re.search(r"/speaker_bucket=([^/]+)/", uri)
    return f"bucket-{match[1] if match else 'all'}"


def bucket_tasks(
    context: StepContext,
    config: SelectionConfig,
    verdicts: Mapping[str, UInt8[np.ndarray, " _records"]],
) -> dict[str, BucketTask]:
    """One task per speaker bucket, over the metadata objects of all its dates."""
    buckets = defaultdict(list)
    for uri in verdicts:
        buckets[bucket_of(uri)].append(uri)
    return {
        name: BucketTask(context, config, name, tuple(uris), tuple(verdicts[uri] for uri in uris))
        for name, uris in buckets.items()
    }


def write_bucket(task: BucketTask) -> Commit:
    """Pack a bucket's selected speakers into nearly equal files, each speaker in stream order."""
    selected, unselected, quarantined = judge(task)
    by_speaker: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in sorted(selected, key=stream_order):
        by_speaker[utterance.speaker_id].append(utterance)
    durations = {name: Tally.of(stream).duration_ms for name, stream in by_speaker.items()}
    packed = pack_speakers(durations, task.config.file_hours) if durations else []
    outputs = tuple(
        write_file(task, number, [utterance for name in names for utterance in by_speaker[name]])
        for number, names in enumerate(packed)
    )
    left_out = Tally.of(unselected)
    lost = Tally.of(quarantined)
    record = Commit(
        task=task.name,
        identity=task.context.identity,
        outputs=outputs,
        ledger=task.context.put_ledger(task.name, quarantined),
        tally_in=Tally.of(selected) + left_out + lost,
        quarantined=lost,
        unselected=left_out,
        statistics={"balance": balance(packed, durations).to_dict()},
    )
    return task.context.commit(record)


def judge(task: BucketTask) -> tuple[list[Utterance], list[Utterance], list[Quarantined]]:
    """Split a bucket's records by verdict: selected, unselected, quarantined."""
    selected, unselected, quarantined = [], [], []
    for uri, verdicts in zip(task.uris, task.verdicts, strict=True):
        remaining = iter(verdicts)
        for line, record in read_records(task.context.store.get(uri), uri):
            if isinstance(record, Quarantined):
                quarantined.append(record)
                continue
            verdict = next(remaining)
            if verdict == SELECTED:
                selected.append(record)
            elif verdict == UNSELECTED:
                unselected.append(record)
            else:
                quarantined.append(_duplicate(record, len(line)))
    return selected, unselected, quarantined


def _duplicate(record: Utterance, num_bytes: int) -> Quarantined:
    return Quarantined(
        record.utterance_id,
        record.audio_uri,
        "duplicate_utterance",
        "an earlier metadata record has this utterance_id",
        num_bytes,
        record.duration_ms,
    )


def write_file(task: BucketTask, number: int, utterances: Sequence[Utterance]) -> Output:
    """Store one selection file: JSON lines, speaker after speaker."""
    data = "".join(utterance.to_json() + "\n" for utterance in utterances).encode()
    name = f"{task.name}-{number:05d}"
    return task.context.put_output(name, ".jsonl", data, Tally.of(utterances))


def shuffle(outputs: Sequence[Output], seed: int) -> list[Output]:
    """The files in a seeded random order: the outer level of the hierarchical shuffle (IV-A2)."""
    return [outputs[index] for index in shuffled_order(len(outputs), seed, "files")]


def metadata_uri(corpus_uri: str, subset: str) -> str:
    """Where the metadata of a subset lies in a corpus."""
    return join_uri(corpus_uri, "metadata", subset)
