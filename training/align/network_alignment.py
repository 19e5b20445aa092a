"""Align the labelled data by a network: log-likelihoods, best paths (paper 003 VII-C2).

Workers of a cluster import this module, so it imports nothing that only a driver has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.placement_versions import distinct, heard_versions, shared_by_versions
from pipeline.runs.commit import Commit, Repetition, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    NumberedTasks,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import (
    BOOTSTRAP_STEP,
    LABELLED,
    RealignmentRound,
    alignment_step,
    features_step,
    model_step,
)
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, PartitionRow, read_features
from pipeline.splicing import num_low_rate_frames, splice
from training.align.labelled import (
    Senones,
    commit_aligned,
    read_lexicon,
    senone_statistics,
    sum_histograms,
    transcribed,
    unknown_words_of,
)
from training.decode.decoder import AlignmentError, align
from training.decode.graph import alignment_graph
from training.decode.lexicon import Lexicon
from training.decode.senones import (
    NO_WORDS,
    SenoneTree,
    Unaligned,
    expand_to_frames,
    parse_senone_tree,
)
from training.models.store import TrainedModel, load_model
from training.settings.models import ModelConfig

MAX_PADDED_FRAMES = 8192
"""The most low-rate frames, padding included, that a network scores at once: 0.1 GB of logits.

At 3,183 senones; a shard of five hours is scored in some 75 batches. A longer utterance is alone.
"""


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """AlignmentSettings: log-likelihoods' scale, the network's form, a task's device ("cuda:0").

    With `versions` "clearest", the network hears an utterance's clearest version for all.
    """

    acoustic_scale: float
    form: ModelConfig
    device: str = "cpu"
    versions: Versions = "own"

    @property
    def resolved(self) -> dict[str, object]:
        """Return the settings that alignments depend on."""
        return {"acoustic_scale": self.acoustic_scale, "versions": self.versions}


@dataclass(frozen=True, slots=True)
class AlignmentTask:
    """AlignmentTask is one feature shard to align by the network `aligner`."""

    context: StepContext
    settings: AlignmentSettings
    name: str
    features: Output
    corpus_uri: str
    aligner: str


def realign(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    realignment: RealignmentRound,
    settings: AlignmentSettings,
    loss_budget: float,
    distribute: Distribute,
    subset: str = LABELLED,
) -> StepResult:
    """Align a subset by the network of a round, a task for each feature shard."""
    features, aligner = features_step(subset), realignment.aligner
    reads = [features, BOOTSTRAP_STEP, model_step(aligner)]
    stored = read_lexicon(store, run_uri, corpus_uri, reads)

    def align_senones(step: StepRun) -> Manifest:
        shards = read_manifest(store, run_uri, features)
        tree = read_tree(store, run_uri)

        def task(name: str, output: Output) -> AlignmentTask:
            return AlignmentTask(step.context, settings, name, output, corpus_uri, aligner)

        plan = TaskPlan(
            NumberedTasks(shards.outputs, task),
            align_shard,
            distribute,
            loss_budget,
            fold=sum_histograms,
            statistics=partial(senone_statistics, tree),
            num_utterances=shards.tally_out.utterances,
            size=lambda task: task.features.duration_ms,
        )
        return run_tasks(step, plan)

    spec = StepSpec(
        store,
        run_uri,
        realignment.writes if subset == LABELLED else alignment_step(subset),
        settings.resolved,
        reads,
        stored.digests,
        # A frame between two senones may fall to the other one where logits have other last bits.
        Repetition.OTHER_LAST_BITS,
    )
    return run_step(spec, align_senones)


@once
def align_shard(task: AlignmentTask) -> Commit:
    """Align the utterances of one shard, on a worker that reads lexicon, tree and network."""
    torch.set_num_threads(1)  # a task has one core
    store, run_uri = task.context.store, task.context.run_uri
    # On AN4's 7 labelled minutes, realignment keeps 87.6 % of the senones and gains no WER.
    trained = load_model(store, run_uri, task.aligner, task.settings.form)
    trained = trained.to(torch.device(task.settings.device))
    lexicon = read_lexicon(store, run_uri, task.corpus_uri, [BOOTSTRAP_STEP]).parse()
    rows = read_features(read_output(store, run_uri, task.features))
    tree = read_tree(store, run_uri)
    heard = heard_versions(rows, task.settings.versions)
    scale = task.settings.acoustic_scale
    found = network_alignments(distinct(heard), trained, lexicon, tree, scale)
    alignments = shared_by_versions(rows, heard, found)
    return commit_aligned(task.context, task.name, rows, alignments)


def read_tree(store: ObjectStore, run_uri: str) -> SenoneTree:
    """Read the run's senone tree."""
    bootstrapped = read_manifest(store, run_uri, BOOTSTRAP_STEP)
    return parse_senone_tree(bootstrapped.statistic("senone_tree", str))


