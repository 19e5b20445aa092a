"""Ingest manifests: write metadata in our layout, and leave the audio where it is.

A task reads one piece of a manifest and writes objects of its own below each day and speaker
bucket, so nothing is shuffled, and all of a speaker's records are in one bucket's folders.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest as StepManifest
from pipeline.runs.manifest import Output
from pipeline.runs.names import DEV, INGEST_STEP, LABELLED, METADATA_FOLDER
from pipeline.settings import NO_CONVERSION, AudioConversion
from pipeline.steps.ingestion.manifest_format import ManifestFormat
from pipeline.steps.ingestion.manifest_records import (
    MetadataObjects,
    RecordRules,
    output_of,
    put_once,
    records_of,
    with_audio,
    with_durations,
)
from pipeline.steps.ingestion.manifest_rows import Piece, digest_object
from pipeline.steps.ingestion.placed_audio import (
    BLOCK_ROWS,
    PlacedAudio,
    PlacementRules,
    Simulation,
)
from pipeline.steps.ingestion.transcripts import (
    HYPOTHESES,
    Transcripts,
    require_joined,
    with_hypotheses,
)
from pipeline.steps.selection.buckets import require_only

_UTTERANCES = "utterances"

SHARES_PER_PIECE = 16
"""With simulated placements so many tasks share a piece, 64 MB or 300,000 rows."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest is what is ingested into one subset: where it lies, and how it is read."""

    subset: str
    uri: str
    format: ManifestFormat


