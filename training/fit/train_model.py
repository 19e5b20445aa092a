"""Fit one acoustic model on all ranks, and store it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore, join_uri
from infra.torchrun import launched_ranks_per_host
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Manifest, Output, read_manifest, subsets_of_run
from pipeline.runs.names import (
    CHECKPOINTS_FOLDER,
    DEV,
    LABELLED,
    UNLABELLED,
    features_step,
    model_step,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from training.checkpoints.checkpointer import Checkpointer
from training.configuration.trainers import data_parallel_ranks
from training.data.dataset import Dataset
from training.data.lattice_shards import LatticeShards
from training.data.sub_epochs import check_offsets
from training.distributed import collectives
from training.distributed.process_group import CPU, ProcessGroup
from training.fit.model_specs import LEFT_OUT, Fit, SequenceCriterion
from training.fit.progress import SubEpochPace
from training.fit.steps import NO_DEVELOPMENT
from training.fit.trained_placements import trained_data
from training.fit.training_loop import Fitting
from training.model_parallel import ParallelRanks, merged_state, split_model
from training.models.acoustic_model import AcousticModel
from training.models.precision import set_float32_products
from training.models.registry import make_model
from training.models.store import TrainedModel, load_model, log_priors, store_model
from training.sequence_training.smbr import Smbr

TakePace = Callable[[Sequence[SubEpochPace]], object]


def ignore(_: Sequence[SubEpochPace]) -> None:
    """Take the pace of a training that nothing reports."""


def fit_model(
    fit: Fit,
    store: ObjectStore,
    run_uri: str,
    group: ProcessGroup,
    device: torch.device = CPU,
    take_pace: TakePace = ignore,
) -> StepResult:
    """Train a model on all ranks and store it; return its manifest, and whether it existed.

    This rank trains on `device`. What is stored lies on no device, and is loaded on any.
    `take_pace` receives the pace of the sub-epochs that this process trained.

    A model is the same work on any number of ranks: a finished one is found, and an unfinished one
    is resumed. The bits differ, and the curve says how many ranks made each sub-epoch.
    """
    if fit.newbob is not None and DEV in subsets_of_run(store, run_uri, features_step):
        fit = fit.on_development_speakers()
    spec = StepSpec(store, run_uri, model_step(fit.name), fit.config, fit.inputs)
    train = partial(train_model, fit, group, device, take_pace)
    try:
        return run_step(spec, train, barrier=partial(collectives.barrier, group))
    finally:
        # What follows in this process must not depend on whether the fit ran in it.
        set_float32_products("float32")


def train_model(
    fit: Fit,
    group: ProcessGroup,
    device: torch.device,
    take_pace: TakePace,
    context: StepContext,
) -> StepContents | None:
    """Train the model of `fit` on `device`; rank 0 stores it and returns the step's contents."""
    check_trainer(fit, group)
    store, run_uri = context.store, context.run_uri
    labelled = read_manifest(store, run_uri, fit.labelled)
    # Ranks that divide a model read the same data, and draw the same random numbers.
    num_parts = fit.model_parallel_ranks
    parts = ParallelRanks.of(group, num_parts) if num_parts > 1 else None
    data_group = parts.data if parts else group
    # Ranks draw their own dropout; their initial weights are replaced by rank 0's.
    torch.manual_seed((fit.seed + data_group.rank()) % 2**64)  # the largest seed is 2^64 - 1
    senone_counts = labelled.statistic("senone_counts", list[int])
    model = make_model(fit.model, len(senone_counts))
    if fit.warm_start != "none":
        warm_start(model, fit, store, run_uri)
    model.freeze_normalization(global_moments(store, run_uri))
    model.to(device)  # initial weights are those of the CPU's random numbers, wherever it trains
    dataset = open_dataset(fit, store, run_uri, tuple(labelled.outputs), data_group)
    data = trained_data(fit, dataset, trained_tally(fit, store, run_uri, labelled), group, device)
    trainee = part_of(model, parts) if parts else model
    checkpoints = checkpoints_of(fit, context, group)
    fitting = Fitting(fit, trainee, dataset, checkpoints, data_group)
    curve = fitting.run()
    take_pace(fitting.pace)
    if parts:
        model.load_state_dict(merged_state(trainee, parts.model))
    # The student too takes the priors of the labelled alignment.
    trained = TrainedModel(model.eval(), log_priors(senone_counts))
    if group.rank() != 0:
        return None
    statistics = {"curve": curve, "num_ranks": group.size(), **data.statistics}
    return store_model(context, trained, data.trained, statistics, data.left_out)


def part_of(model: AcousticModel, ranks: ParallelRanks) -> AcousticModel:
    """Return this rank's part of the model, where the model lies."""
    part = split_model(model, ranks.model)
    assert isinstance(part, AcousticModel)
    return part.to(model.device)


