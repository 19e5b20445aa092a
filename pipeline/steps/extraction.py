"""Feature extraction: one selection file to one feature shard (paper 003 IV-B2).

Audio is fetched by many GETs in flight; each speaker's utterances, in order of creation, are one
stream for the causal mean; the shard's utterances are shuffled, its moments kept with the commit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from infra.object_store import (
    AccessDenied,
    Fetched,
    ObjectNotFound,
    ObjectStore,
    PrefixError,
    StoreError,
    join_uri,
)
from pipeline.audio import AudioError, decode_audio
from pipeline.filterbank import log_mel_energies
from pipeline.normalization import CausalMean, Moments
from pipeline.records import Quarantined, Tally, Utterance, parse_utterance
from pipeline.shards import FeatureRow, write_features
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
from pipeline.steps.manifest import (
    Manifest,
    Output,
    input_digests,
    read_manifest,
    read_output,
)
from pipeline.steps.selection import shuffle

MIN_FRAMES = 5
"""The fewest 10 ms frames that leave one spliced frame at each of the three offsets."""

REFUSALS = {
    ObjectNotFound: "missing_object",
    AccessDenied: "access_denied",
    PrefixError: "outside_prefixes",
}


@dataclass(frozen=True, slots=True)
class ExtractionConfig:
    """GETs in flight per task, and the seed of both levels of the hierarchical shuffle."""

    gets_in_flight: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.gets_in_flight <= 64:
            raise ValueError(f"gets_in_flight = {self.gets_in_flight}: need 1..64")


@dataclass(frozen=True, slots=True)
class FileTask:
    """One selection file to turn into a feature shard."""

    context: StepContext
    config: ExtractionConfig
    name: str
    selection: Output
    corpus_uri: str


def extract_features(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    corpus_uri: str,
    config: ExtractionConfig,
    loss_budget: float,
    distribute: Distribute,
) -> tuple[Manifest, bool]:
    """Extract one subset's features; the manifest, and whether it was done before."""
    source = f"selection/{subset}"
    inputs = input_digests(store, run_uri, [source])
    context = step_context(store, run_uri, f"features/{subset}", asdict(config), inputs)
    if (done := finished_manifest(context)) is not None:
        return done, True
    tasks = {
        f"{number:06d}": FileTask(context, config, f"{number:06d}", output, corpus_uri)
        for number, output in enumerate(read_manifest(store, run_uri, source).outputs)
    }
    plan = StepPlan(context, asdict(config), inputs, tasks, loss_budget)
    manifest = run_plan(
        plan,
        extract_file,
        distribute,
        lambda outputs: shuffle(outputs, config.seed),
        lambda commits: {"moments": merge_moments(commits).to_dict()},
    )
    return manifest, False


def merge_moments(commits: Sequence[Commit]) -> Moments:
    """The global zeroth, first and second order statistics (IV-B2), from each shard's."""
    merged = Moments.zero()
    for commit in commits:
        merged = merged.merge(Moments.from_dict(commit.statistics["moments"]))
    return merged


def extract_file(task: FileTask) -> Commit:
    """Fetch, decode, filter, normalize, shuffle and store one file's utterances."""
    lines = read_output(task.context.store, task.context.run_uri, task.selection).decode()
    utterances = [parse_utterance(line) for line in lines.splitlines()]
    rows, quarantined = [], []
    moments = Moments.zero()
    for row in extract_rows(task, utterances):
        if isinstance(row, Quarantined):
            quarantined.append(row)
            continue
        rows.append(row)
        moments = moments.merge(Moments.of(row.features.astype(np.float32)))
    order = shuffled_order(len(rows), task.config.seed, "utterances", task.name)
    data = write_features([rows[index] for index in order])
    lost = Tally.of(quarantined)
    written = Tally(len(rows), sum(row.duration_ms for row in rows))
    outputs = (task.context.put_output(task.name, ".parquet", data, written),) if rows else ()
    record = Commit(
        task=task.name,
        identity=task.context.identity,
        outputs=outputs,
        ledger=task.context.put_ledger(task.name, quarantined),
        tally_in=Tally.of(utterances),
        quarantined=lost,
        statistics={"moments": moments.to_dict()},
    )
    return task.context.commit(record)


def extract_rows(
    task: FileTask, utterances: Sequence[Utterance]
) -> Iterator[FeatureRow | Quarantined]:
    """Features of each utterance, or its ledger row; the file holds speakers in stream order."""
    uris = [resolve_audio(task.corpus_uri, utterance.audio_uri) for utterance in utterances]
    fetched = task.context.store.get_many(uris, task.config.gets_in_flight)
    speaker, mean = "", CausalMean()
    for utterance, (_, found) in zip(utterances, fetched, strict=True):
        if utterance.speaker_id != speaker:
            speaker, mean = utterance.speaker_id, CausalMean()
        yield extract_utterance(utterance, found, mean)


def resolve_audio(corpus_uri: str, audio_uri: str) -> str:
    """An audio URI relative to the corpus, or absolute as it stands."""
    absolute = audio_uri.startswith("/") or "://" in audio_uri
    return audio_uri if absolute else join_uri(corpus_uri, audio_uri)


def extract_utterance(
    utterance: Utterance, found: Fetched | StoreError, mean: CausalMean
) -> FeatureRow | Quarantined:
    """Decode, filter and subtract the causal mean; what fails does not touch the mean."""
    if isinstance(found, StoreError):
        reason = REFUSALS.get(type(found))
        if reason is None:
            raise found
        return quarantine(utterance, reason, str(found), 0)
    num_bytes = len(found.data)
    try:
        energies = log_mel_energies(decode_audio(found.data))
    except AudioError as error:
        return quarantine(utterance, error.reason, error.detail, num_bytes)
    if len(energies) < MIN_FRAMES:
        detail = f"{len(energies)} frames of 10 ms: need at least {MIN_FRAMES}"
        return quarantine(utterance, "too_short", detail, num_bytes)
    return FeatureRow(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_ms=utterance.duration_ms,
        created_at=utterance.created_at,
        audio_uri=utterance.audio_uri,
        audio_etag=found.etag,
        text=utterance.text,
        placement=utterance.placement,
        features=mean.subtract(energies).astype(np.float16),
    )


def quarantine(utterance: Utterance, reason: str, detail: str, num_bytes: int) -> Quarantined:
    """The ledger row of an utterance whose audio cannot be used."""
    return Quarantined(
        utterance.utterance_id,
        utterance.audio_uri,
        reason,
        detail[:300],
        num_bytes,
        utterance.duration_ms,
    )