@dataclass(frozen=True, slots=True)
class PieceTask:
    """PieceTask turns a piece of a manifest, or a share of its rows, into objects of the corpus."""

    context: StepContext
    name: str
    manifest_store: ObjectStore
    manifest: Manifest
    piece: Piece
    corpus_uri: str
    rules: RecordRules
    share: int = 0
    num_shares: int = 1
    placements: PlacementRules | None = None
    transcripts: tuple[Transcripts, ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestIngestion:
    """ManifestIngestion holds what a run ingests: manifests, and how records are made of them.

    `texts` are language models, by their names in the corpus. Only `manifest_store`
    may read the manifests; the step's own store may read the audio. An increment's ingestion
    `adds` to a corpus that others have written. `transcripts` are joined with the records. With a
    simulation each utterance is stored as it sounds in its placements, converted before as
    extraction would do it.
    """

    manifest_store: ObjectStore
    manifests: Sequence[Manifest]
    rules: RecordRules
    settings: Mapping[str, Any]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    adds: bool = False
    transcripts: Sequence[Transcripts] = ()
    simulation: Simulation | None = None
    conversion: AudioConversion = NO_CONVERSION


def ingest_manifests(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    ingestion: ManifestIngestion,
    loss_budget: float,
    distribute: Distribute,
) -> StepResult:
    """Write the metadata of all manifests, a task for each piece; ValueError for a fault in one."""
    manifest_store, simulation = ingestion.manifest_store, ingestion.simulation
    pieces = {
        f"{number:02d}-{manifest.subset}-{place:06d}": (manifest, piece)
        for number, manifest in enumerate(ingestion.manifests)
        for place, piece in enumerate(manifest.format.pieces(manifest_store, manifest.uri))
    }
    read = [(manifest_store, piece) for _, piece in pieces.values()]
    read += [(each.store, piece) for each in ingestion.transcripts for piece in each.pieces]
    stores = {uri: reader for reader, piece in read for uri in piece.uris}
    uris, elements = list(stores), [(reader, uri) for uri, reader in stores.items()]
    found = distribute(elements, digest_object, "digest the manifests")
    texts = [output_of(name, data) for name, data in ingestion.texts.items()]
    digests = {**dict(zip(uris, found, strict=True)), **{each.key: each.sha256 for each in texts}}

    def make(step: StepRun) -> StepManifest:
        rules = None
        if simulation:
            given = (ingestion.rules.subsets_of(each.subset) for each in ingestion.manifests)
            subsets = chain.from_iterable(given)
            rules = simulation.stored(store, corpus_uri, subsets, ingestion.conversion)
        num_shares = 1 if rules is None else SHARES_PER_PIECE
        tasks = [
            PieceTask(
                step.context,
                name if num_shares == 1 else f"{name}-{share:02d}",
                manifest_store,
                manifest,
                piece,
                corpus_uri,
                ingestion.rules,
                share,
                num_shares,
                rules,
                tuple(ingestion.transcripts),
            )
            for name, (manifest, piece) in pieces.items()
            for share in range(num_shares)
        ]
        # Two subsets of training have the same acoustics.
        acoustics = {output.key: output for output in rules.acoustics.values()} if rules else {}
        plan = TaskPlan(
            {each.name: each for each in tasks},
            ingest_piece,
            distribute,
            loss_budget,
            fold=count_utterances,
            first_outputs=[*texts, *acoustics.values()],
            has_many_outputs=True,
        )
        made = run_tasks(step, plan)
        require_joined(ingestion.transcripts, made.statistics.get(HYPOTHESES, {}))
        if not ingestion.adds:
            require_only(store, corpus_uri, made.outputs, distribute)
            _require_share(ingestion.rules.dev_share, made.statistics)
        for name, data in ingestion.texts.items():
            put_once(store, corpus_uri, name, data)
        return made

    spec = StepSpec(
        store,
        run_uri,
        INGEST_STEP,
        ingestion.settings,
        digests=digests,
        engines=simulation.engines if simulation else (),
    )
    return run_step(spec, make)


@once
def ingest_piece(task: PieceTask) -> Commit:
    """Read the piece row by row; write records, and make ledger rows of what is none."""
    store, rules, manifest = task.context.store, task.rules, task.manifest
    subset_of = partial(rules.subset_of, manifest.subset)
    objects = {
        subset: MetadataObjects(
            store, task.corpus_uri, join_uri(METADATA_FOLDER, subset), task.name, rules.num_buckets
        )
        for subset in rules.subsets_of(manifest.subset)
    }
    rows = enumerate(manifest.format.rows(task.manifest_store, task.piece))
    # The blocks of neighbouring rows that are of the task's share.
    records = (row for n, row in rows if n // BLOCK_ROWS % task.num_shares == task.share)
    columns = manifest.format.columns
    located = with_audio(records, task.piece.folder, store.allowed_prefixes)
    timed = with_durations(store, located, columns.get("duration_s", "duration_s"))
    made = records_of(timed, rules, manifest.subset, columns)
    joined = Counter[str]()
    if task.transcripts:
        made = with_hypotheses(task.transcripts, made, joined)
    outputs: list[Output] = []
    if task.placements:
        placed = PlacedAudio(store, task.corpus_uri, task.placements, subset_of)
        made, outputs = placed.versions(made), placed.outputs
    quarantined: list[Quarantined] = []
    for record in made:
        if isinstance(record, Quarantined):
            quarantined.append(record)
        else:
            objects[subset_of(record.speaker_id)].add(record)
    counts = Counter[str]()
    for subset, some in objects.items():
        written = some.finish()
        counts[subset] = sum(output.utterances for output in written)
        outputs += written
    # A piece that another writer replaced was read in part before, and in part after.
    task.piece.require_unchanged(task.manifest_store)
    for each in task.transcripts:
        each.require_unchanged()
    lost = Tally.of(quarantined)
    record_of_task = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=tuple(outputs),
        ledger=task.context.put_ledger(task.name, quarantined),
        tally_in=sum((output.tally for output in outputs), lost),
        quarantined=lost,
        statistics={_UTTERANCES: dict(counts), **({HYPOTHESES: dict(joined)} if joined else {})},
    )
    return task.context.commit(record_of_task)


def count_utterances(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the utterances that tasks have counted by subset, and those with transcripts."""
    counts, joined = Counter[str](), Counter[str]()
    for statistics in tasks:
        counts.update(statistics[_UTTERANCES])
        joined.update(statistics.get(HYPOTHESES, {}))
    return {
        _UTTERANCES: dict(sorted(counts.items())),
        **({HYPOTHESES: dict(sorted(joined.items()))} if joined else {}),
    }


def _require_share(dev_share: float, statistics: Mapping[str, Any]) -> None:
    """Raise ValueError if a share of the speakers has left a subset without any."""
    counts = statistics[_UTTERANCES]
    for subset, other in ((DEV, "a larger share"), (LABELLED, "a smaller share")):
        if dev_share and not counts.get(subset):
            said = f"dev_share = {dev_share}: by their hashes no labelled speaker is in {subset}"
            remedy = f"give {other}, or a manifest {DEV}=URI in its place, and a new --run"
            raise ValueError(f"{said}: {remedy}")