def log_likelihoods(
    rows: Sequence[FeatureRow | PartitionRow], trained: TrainedModel, acoustic_scale: float
) -> list[Float32[np.ndarray, "_frames senones"]]:
    """Return scaled log p(x | senone) up to a constant, of the low-rate frames at offset 0.

    Posteriors divided by priors, as a hybrid system decodes (003 II-A).
    """
    spliced = [torch.from_numpy(splice(row.features, 0).astype(np.float32)) for row in rows]
    logits = trained.model.utterance_logits([each.to(trained.model.device) for each in spliced])
    posteriors = [torch.log_softmax(frames, dim=-1).cpu() for frames in logits]
    # The scale is kappa of 003 II-A2; p(x) is left out, as it is equal on all paths.
    return [(acoustic_scale * (frames - trained.log_priors)).numpy() for frames in posteriors]


def network_alignments(
    rows: Sequence[FeatureRow],
    trained: TrainedModel,
    lexicon: Lexicon,
    tree: SenoneTree,
    acoustic_scale: float,
) -> dict[str, Senones | Unaligned]:
    """Align by the network: the senone of every 10 ms frame, or why an utterance has none."""
    return {
        rows[position].utterance_id: align_row(rows[position], scores, lexicon, tree)
        for position, scores in batched_log_likelihoods(rows, trained, acoustic_scale)
    }


def batched_log_likelihoods(
    rows: Sequence[FeatureRow | PartitionRow], trained: TrainedModel, acoustic_scale: float
) -> Iterator[tuple[int, Float32[np.ndarray, "_frames senones"]]]:
    """Yield each row's position and its `log_likelihoods`, the shortest row first.

    Memory is bounded whatever the number of rows: a batch's scores are released with the batch.
    """
    delay = trained.model.config.delay
    lengths = [num_low_rate_frames(len(row.features), 0) + delay for row in rows]
    for batch in length_batches(lengths, MAX_PADDED_FRAMES):
        some = [rows[position] for position in batch]
        yield from zip(batch, log_likelihoods(some, trained, acoustic_scale), strict=True)


def align_row(
    row: FeatureRow,
    scores: Float32[np.ndarray, "_frames senones"],
    lexicon: Lexicon,
    tree: SenoneTree,
) -> Senones | Unaligned:
    """Align one utterance with its transcript, or say why it cannot be."""
    words = transcribed(row).words
    if not words:
        return Unaligned(NO_WORDS)
    if unknown := unknown_words_of(row, lexicon):
        return unknown
    graph = alignment_graph(lexicon, tree, words)
    try:
        senones = align(graph, scores)
    except AlignmentError as error:
        return Unaligned(str(error))
    return expand_to_frames(senones, 0, len(row.features))


def length_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Group positions by rising length, so that padding to the longest makes at most `most` frames.

    A longer utterance is a batch of its own.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Lengths rise, so this one is what the batch would be padded to.
        if batches and (len(batches[-1]) + 1) * lengths[position] <= most:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches
