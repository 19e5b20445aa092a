"""Decode the labelled data to lattices: sentences that a model confuses (003 VII-C3)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once, read_commits
from pipeline.runs.engine import (
    LossLimit,
    LossWatch,
    Statistics,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, BOOTSTRAP_STEP, lattices_step, model_step, task_name
from pipeline.shards import (
    LATTICE_OFFSET,
    Alignment,
    LatticeRow,
    PartitionRow,
    read_partition,
    write_lattices,
)
from pipeline.splicing import low_rate_alignment, num_low_rate_frames
from training.align.bootstrap import one_after_another
from training.align.labelled import labelled_transcripts, read_lexicon, transcript_reads
from training.align.network_alignment import (
    MAX_PADDED_FRAMES,
    length_batches,
    log_likelihoods,
    read_tree,
)
from training.decode.decoder import GraphFile, SearchError, SearchProcess
from training.decode.graph import DecodingGraph, decoding_graph
from training.decode.lexicon import Lexicon
from training.decode.ngrams import witten_bell_arpa
from training.distributed import collectives
from training.distributed.collectives import run_own_tasks
from training.distributed.process_group import CPU, ProcessGroup
from training.models.store import TrainedModel, load_model
from training.sequence_training.lattice_decoder import (
    LatticeBeams,
    LatticeError,
    decode_with_reference,
)
from training.settings.decoding import LatticeConfig, lattice_settings
from training.settings.models import ModelConfig


@dataclass(frozen=True, slots=True)
class LatticeTask:
    """LatticeTask: one training partition to decode, and all that decoding needs."""

    context: StepContext
    name: str
    partition: Output
    model: TrainedModel
    graph: GraphFile
    acoustic_scale: float
    beams: LatticeBeams


def generate_lattices(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    name: str,
    form: ModelConfig,
    config: LatticeConfig,
    acoustic_scale: float,
    loss_budget: float,
    group: ProcessGroup,
    device: torch.device = CPU,
) -> StepResult:
    """Decode the labelled data by the model `name`, a `form`, on all ranks; write the lattices.

    The model is on `device`, the decoder on the CPU.
    Each has the reference's path, so that no frame is without its reference: where the search did
    not keep that path, it is added at its cost in the graph, as Povey's MPE does (2004).
    """
    reads = [ALIGNMENT_STEP, BOOTSTRAP_STEP, model_step(name)]
    stored = read_lexicon(store, run_uri, corpus_uri, reads)

    def decode(step: StepRun) -> Manifest | None:
        aligned = read_manifest(store, run_uri, ALIGNMENT_STEP)
        partitions = aligned.outputs
        model = load_model(store, run_uri, name, form).to(device)
        beams = LatticeBeams(config.beam, config.lattice_beam)
        limit = LossLimit(loss_budget, aligned.tally_out.utterances)
        graph = GraphFile(weak_graph(store, run_uri, stored.parse(), config.ngram_order))
        names = map(task_name, range(len(partitions)))
        tasks = {
            name: LatticeTask(step.context, name, partition, model, graph, acoustic_scale, beams)
            for name, partition in zip(names, partitions, strict=True)
        }
        return decode_on_all_ranks(step, tasks, limit, group)

    resolved = lattice_settings(config, acoustic_scale)
    # Logits differ in their last bits between devices, and an arc at the beam's edge with them.
    last_bits = Repetition.OTHER_LAST_BITS
    step = lattices_step(name)
    reads += transcript_reads(store, run_uri)
    spec = StepSpec(store, run_uri, step, resolved, reads, stored.digests, last_bits)
    return run_step(spec, decode, barrier=lambda: collectives.barrier(group))


def decode_on_all_ranks(
    step: StepRun, tasks: Mapping[str, LatticeTask], limit: LossLimit, group: ProcessGroup
) -> Manifest | None:
    """Decode and commit each task on one rank, whatever its time; rank 0 returns the manifest.

    LossBudgetExceededError on all ranks as soon as the tasks have lost more than the limit.
    """

    def check_losses(num_lost: int) -> None:
        if not limit.allows(num_lost):
            watch, context = LossWatch(limit), step.context
            for commit in read_commits(context.store, context.run_uri, context.step):
                watch.see(commit)

    run_own_tasks(
        list(tasks.values()),
        lambda task: lattice_shard(task).quarantined.utterances,
        check_losses,
        group,
    )
    if group.rank() != 0:
        return None
    plan = TaskPlan(
        tasks,
        lattice_shard,
        one_after_another,
        limit.loss_budget,
        fold=summed_counts,
        statistics=density_statistics,
        num_utterances=limit.num_utterances,
    )
    return run_tasks(step, plan)


def weak_graph(
    store: ObjectStore, run_uri: str, lexicon: Lexicon, ngram_order: int
) -> DecodingGraph:
    """Build HCLG with an n-gram model of the labelled transcripts; reads no features.

    What was aligned as unknown words is a word of it, so that references have their paths.
    """
    sentences = [lexicon.transcript(words) for words in labelled_transcripts(store, run_uri)]
    lexicon = lexicon.with_unknown_word()
    arpa = witten_bell_arpa(sentences, lexicon.pronunciations, ngram_order)
    return decoding_graph(lexicon, read_tree(store, run_uri), arpa)


@once
def lattice_shard(task: LatticeTask) -> Commit:
    """Write the lattices of one training partition; utterances without one become ledger rows."""
    context = task.context
    rows = read_partition(read_output(context.store, context.run_uri, task.partition))
    found = dict(decoded_rows(rows, task))
    # Batches have an order of their own; shards keep the partition's.
    decoded = [found[number] for number in range(len(rows))]
    made = [each.row for each in decoded if isinstance(each, DecodedRow)]
    failed = [each for each in decoded if isinstance(each, Quarantined)]
    tally = Tally(len(made), sum(row.duration_ms for row in made))
    record = Commit(
        task=task.name,
        fingerprint=context.fingerprint,
        # One shard for each partition, also an empty one, so that training finds it by its place.
        outputs=(context.put_output(task.name, ".parquet", write_lattices(made), tally),),
        ledger=context.put_ledger(task.name, failed),
        tally_in=tally + Tally.of(failed),
        quarantined=Tally.of(failed),
        statistics={
            "num_frames": sum(row.lattice.num_frames for row in made),
            "num_arcs": sum(int(np.count_nonzero(row.lattice.labels)) for row in made),
            "num_references_added": sum(
                each.is_added for each in decoded if isinstance(each, DecodedRow)
            ),
        },
    )
    return context.commit(record)


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """DecodedRow: an utterance's lattice, and whether the reference's path had to be added."""

    row: LatticeRow
    is_added: bool


def decoded_rows(
    rows: Sequence[PartitionRow], task: LatticeTask
) -> Iterator[tuple[int, DecodedRow | Quarantined]]:
    """Yield each row's number and lattice, or its ledger row, in batches of bounded size."""
    delay = task.model.model.config.delay
    lengths = [num_low_rate_frames(len(row.features), LATTICE_OFFSET) + delay for row in rows]
    with SearchProcess(task.graph) as search:
        for batch in length_batches(lengths, MAX_PADDED_FRAMES):
            some = [rows[number] for number in batch]
            scored = log_likelihoods(some, task.model, task.acoustic_scale)
            for number, scores in zip(batch, scored, strict=True):
                yield number, decoded_row(number, rows[number], scores, task.beams, search)


