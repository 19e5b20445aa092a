"""Decode the labelled data to lattices: sentences that a model confuses (003 VII-C3)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, Repetition, StepContext, once, read_commits
from pipeline.runs.engine import (
    LossWatch,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
    serially,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, BOOTSTRAP_STEP, lattices_step, model_step, task_name
from pipeline.settings import LATTICE_OFFSET
from pipeline.shards import Alignment, LatticeRow, PartitionRow, read_partition, write_lattices
from pipeline.splicing import low_rate_alignment
from training.align.labelled import labelled_transcripts, read_lexicon, read_tree, transcript_reads
from training.align.network_alignment import batched_log_likelihoods
from training.decode.grammar import ngram_grammar
from training.decode.graph import DecodingGraph, grammar_graph, require_room, word_ids
from training.decode.lexicon import Lexicon
from training.decode.ngrams import witten_bell
from training.distributed import collectives
from training.distributed.collectives import run_own_tasks
from training.distributed.process_group import CPU, ProcessGroup
from training.models.store import TrainedModel, load_model
from training.sequence_training.lattice_decoder import (
    LatticeError,
    ReferencedLattice,
    arcs_by_beam,
    candidate_beams,
    decode_with_reference,
)
from training.settings.decoding import LatticeConfig, lattice_settings
from training.settings.models import ModelConfig

COUNTS = ("num_frames", "num_arcs", "num_references_added")
"""The statistics of a task's commit, which the step's manifest adds up."""


@dataclass(frozen=True, slots=True)
class LatticeTask:
    """LatticeTask: one training partition to decode, and all that decoding needs."""

    context: StepContext
    name: str
    partition: Output
    model: TrainedModel
    graph: DecodingGraph
    acoustic_scale: float
    config: LatticeConfig


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

    The model is on `device`, the decoder on the CPU. Each has the reference's path, so that no
    frame is without its reference: where the search did not keep that path, it is added at its cost
    in the graph, as Povey's MPE does (2004). With a density, a sample of the utterances chooses the
    beam.
    """
    reads = [ALIGNMENT_STEP, BOOTSTRAP_STEP, model_step(name)]
    stored = read_lexicon(store, run_uri, corpus_uri, reads)

    def decode(step: StepRun) -> Manifest | None:
        aligned = read_manifest(store, run_uri, ALIGNMENT_STEP)
        partitions = aligned.outputs
        model = load_model(store, run_uri, name, form).to(device)
        watch = LossWatch(loss_budget, aligned.tally_out.utterances)
        graph = weak_graph(store, run_uri, stored.parse(), config.ngram_order)

        def task_of(number: int, config: LatticeConfig) -> LatticeTask:
            name, partition = task_name(number), partitions[number]
            return LatticeTask(step.context, name, partition, model, graph, acoustic_scale, config)

        chosen = config
        if config.density:
            sampled = [task_of(each, config) for each in evenly(len(partitions), SAMPLED)]
            chosen = replace(config, lattice_beam=beam_of_density(sampled, config, group))
        numbers = range(len(partitions))
        tasks = {task_name(number): task_of(number, chosen) for number in numbers}

        def check_losses(num_lost: int) -> None:
            if num_lost > watch.max_lost:
                for commit in read_commits(store, run_uri, step.context.step):
                    watch.see(commit)

        # Each task is decoded and committed on one rank, whatever its time. As soon as the tasks
        # have lost more than the limit, all ranks raise LossBudgetExceededError.
        run_own_tasks(
            list(tasks.values()),
            lambda task: lattice_shard(task).quarantined.utterances,
            check_losses,
            group,
            description=f"lattices of {name}",
        )
        if group.rank() != 0:
            return None
        plan = TaskPlan(
            tasks,
            lattice_shard,
            serially,  # each task finds the commit that a rank has made
            loss_budget,
            fold=lambda parts: {name: sum(each[name] for each in parts) for name in COUNTS},
            statistics=lambda sums: {
                "num_frames": sums["num_frames"],
                # 003 VII-C3 has around 10.
                "arcs_per_frame": sums["num_arcs"] / max(sums["num_frames"], 1),
                "lattice_beam": chosen.lattice_beam,
                "num_references_added": sums["num_references_added"],
            },
            num_utterances=watch.num_utterances,
        )
        return run_tasks(step, plan)

    resolved = lattice_settings(config, acoustic_scale)
    # Logits differ in their last bits between devices, and an arc at the beam's edge with them.
    last_bits = Repetition.OTHER_LAST_BITS
    reads += transcript_reads(store, run_uri)
    spec = StepSpec(store, run_uri, lattices_step(name), resolved, reads, stored.digests, last_bits)
    return run_step(spec, decode, barrier=lambda: collectives.barrier(group))


