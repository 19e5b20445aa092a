"""Ingest manifests: write metadata in our layout, and leave the audio where it is.

A task reads one piece of a manifest and writes objects of its own below each day and speaker
bucket, so nothing is shuffled, and all of a speaker's records are in one bucket's folders.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audio.conversion import NO_CONVERSION, AudioConversion
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
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import DEV, INGEST_STEP, LABELLED, METADATA_FOLDER
from pipeline.steps.ingestion.manifest_format import ManifestFormat
from pipeline.steps.ingestion.manifest_records import (
    MetadataObjects,
    RecordRules,
    records_of,
    with_audio,
    with_durations,
)
from pipeline.steps.ingestion.manifest_rows import Piece, Row
from pipeline.steps.ingestion.placed_audio import (
    BLOCK_ROWS,
    PlacedAudio,
    PlacementRules,
    Simulation,
)
from pipeline.steps.selection.buckets import require_only

_READ_BYTES = 8 * 2**20
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


@dataclass(frozen=True, slots=True)
class ManifestIngestion:
    """ManifestIngestion holds what a run ingests: manifests, and how records are made of them.

    `texts` are language models, by their names in the corpus. Only `manifest_store`
    may read the manifests; the step's own store may read the audio. An increment's ingestion
    `adds` to a corpus that others have written. With a simulation each utterance is stored as it
    sounds in its placements, converted before as extraction would do it.
    """

    manifest_store: ObjectStore
    manifests: Sequence[Manifest]
    rules: RecordRules
    settings: Mapping[str, Any]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    adds: bool = False
    simulation: Simulation | None = None
    conversion: AudioConversion = NO_CONVERSION

    @property
    def num_shares(self) -> int:
        """The tasks of a piece: where audio is simulated, a whole piece would take an hour."""
        return 1 if self.simulation is None else SHARES_PER_PIECE


def ingest_manifests(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    ingestion: ManifestIngestion,
    loss_budget: float,
    distribute: Distribute,
) -> StepResult:
    """Write the metadata of all manifests, a task for each piece; ValueError for a fault in one."""
    pieces = _pieces(ingestion)
    digests = _digests(ingestion, [piece for _, piece in pieces.values()], distribute)

    def make(step: StepRun) -> StepManifest:
        rules = None
        if simulation := ingestion.simulation:
            given = (ingestion.rules.subsets_of(each.subset) for each in ingestion.manifests)
            subsets = chain.from_iterable(given)
            rules = simulation.stored(store, corpus_uri, subsets, ingestion.conversion)
        tasks = {
            each.name: each
            for name, (manifest, piece) in pieces.items()
            for each in _shares(
                PieceTask(
                    step.context,
                    name,
                    ingestion.manifest_store,
                    manifest,
                    piece,
                    corpus_uri,
                    ingestion.rules,
                    num_shares=ingestion.num_shares,
                    placements=rules,
                )
            )
        }
        plan = TaskPlan(
            tasks,
            ingest_piece,
            distribute,
            loss_budget,
            fold=count_utterances,
            first_outputs=[*_outputs_of(ingestion.texts), *_acoustics_of(rules)],
            has_many_outputs=True,
        )
        made = run_tasks(step, plan)
        if not ingestion.adds:
            require_only(store, corpus_uri, made.outputs, distribute)
            _require_share(ingestion.rules.dev_share, made.statistics)
        _put_texts(store, corpus_uri, ingestion.texts)
        return made

    engines = ingestion.simulation.engines if ingestion.simulation else ()
    spec = StepSpec(
        store, run_uri, INGEST_STEP, ingestion.settings, digests=digests, engines=engines
    )
    return run_step(spec, make)


def _pieces(ingestion: ManifestIngestion) -> dict[str, tuple[Manifest, Piece]]:
    return {
        f"{number:02d}-{manifest.subset}-{place:06d}": (manifest, piece)
        for number, manifest in enumerate(ingestion.manifests)
        for place, piece in enumerate(
            manifest.format.pieces(ingestion.manifest_store, manifest.uri)
        )
    }


def _shares(task: PieceTask) -> list[PieceTask]:
    """Divide a piece among several tasks by its rows."""
    if task.num_shares == 1:
        return [task]
    shares = range(task.num_shares)
    return [replace(task, name=f"{task.name}-{share:02d}", share=share) for share in shares]


def _acoustics_of(rules: PlacementRules | None) -> Iterator[Output]:
    acoustics = rules.acoustics if rules else {}
    # Two subsets of training have the same.
    yield from {output.key: output for output in acoustics.values()}.values()


def _digests(
    ingestion: ManifestIngestion, pieces: Sequence[Piece], distribute: Distribute
) -> dict[str, str]:
    uris = list(dict.fromkeys(uri for piece in pieces for uri in piece.uris))
    elements = [(ingestion.manifest_store, uri) for uri in uris]
    found = distribute(elements, digest_object, "digest the manifests")
    texts = {name: sha256(data) for name, data in ingestion.texts.items()}
    return {**dict(zip(uris, found, strict=True)), **texts}


def digest_object(element: tuple[ObjectStore, str]) -> str:
    """Compute an object's SHA-256, some of its bytes at a time."""
    store, uri = element
    digest = hashlib.sha256()
    with closing(store.open(uri)) as file:
        while some := file.read(_READ_BYTES):
            digest.update(some)
    return digest.hexdigest()


@once
def ingest_piece(task: PieceTask) -> Commit:
    """Read the piece row by row; write records, and make ledger rows of what is none."""
    subsets = task.rules.subsets_of(task.manifest.subset)
    objects = {subset: _objects(task, subset) for subset in subsets}
    placed = _placed_audio(task)
    quarantined: list[Quarantined] = []
    for record in placed.versions(_records(task)) if placed else _records(task):
        if isinstance(record, Quarantined):
            quarantined.append(record)
        else:
            subset = task.rules.subset_of(task.manifest.subset, record.speaker_id)
            objects[subset].add(record)
    by_subset = {subset: each.finish() for subset, each in objects.items()}
    counts = {subset: sum(o.utterances for o in some) for subset, some in by_subset.items()}
    stored = placed.outputs if placed else ()
    outputs = (*stored, *chain.from_iterable(by_subset.values()))
    # A piece that another writer replaced was read in part before, and in part after.
    task.piece.require_unchanged(task.manifest_store)
    written = sum((output.tally for output in outputs), Tally())
    lost = Tally.of(quarantined)
    record_of_task = Commit(
        task=task.name,
        fingerprint=task.context.fingerprint,
        outputs=outputs,
        ledger=task.context.put_ledger(task.name, quarantined),
        tally_in=written + lost,
        quarantined=lost,
        # Without a share a manifest is as it was before there was one.
        statistics={_UTTERANCES: counts} if task.rules.dev_share else {},
    )
    return task.context.commit(record_of_task)


def _placed_audio(task: PieceTask) -> PlacedAudio | None:
    if task.placements is None:
        return None
    subset_of = partial(task.rules.subset_of, task.manifest.subset)
    return PlacedAudio(task.context.store, task.corpus_uri, task.placements, subset_of)


def _objects(task: PieceTask, subset: str) -> MetadataObjects:
    place = task.context.store, task.corpus_uri, join_uri(METADATA_FOLDER, subset)
    return MetadataObjects(*place, task.name, task.rules.num_buckets)


def count_utterances(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the utterances that tasks have counted by subset."""
    counts = Counter[str]()
    for statistics in tasks:
        counts.update(statistics.get(_UTTERANCES, {}))
    return {_UTTERANCES: dict(sorted(counts.items()))} if counts else {}


def _require_share(dev_share: float, statistics: Mapping[str, Any]) -> None:
    """Raise ValueError if a share of the speakers has left a subset without any."""
    counts = statistics.get(_UTTERANCES, {})
    for subset, other in ((DEV, "a larger share"), (LABELLED, "a smaller share")):
        if dev_share and not counts.get(subset):
            said = f"dev_share = {dev_share}: by their hashes no labelled speaker is in {subset}"
            remedy = f"give {other}, or a manifest {DEV}=URI in its place, and a new --run"
            raise ValueError(f"{said}: {remedy}")


def _records(task: PieceTask) -> Iterator[Any]:
    store = task.context.store
    rows = _rows_of(task, task.manifest.format.rows(task.manifest_store, task.piece))
    located = with_audio(rows, task.piece.folder, store.allowed_prefixes)
    columns = task.manifest.format.columns
    timed = with_durations(store, located, columns.get("duration_s", "duration_s"))
    return records_of(timed, task.rules, task.manifest.subset, columns)


def _rows_of(task: PieceTask, rows: Iterator[Row | Quarantined]) -> Iterator[Row | Quarantined]:
    """Yield the blocks of neighbouring rows that are of the task's share."""
    for number, row in enumerate(rows):
        if number // BLOCK_ROWS % task.num_shares == task.share:
            yield row


def _outputs_of(texts: Mapping[str, bytes]) -> list[Output]:
    return [Output(name, len(data), sha256(data), 0, 0) for name, data in texts.items()]


def _put_texts(store: ObjectStore, corpus_uri: str, texts: Mapping[str, bytes]) -> None:
    for name, data in texts.items():
        uri = join_uri(corpus_uri, name)
        if not store.put_if_absent(uri, data) and store.get(uri) != data:
            raise ValueError(f"{uri} has other bytes: use another corpus.uri, or remove it there")
