"""Align the labelled data by a network: log-likelihoods, best paths (paper 003 VII-C2)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int64

from pipeline.shards import FeatureRow, PartitionRow
from pipeline.splicing import num_low_rate_frames, splice
from training.align.labelled import Senones, unknown_words_of
from training.decode.decoder import AlignmentError, align
from training.decode.graph import alignment_graph
from training.decode.lexicon import Lexicon
from training.decode.senones import NO_WORDS, SenoneTree, Unaligned, expand_to_frames
from training.models.store import TrainedModel

MAX_PADDED_FRAMES = 8192
"""The most low-rate frames, padding included, that a network scores at once: 0.1 GB of logits.

At 3,183 senones; a shard of five hours is scored in some 75 batches. A longer utterance is alone.
"""


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
    senones = best_senones(row, scores, lexicon, tree)
    if isinstance(senones, Unaligned):
        return senones
    return expand_to_frames(senones, 0, len(row.features))


def best_senones(
    row: FeatureRow,
    scores: Float32[np.ndarray, "frames senones"],
    lexicon: Lexicon,
    tree: SenoneTree,
) -> Int64[np.ndarray, " frames"] | Unaligned:
    """Return the senone of every low-rate frame."""
    words = row.words
    if not words:
        return Unaligned(NO_WORDS)
    if unknown := unknown_words_of(row, lexicon):
        return unknown
    try:
        return align(alignment_graph(lexicon, tree, words), scores)
    except AlignmentError as error:
        return Unaligned(str(error))


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