def check_trainer(fit: Fit, group: ProcessGroup) -> None:
    """Raise ConfigurationError if the fit's trainer cannot work on these ranks."""
    num_parts = fit.model_parallel_ranks
    try:
        num_ranks = data_parallel_ranks(group.size(), num_parts)
        fit.trainer.check_ranks(num_ranks, max(launched_ranks_per_host() // num_parts, 1))
    except ValueError as error:
        raise ConfigurationError(f"{fit.name}: trainer: {error}") from error


def warm_start(model: AcousticModel, fit: Fit, store: ObjectStore, run_uri: str) -> None:
    """Begin from the weights of a model that was trained on a part of the data (000 3.2).

    Raises ConfigurationError where that model is of another form.
    """
    try:
        trained = load_model(store, run_uri, fit.warm_start, fit.model).model
        if trained.num_senones != model.num_senones:
            has, needs = trained.num_senones, model.num_senones
            raise ConfigurationError(f"has {has} senones, and this model {needs}")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{fit.name}: warm_start = {fit.warm_start!r}: {error}; need a model of the same form, "
            "or warm_start = 'none'"
        ) from error
    model.load_state_dict(trained.state_dict())


def global_moments(store: ObjectStore, run_uri: str) -> Moments:
    """Return the statistics of labelled and unlabelled frames together, without held-out ones."""
    parts = [
        Moments.from_dict(
            read_manifest(store, run_uri, features_step(subset)).statistic(
                "moments", dict[str, Any]
            )
        )
        for subset in (LABELLED, UNLABELLED)
    ]
    return parts[0].merge(parts[1])


def trained_tally(fit: Fit, store: ObjectStore, run_uri: str, labelled: Manifest) -> Tally:
    """Count the utterances and hours that this model is trained on, at all placements."""
    if isinstance(fit.criterion, SequenceCriterion):
        return read_manifest(store, run_uri, fit.criterion.lattices).tally_out
    if fit.unlabelled is None:
        return labelled.tally_out
    return labelled.tally_out + read_manifest(store, run_uri, fit.unlabelled).tally_out


def lattice_shards(fit: Fit, store: ObjectStore, run_uri: str) -> LatticeShards | None:
    """Find the lattices of the labelled partitions, if this model is trained on them."""
    criterion = fit.criterion
    if not isinstance(criterion, SequenceCriterion):
        return None
    labelled = read_manifest(store, run_uri, fit.labelled)
    shards = read_manifest(store, run_uri, criterion.lattices).outputs
    # Task n decoded partition n.
    by_partition = dict(zip((each.key for each in labelled.outputs), shards, strict=True))
    priors = log_priors(labelled.statistic("senone_counts", list[int])).numpy()
    smbr = Smbr(criterion.acoustic_scale, criterion.boost, priors)
    return LatticeShards(store, run_uri, by_partition, smbr)


def open_dataset(
    fit: Fit, store: ObjectStore, run_uri: str, labelled: tuple[Output, ...], group: ProcessGroup
) -> Dataset:
    """Open the training partitions as one rank sees them.

    Raises ValueError where the loss is of development speakers, and they have no utterance.
    """
    unlabelled: tuple[Output, ...] = ()
    if fit.unlabelled is not None:
        partitions = read_manifest(store, run_uri, fit.unlabelled)
        check_offsets(fit.sub_epochs, partitions)
        unlabelled = tuple(partitions.outputs)
    has_development = fit.validation not in ("", LEFT_OUT)
    development: tuple[Output, ...] = ()
    if has_development:
        development = tuple(read_manifest(store, run_uri, fit.validation).outputs)
    # Without this, labelled speakers would be left out, and not those whom the manifest names.
    if has_development and not development:
        raise ValueError(f"{fit.name}: {fit.validation}: {NO_DEVELOPMENT}")
    return Dataset(
        store=store,
        run_uri=run_uri,
        labelled=labelled,
        unlabelled=unlabelled,
        delay=fit.model.delay,
        minibatch_frames=fit.loop.minibatch_frames,
        seed=fit.seed,
        rank=group.rank(),
        world_size=group.size(),
        validation_one_in=fit.validation_one_in,
        augmentation=fit.augmentation,
        lattices=lattice_shards(fit, store, run_uri),
        development=development,
        soft_targets=fit.soft_targets,
    )


def checkpoints_of(fit: Fit, context: StepContext, group: ProcessGroup) -> Checkpointer:
    """Open the fit's checkpoints, in a folder below the model that it makes."""
    uri = join_uri(context.run_uri, context.step, CHECKPOINTS_FOLDER)
    return Checkpointer(
        context.store,
        uri,
        context.fingerprint,
        group,
        fit.checkpoints.num_kept,
        num_parts=fit.model_parallel_ranks,
    )
