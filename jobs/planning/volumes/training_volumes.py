"""Compute the volume of training from the sub-epochs of the recipe's models."""

from jobs.planning.volumes import shard_sizes
from jobs.planning.volumes.object_counts import num_feature_shards, num_partitions
from jobs.planning.volumes.pipeline_volumes import partitions_of
from jobs.planning.volumes.search_volumes import aligned_bytes, lattice_bytes, low_rate_frames
from jobs.planning.volumes.step_volume import Requests, Volume, Work
from jobs.planning.volumes.workload import Subset, Workload
from pipeline.runs.names import DEV, LABELLED, UNLABELLED
from pipeline.splicing import STACK
from training.fit.model_specs import Fit, SequenceCriterion
from training.models.parameter_count import num_parameters
from training.settings.recipe import Recipe

WEIGHT_BYTES = 4
WHOLE_SHARDS_A_RANK = 4
"""With so many shards a rank and share, each rank reads whole shards (training.data.row_order)."""


def num_training_frames(fit: Fit, workload: Workload) -> float:
    """Count low-rate frames over all sub-epochs, with those repeated for the delay."""
    return sum(
        _frames(workload, LABELLED if sub_epoch.labelled else UNLABELLED, fit)
        / sub_epoch.num_shares
        for sub_epoch in fit.sub_epochs
    )


def _frames(workload: Workload, subset: str, fit: Fit) -> float:
    utterances = workload.utterances(subset)
    frames = shard_sizes.num_low_rate_frames(workload.hours(subset), utterances)
    return frames * fit.augmentation.mean_stretch + fit.model.delay * utterances


def num_validation_frames(fit: Fit, workload: Workload) -> float:
    """Count low-rate frames through all of newbob's validations, which have no backward pass.

    They are of the development speakers, or of the labelled ones that are left out.
    """
    if fit.newbob is None:
        return 0.0
    developed = [low_rate_frames(each) for each in workload.subsets if each.name == DEV]
    labelled = [low_rate_frames(each) for each in workload.subsets if each.name == LABELLED]
    of_one = sum(developed) or sum(labelled) / fit.validation_one_in
    return len(fit.sub_epochs) * of_one


def training_volume(
    fit: Fit, workload: Workload, recipe: Recipe, num_ranks: int, num_senones: int
) -> Volume:
    """Compute the volume of a training step: shards of each sub-epoch, checkpoints, the model.

    A shard is opened for its lengths (a HEAD, two ranges) and then read whole.
    """
    reads = num_bytes = 0.0
    for sub_epoch in fit.sub_epochs:
        for subset in workload.subsets:
            if subset.name == (LABELLED if sub_epoch.labelled else UNLABELLED):
                shards, size = _shards(subset, recipe)
                if isinstance(fit.criterion, SequenceCriterion):
                    size += lattice_bytes(subset)
                whole = shards >= WHOLE_SHARDS_A_RANK * sub_epoch.num_shares * num_ranks
                # Fewer shards are shared in slices, and each rank counts as reading all of them.
                times = 1 / sub_epoch.num_shares if whole else num_ranks
                reads, num_bytes = reads + times * shards, num_bytes + times * size
    frames = num_training_frames(fit, workload)
    work = Work(
        sequence_frames=frames if isinstance(fit.criterion, SequenceCriterion) else 0,
        speed_frames=STACK * frames if fit.augmentation.changes_speed else 0,
        mask_frames=STACK * frames if fit.augmentation.num_masks else 0,
    )
    weights = WEIGHT_BYTES * num_parameters(fit.model, num_senones)
    # A rank's checkpoint has the weights, and what optimizer and trainer keep.
    copies = 1 + fit.optimizer.num_state_vectors + fit.trainer.num_state_vectors
    saves = len(fit.sub_epochs)
    if fit.checkpoints.steps:
        step_frames = num_ranks * fit.loop.minibatch_frames
        # Checkpoints within sub-epochs come on top of those at their ends.
        saves += int(frames / step_frames / fit.checkpoints.steps)
    return Volume(
        tasks=num_ranks,
        shards=1,
        objects=2 + fit.checkpoints.num_kept * (num_ranks + 1),
        requests=Requests(get=3 * reads, put=2 + saves * (num_ranks + 1), head=reads, list=1),
        bytes_read=num_bytes,
        bytes_written=weights * (1 + copies * saves * num_ranks),
        work=work,
    )


def _shards(subset: Subset, recipe: Recipe) -> tuple[int, float]:
    if subset.name == LABELLED:
        return num_feature_shards(subset, recipe), aligned_bytes(subset, recipe)
    return num_partitions(subset, recipe), partitions_of(subset, recipe)