def decoded_row(
    number: int,
    row: PartitionRow,
    scores: Float32[np.ndarray, "frames senones"],
    beams: LatticeBeams,
    search: SearchProcess,
) -> DecodedRow | Quarantined:
    """Decode one utterance to a lattice that has the path of its alignment."""
    assert isinstance(row.targets, Alignment), "labelled rows have alignments"
    reference = low_rate_alignment(row.targets.senones, LATTICE_OFFSET)
    decode = partial(
        decode_with_reference, log_likelihoods=scores, beams=beams, reference=reference
    )
    try:
        found = search.search(decode, len(scores))
    except (LatticeError, SearchError) as error:
        reason = "lattice_failed" if isinstance(error, LatticeError) else "search_failed"
        # The partition does not keep the audio's URI.
        return Quarantined(row.utterance_id, "", reason, str(error), 0, row.duration_ms)
    lattice = LatticeRow(row.utterance_id, row.duration_ms, number, found.lattice)
    return DecodedRow(lattice, found.is_added)


def summed_counts(tasks: Sequence[Statistics]) -> Statistics:
    """Add up the frames, arcs and added references of tasks, or of sums of tasks."""
    names = ("num_frames", "num_arcs", "num_references_added")
    return {name: sum(each[name] for each in tasks) for name in names}


def density_statistics(sums: Statistics) -> Statistics:
    """Return arcs a frame (003 VII-C3: around 10), and how many references were added."""
    return {
        "num_frames": sums["num_frames"],
        "arcs_per_frame": sums["num_arcs"] / max(sums["num_frames"], 1),
        "num_references_added": sums["num_references_added"],
    }
