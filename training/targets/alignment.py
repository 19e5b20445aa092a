"""Hard targets for the labelled data: bootstrap, senone tree, realignment (paper 003 VII-C2)."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import (
    ALIGNER,
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    LABELLED,
    features_step,
    model_step,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.shards import FeatureRow
from pipeline.splicing import num_low_rate_frames, splice
from training.decoding.alignment import expand_to_frames, senone_alignment
from training.decoding.bootstrap.cepstra import speaker_cepstra
from training.decoding.bootstrap.hmm import BootstrapConfig, bootstrap_alignment
from training.decoding.decoder import AlignmentError, align
from training.decoding.graph.hclg import alignment_graph
from training.decoding.lexicon import Lexicon
from training.decoding.senones.senone_tree import SenoneTree, parse_senone_tree
from training.decoding.senones.tree_growing import TreeConfig, build_tree
from training.distributed.process_group import CPU
from training.models.store import TrainedModel, load_model
from training.targets.labelled import (
    Alignments,
    Senones,
    read_lexicon,
    read_shards,
    transcribed,
    write_aligned,
)

MAX_PADDED_FRAMES = 8192
"""The most low-rate frames, padding included, that a network scores at once: 0.1 GB of logits.

At 3,183 senones; a shard of five hours is scored in some 75 batches. A longer utterance is alone.
"""


def bootstrap(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: BootstrapConfig,
    tree_config: TreeConfig,
    loss_budget: float,
) -> StepResult:
    """Align by monophones, grow a senone tree on that, and write the senone of every frame."""
    features = features_step(LABELLED)
    stored = read_lexicon(store, run_uri, corpus_uri, [features])

    def align_monophones(context: StepContext) -> StepContents:
        shards = read_shards(store, run_uri, features)
        utterances = [transcribed(row) for rows in shards.values() for row in rows]
        lexicon = stored.parse()
        # 003 VII-C2 starts from an alignment model at hand; monophones need none.
        bootstrapped = bootstrap_alignment(utterances, lexicon, config)
        phones = bootstrapped.alignments
        # 003 VII-C1 grows its tree on LDA and MLLT of PLP; cepstra with deltas replace them.
        tree = build_tree(speaker_cepstra(utterances), phones, lexicon.phones, tree_config)
        senones: dict[str, Senones | str] = dict(bootstrapped.failures)
        senones |= {name: senone_alignment(each, tree) for name, each in phones.items()}
        return write_aligned(context, shards, lambda _: senones, tree, loss_budget)

    resolved = {"bootstrap": asdict(config), "senones": asdict(tree_config)}
    spec = StepSpec(store, run_uri, BOOTSTRAP_STEP, resolved, [features], stored.digests)
    return run_step(spec, align_monophones)


def realign(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    acoustic_scale: float,
    loss_budget: float,
    device: torch.device = CPU,
) -> StepResult:
    """Align the labelled data again, by the network that the bootstrap trained, on `device`."""
    features = features_step(LABELLED)
    reads = [features, BOOTSTRAP_STEP, model_step(ALIGNER)]
    stored = read_lexicon(store, run_uri, corpus_uri, reads)

    def align_senones(context: StepContext) -> StepContents:
        lexicon, tree = stored.parse(), read_tree(store, run_uri)
        # On AN4's 7 labelled minutes, realignment keeps 87.6 % of the senones and gains no WER.
        model = load_model(store, run_uri, ALIGNER).to(device)

        def align_rows(rows: list[FeatureRow]) -> Alignments:
            return network_alignments(rows, model, lexicon, tree, acoustic_scale)

        shards = read_shards(store, run_uri, features)
        return write_aligned(context, shards, align_rows, tree, loss_budget)

    resolved = {"acoustic_scale": acoustic_scale}
    spec = StepSpec(store, run_uri, ALIGNMENT_STEP, resolved, reads, stored.digests)
    return run_step(spec, align_senones)


def read_tree(store: ObjectStore, run_uri: str) -> SenoneTree:
    """Read the run's senone tree."""
    bootstrapped = read_manifest(store, run_uri, BOOTSTRAP_STEP)
    return parse_senone_tree(bootstrapped.statistics["senone_tree"])


def log_likelihoods(
    rows: Sequence[FeatureRow], trained: TrainedModel, acoustic_scale: float
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
) -> dict[str, Senones | str]:
    """Align by the network: the senone of every 10 ms frame, or why an utterance has none.

    Memory is bounded whatever the number of rows: a batch's scores are released with the batch.
    """
    delay = trained.model.config.look_ahead
    lengths = [num_low_rate_frames(len(row.features), 0) + delay for row in rows]
    alignments: dict[str, Senones | str] = {}
    for batch in length_batches(lengths, MAX_PADDED_FRAMES):
        some = [rows[position] for position in batch]
        for row, scores in zip(some, log_likelihoods(some, trained, acoustic_scale), strict=True):
            alignments[row.utterance_id] = align_row(row, scores, lexicon, tree)
    return alignments


def align_row(
    row: FeatureRow,
    scores: Float32[np.ndarray, "_frames senones"],
    lexicon: Lexicon,
    tree: SenoneTree,
) -> Senones | str:
    """Align one utterance with its transcript, or say why it cannot be."""
    graph = alignment_graph(lexicon, tree, transcribed(row).words)
    try:
        senones = align(graph, scores)
    except AlignmentError as error:
        return str(error)
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
