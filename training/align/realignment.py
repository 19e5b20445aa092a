"""Realign the labelled data by a network, and grow the tree again (paper 003 VII-C2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float32, Float64

from infra.store.object_store import ObjectStore
from pipeline.filterbank import STACK
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
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    LABELLED,
    RealignmentRound,
    alignment_step,
    features_step,
    model_step,
)
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, read_features
from training.align.labelled import (
    Senones,
    commit_aligned,
    read_lexicon,
    read_tree,
    senone_statistics,
    sum_histograms,
)
from training.align.lda_mllt import LDA_MLLT_STATISTIC
from training.align.network_alignment import (
    batched_log_likelihoods,
    best_senones,
    network_alignments,
)
from training.align.shard_alignment import PhoneAligner, align_and_grow, senones_of
from training.decode.decoder import phone_segments
from training.decode.senones import PhoneAlignment, SenoneTree, Unaligned
from training.models.store import TrainedModel, load_model
from training.settings.decoding import TreeConfig, realignment_settings
from training.settings.models import ModelConfig


@dataclass(frozen=True, slots=True)
class AlignmentSettings:
    """AlignmentSettings: log-likelihoods' scale, the network's form, a task's device ("cuda:0").

    With `versions` "clearest", the network hears an utterance's clearest version for all. With
    `regrown`, a tree is grown on its alignments, and these take the new tree's senones.
    """

    acoustic_scale: float
    form: ModelConfig
    device: str = "cpu"
    versions: Versions = "own"
    regrown: TreeConfig | None = None


@dataclass(frozen=True, slots=True)
class AlignmentTask:
    """AlignmentTask is one feature shard to align by the network."""

    context: StepContext
    name: str
    features: Output
    network: "StoredNetwork"


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
    if settings.regrown is not None and subset != LABELLED:
        reads.append(ALIGNMENT_STEP)
    stored = read_lexicon(store, run_uri, corpus_uri, reads)
    network = StoredNetwork(corpus_uri, settings, aligner)

    def align_senones(step: StepRun) -> Manifest:
        if settings.regrown is not None and subset == LABELLED:
            return align_and_grow(
                step,
                network.load,
                settings.versions,
                stored.parse().phones,
                settings.regrown,
                loss_budget,
                distribute,
            )
        shards = read_manifest(store, run_uri, features)
        tree = read_tree(
            store, run_uri, BOOTSTRAP_STEP if settings.regrown is None else ALIGNMENT_STEP
        )

        def task(name: str, output: Output) -> AlignmentTask:
            return AlignmentTask(step.context, name, output, network)

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
        realignment_settings(settings.acoustic_scale, settings.versions, settings.regrown),
        reads,
        stored.digests,
        # A frame between two senones may fall to the other one where logits have other last bits.
        Repetition.OTHER_LAST_BITS,
    )
    return run_step(spec, align_senones)


@dataclass(frozen=True, slots=True)
class StoredNetwork:
    """StoredNetwork names a run's aligner, for tasks that align by it phone by phone."""

    corpus_uri: str
    settings: AlignmentSettings
    name: str

    def load(self, context: StepContext) -> "NetworkAligner":
        """Read network, lexicon and the tree whose senones the network knows."""
        torch.set_num_threads(1)  # a task has one core
        store, run_uri = context.store, context.run_uri
        # On AN4's 7 labelled minutes, realignment keeps 87.6 % of the senones and gains no WER.
        trained = load_model(store, run_uri, self.name, self.settings.form)
        return NetworkAligner(
            read_lexicon(store, run_uri, self.corpus_uri, [BOOTSTRAP_STEP]).parse(),
            read_lda_mllt(store, run_uri),
            trained.to(torch.device(self.settings.device)),
            read_tree(store, run_uri, BOOTSTRAP_STEP),
            self.settings.acoustic_scale,
        )


@dataclass(frozen=True, slots=True)
class NetworkAligner(PhoneAligner):
    """NetworkAligner aligns utterances by a network."""

    trained: TrainedModel
    tree: SenoneTree
    acoustic_scale: float

    def align(
        self,
        rows: Sequence[FeatureRow],
        cepstra: Mapping[str, Float32[np.ndarray, "_frames 39"]] = MappingProxyType({}),
    ) -> dict[str, PhoneAlignment | Unaligned]:
        """Align utterances phone by phone, by their features alone."""
        del cepstra
        return {
            rows[position].utterance_id: self._phones(rows[position], scores)
            for position, scores in batched_log_likelihoods(rows, self.trained, self.acoustic_scale)
        }

    def _phones(
        self, row: FeatureRow, scores: Float32[np.ndarray, "_frames senones"]
    ) -> PhoneAlignment | Unaligned:
        senones = best_senones(row, scores, self.lexicon, self.tree)
        if isinstance(senones, Unaligned):
            return senones
        words = self.lexicon.transcript(row.words)
        phones, starts = phone_segments(senones, words, self.lexicon, self.tree)
        # As expand_to_frames has it, the last low-rate frame lasts to the end.
        return PhoneAlignment(phones, STACK * starts, len(row.features))


@once
def align_shard(task: AlignmentTask) -> Commit:
    """Align the utterances of one shard, on a worker that reads lexicon, tree and network."""
    context, settings = task.context, task.network.settings
    network = task.network.load(context)
    rows = read_features(read_output(context.store, context.run_uri, task.features))
    heard = heard_versions(rows, settings.versions)
    heard_once = distinct(heard)
    found: Mapping[str, Senones | Unaligned]
    if settings.regrown is None:
        found = network_alignments(
            heard_once, network.trained, network.lexicon, network.tree, settings.acoustic_scale
        )
    else:
        tree = read_tree(context.store, context.run_uri)
        found = senones_of(network.align(heard_once), tree)
    return commit_aligned(context, task.name, rows, shared_by_versions(rows, heard, found))


def read_lda_mllt(store: ObjectStore, run_uri: str) -> Float64[np.ndarray, "_rows 117"] | None:
    """Read the transform of the trees' features; None where they are cepstra."""
    manifest = read_manifest(store, run_uri, BOOTSTRAP_STEP)
    matrix = manifest.statistic(LDA_MLLT_STATISTIC, list[list[float]], [])
    return np.array(matrix) if matrix else None