def weak_graph(
    store: ObjectStore, run_uri: str, lexicon: Lexicon, ngram_order: int
) -> DecodingGraph:
    """Build HCLG with an n-gram model of the labelled transcripts; reads no features.

    What was aligned as unknown words is a word of it, so that references have their paths.
    """
    sentences = [lexicon.transcript(words) for words in labelled_transcripts(store, run_uri)]
    lexicon = lexicon.with_unknown_word()
    model = witten_bell(sentences, lexicon.pronunciations, ngram_order)
    grammar = ngram_grammar(model, word_ids(lexicon))
    require_room(grammar, "lower sequence_training.lattices.ngram_order")
    return grammar_graph(lexicon, read_tree(store, run_uri), grammar)


SAMPLED = 16
"""So many partitions, and of each so many rows, choose the beam of a density."""


def evenly(count: int, most: int) -> list[int]:
    """Return `most` of the numbers below `count`, evenly spaced, or all where they are fewer."""
    chosen = min(count, most)
    return [(2 * each + 1) * count // (2 * chosen) for each in range(chosen)]


def beam_of_density(
    sampled: Sequence[LatticeTask], config: LatticeConfig, group: ProcessGroup
) -> float:
    """Return the candidate beam whose density on the sample is the nearest to the config's.

    Ranks divide the sample, and add whole numbers up; so all find the same beam, however many they
    are. Of utterances without lattice nothing is counted.
    """
    beams = candidate_beams(config)
    sums = torch.zeros(1 + len(beams), dtype=torch.int64)
    for task in sampled[group.rank() :: group.size()]:
        data = read_output(task.context.store, task.context.run_uri, task.partition)
        rows = read_partition(data, evenly(task.partition.tally.utterances, SAMPLED))
        for _, scores in batched_log_likelihoods(rows, task.model, task.acoustic_scale):
            try:
                arcs = arcs_by_beam(task.graph, scores, config)
            except LatticeError:
                continue
            sums += torch.from_numpy(np.append(len(scores), arcs))
    collectives.all_reduce_sum(sums, group)
    num_frames, *num_arcs = sums.tolist()
    densities = np.array(num_arcs) / max(num_frames, 1)
    return float(beams[np.abs(densities - config.density).argmin()])


@once
def lattice_shard(task: LatticeTask) -> Commit:
    """Write the lattices of one training partition; utterances without one become ledger rows."""
    context = task.context
    rows = read_partition(read_output(context.store, context.run_uri, task.partition))
    # Batches have an order of their own; shards keep the partition's.
    found = [each for _, each in sorted(decoded_rows(rows, task), key=itemgetter(0))]
    made = [
        LatticeRow(row.utterance_id, row.duration_ms, number, each.lattice)
        for number, (row, each) in enumerate(zip(rows, found, strict=True))
        if isinstance(each, ReferencedLattice)
    ]
    decoded = [each for each in found if isinstance(each, ReferencedLattice)]
    failed = [each for each in found if isinstance(each, Quarantined)]
    tally = Tally.of(made)
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
            "num_arcs": sum(each.num_arcs for each in decoded),
            "num_references_added": sum(each.is_added for each in decoded),
        },
    )
    return context.commit(record)


def decoded_rows(
    rows: Sequence[PartitionRow], task: LatticeTask
) -> Iterator[tuple[int, ReferencedLattice | Quarantined]]:
    """Yield each row's number and lattice, or its ledger row, in batches of bounded size.

    A lattice has the path of the row's alignment.
    """
    for number, scores in batched_log_likelihoods(rows, task.model, task.acoustic_scale):
        row = rows[number]
        assert isinstance(row.targets, Alignment), "labelled rows have alignments"
        reference = low_rate_alignment(row.targets.senones, LATTICE_OFFSET)
        try:
            yield number, decode_with_reference(task.graph, scores, task.config, reference)
        except LatticeError as error:
            # The partition does not keep the audio's URI.
            reason = ("lattice_failed", str(error))
            yield number, Quarantined(row.utterance_id, "", *reason, 0, row.duration_ms)
