"""Fit one acoustic model on all ranks, and store it.

Before training begins, utterances are counted by placement: what the model trains on, and what it
leaves out.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial, reduce
from typing import Any

import torch

from infra.log_lines import log
from infra.prefetch import prefetch
from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectStore, join_uri, scan_checked
from infra.torchrun import launched_ranks_per_host
from pipeline.normalization import Moments
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, is_finished, read_manifest, subsets_of_run
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    CHECKPOINTS_FOLDER,
    DEV,
    DEV_ALIGNMENT_STEP,
    model_step,
)
from pipeline.shards import read_partition_index
from training.checkpoints.checkpointer import Checkpointer
from training.data.dataset import Dataset, LatticeShards
from training.data.sub_epochs import SubEpoch, check_offsets
from training.distributed import collectives
from training.distributed.collectives import gather_text
from training.distributed.process_group import CPU, ProcessGroup
from training.fit.minibatch_selection import SelectingFitting
from training.fit.model_specs import LEFT_OUT, Fit, SequenceCriterion
from training.fit.steps import NO_DEVELOPMENT
from training.fit.training_loop import Fitting, SubEpochPace
from training.model_parallel import ParallelRanks, merged_state, split_model
from training.models.acoustic_model import AcousticModel
from training.models.precision import set_float32_products
from training.models.store import TrainedModel, load_model, log_priors, make_model, store_model
from training.sequence_training.smbr import Smbr
from training.settings.recipe import check_ranks

INDEXES_IN_FLIGHT = 16
NOT_VALIDATED = (
    "not validated: no speakers are left out of training, and no development speakers are aligned"
)
VALIDATION_MS = 3_600_000
"""An hour of speech is validated on, as in papers 000 (3.2) and 003 (VII-B)."""
VALIDATION_SHARE = 0.05
"""At most this share of a mean sub-epoch is: forward passes, so 1.7 % of its computations."""
MAX_NAMES = 500
"""Characters of the known placements in a message."""


def left_out_placements(
    fit: Fit, dataset: Dataset, every: Tally, group: ProcessGroup, device: torch.device
) -> dict[str, Tally]:
    """Count by placement the utterances, of `every`, that the fit's placements leave out.

    All ranks call it together. Raises ConfigurationError on all of them for a placement that no
    utterance has, and where no labelled or no unlabelled utterance is left.
    """
    placements = fit.augmentation.placements
    if not placements:
        return {}
    read = {fit.labelled: dataset.labelled}
    if fit.unlabelled is not None:
        read[fit.unlabelled] = dataset.unlabelled
    by_step = {
        step: placement_tallies(dataset, outputs, group, device) for step, outputs in read.items()
    }
    known = sorted(set().union(*by_step.values()))
    where = f"{fit.name}: augmentation.placements"
    if unknown := [name for name in placements if name not in known]:
        raise ConfigurationError(
            f"{where} = {printable(unknown[0])}: no utterance is there: {_remedy(known)}"
        )
    found: dict[str, Tally] = {}
    for step, tallies in by_step.items():
        if not tallies.keys() & set(placements):
            names = printable(", ".join(placements), MAX_NAMES)
            remedy = _remedy(sorted(tallies))
            raise ConfigurationError(f"{where} = {names}: leaves nothing of {step}: {remedy}")
        for name, tally in tallies.items():
            found[name] = found.get(name, Tally()) + tally
    assert sum(found.values(), Tally()) == every, "manifests count their rows"
    return {name: tally for name, tally in sorted(found.items()) if name not in placements}


def _remedy(known: Sequence[str]) -> str:
    if set(known) <= {WITHOUT_PLACEMENT}:
        return (
            "the partitions name no placement: need placements = [], or ingest with --placements, "
            "or by this version, into a new --run"
        )
    return f"need some of {printable(', '.join(known), MAX_NAMES)}"


def placement_tallies(
    dataset: Dataset, outputs: Sequence[Output], group: ProcessGroup, device: torch.device
) -> dict[str, Tally]:
    """Count the utterances of partitions by placement; ranks share the reading, and know all.

    With lattices only utterances that have one are counted.
    """

    def read(output: Output) -> list[tuple[str, int]]:
        """Read the placement and the duration of each utterance that could be trained on."""
        uri = output.uri(dataset.run_uri)
        index = scan_checked(dataset.store, uri, read_partition_index)
        names = [each or WITHOUT_PLACEMENT for each in index.placements]
        rows = list(zip(names, index.durations_ms, strict=True))
        if dataset.lattices is None:
            return rows
        return [rows[number] for number in dataset.lattices.decoded_rows(output).tolist()]

    numbers: Counter[str] = Counter()
    durations: Counter[str] = Counter()
    for _, placed in prefetch(read, outputs[group.rank() :: group.size()], INDEXES_IN_FLIGHT):
        for name, duration_ms in placed:
            numbers[name] += 1
            durations[name] += duration_ms
    counted = json.dumps({name: [numbers[name], durations[name]] for name in sorted(numbers)})
    found: dict[str, Tally] = {}
    for text in gather_text(counted, group, "placements", device):
        for name, counts in json.loads(text).items():
            found[name] = found.get(name, Tally()) + Tally(*counts)
    return found


TakePace = Callable[[Sequence[SubEpochPace]], object]


def fit_model(
    fit: Fit,
    store: ObjectStore,
    run_uri: str,
    group: ProcessGroup,
    device: torch.device = CPU,
    take_pace: TakePace = lambda _: None,
) -> StepResult:
    """Train a model on all ranks and store it; return its manifest, and whether it existed.

    This rank trains on `device`. What is stored lies on no device, and is loaded on any.
    `take_pace` receives the pace of the sub-epochs that this process trained.

    A model is the same work on any number of ranks: a finished one is found, and an unfinished one
    is resumed. The bits differ, and the curve says how many ranks made each sub-epoch.
    """
    if fit.newbob is not None and DEV in subsets_of_run(store, run_uri):
        fit = fit.on_development_speakers()
    spec = StepSpec(store, run_uri, model_step(fit.name), fit.config, fit.inputs)
    train = partial(train_model, fit, group, device, take_pace)
    try:
        return run_step(spec, train, barrier=partial(collectives.barrier, group))
    finally:
        # What follows in this process must not depend on whether the fit ran in it.
        set_float32_products("float32")


def train_model(
    fit: Fit, group: ProcessGroup, device: torch.device, take_pace: TakePace, step: StepRun
) -> Manifest | None:
    """Train the model of `fit` on `device`; rank 0 stores it and returns the step's manifest."""
    check_ranks(fit.training, fit.name, group.size(), launched_ranks_per_host())
    context = step.context
    store, run_uri = context.store, context.run_uri
    labelled = read_manifest(store, run_uri, fit.labelled)
    # Ranks that divide a model read the same data, and draw the same random numbers.
    num_parts = fit.training.model_parallel_ranks
    parts = ParallelRanks.of(group, num_parts) if num_parts > 1 else None
    data_group = parts.data if parts else group
    # Ranks draw their own dropout; their initial weights are replaced by rank 0's.
    seed = fit.training.seed + data_group.rank()
    torch.manual_seed(seed % 2**64)  # the largest seed is 2^64 - 1
    senone_counts = labelled.statistic("senone_counts", list[int])
    model = make_model(fit.model, len(senone_counts))
    if fit.warm_start == "none":
        features = (read_manifest(store, run_uri, step) for step in fit.moments)
        moments = (Moments.from_dict(f.statistic("moments", dict[str, Any])) for f in features)
        model.freeze_normalization(reduce(Moments.merge, moments))
    else:
        warm_start(model, fit, store, run_uri)
    model.to(device)  # initial weights are those of the CPU's random numbers, wherever it trains
    dataset = open_dataset(fit, store, run_uri, labelled, data_group)
    if group.rank() == 0 and not dataset.is_validated:
        log(f"train {fit.name}: {NOT_VALIDATED}")
    tally = labelled.tally_out
    if isinstance(fit.criterion, SequenceCriterion):
        tally = read_manifest(store, run_uri, fit.criterion.lattices).tally_out
    elif fit.unlabelled is not None:
        tally += read_manifest(store, run_uri, fit.unlabelled).tally_out
    by_placement = left_out_placements(fit, dataset, tally, group, device)
    left_out = sum(by_placement.values(), Tally())
    trainee = model
    if parts:
        part = split_model(model, parts.model)
        assert isinstance(part, AcousticModel)
        trainee = part.to(device)
    checkpoints = Checkpointer(
        store,
        join_uri(run_uri, context.step, CHECKPOINTS_FOLDER),
        context.fingerprint,
        group,
        fit.checkpoints.num_kept,
        num_parts=num_parts,
    )
    selects = len(fit.training.minibatch_selection.factors) > 1
    loop = SelectingFitting if selects else Fitting
    fitting = loop(fit, trainee, dataset, checkpoints, data_group)
    curve = fitting.run()
    take_pace(fitting.pace)
    if parts:
        model.load_state_dict(merged_state(trainee, parts.model))
    # The student too takes the priors of the labelled alignment.
    trained = TrainedModel(model.eval(), log_priors(senone_counts))
    if group.rank() != 0:
        return None
    statistics: dict[str, Any] = {"curve": curve, "num_ranks": group.size()}
    if by_placement:
        statistics["left_out"] = {name: asdict(each) for name, each in by_placement.items()}
    data = Tally(tally.utterances - left_out.utterances, tally.duration_ms - left_out.duration_ms)
    return store_model(step, trained, data, statistics, left_out)


def warm_start(model: AcousticModel, fit: Fit, store: ObjectStore, run_uri: str) -> None:
    """Begin from the weights of a model that was trained on a part of the data (000 3.2).

    Its normalization comes with them: they were learnt of inputs that it normalized. Raises
    ConfigurationError where that model is of another form.
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


def development_partitions(fit: Fit, store: ObjectStore, run_uri: str) -> tuple[Output, ...]:
    """Return the partitions of development speakers on which the fit is validated, if any.

    Newbob's loss decides on rates, so the fit names whom it is of. Other fits only show theirs, and
    no manifest of a model depends on it. The aligner trains before the speakers are aligned.
    Raises ValueError where newbob's loss is of development speakers, and they have no utterance.
    """
    step = fit.validation
    if fit.newbob is None and fit.labelled == ALIGNMENT_STEP:
        step = DEV_ALIGNMENT_STEP if is_finished(store, run_uri, DEV_ALIGNMENT_STEP) else ""
    if step in ("", LEFT_OUT):
        return ()
    found = tuple(read_manifest(store, run_uri, step).outputs)
    # Without this, labelled speakers would be left out, and not those whom the manifest names.
    if fit.newbob is not None and not found:
        raise ValueError(f"{fit.name}: {step}: {NO_DEVELOPMENT}")
    return found


def most_validated_ms(sub_epochs: Sequence[SubEpoch], labelled: Tally, unlabelled: Tally) -> int:
    """Return the milliseconds of speech that validating may read at each sub-epoch's end."""
    read_ms = {True: labelled.duration_ms, False: unlabelled.duration_ms}
    mean_ms = sum(read_ms[each.labelled] / each.num_shares for each in sub_epochs) / len(sub_epochs)
    return max(1, min(VALIDATION_MS, int(VALIDATION_SHARE * mean_ms)))


def open_dataset(
    fit: Fit, store: ObjectStore, run_uri: str, labelled: Manifest, group: ProcessGroup
) -> Dataset:
    """Open the training partitions, and those to validate on, as one rank sees them.

    Raises ValueError where newbob's loss is of development speakers, and they have no utterance.
    """
    unlabelled: tuple[Output, ...] = ()
    unlabelled_tally = Tally()
    if fit.unlabelled is not None:
        partitions = read_manifest(store, run_uri, fit.unlabelled)
        check_offsets(fit.sub_epochs, fit.training.soft_targets, partitions)
        unlabelled, unlabelled_tally = tuple(partitions.outputs), partitions.tally_out
    development, validation_ms = development_partitions(fit, store, run_uri), 0
    if fit.newbob is None:
        validation_ms = most_validated_ms(fit.sub_epochs, labelled.tally_out, unlabelled_tally)
    lattices = None
    if isinstance(criterion := fit.criterion, SequenceCriterion):
        shards = read_manifest(store, run_uri, criterion.lattices).outputs
        # Task n decoded partition n.
        by_partition = dict(zip((each.key for each in labelled.outputs), shards, strict=True))
        priors = log_priors(labelled.statistic("senone_counts", list[int])).numpy()
        smbr = Smbr(criterion.acoustic_scale, criterion.boost, priors)
        lattices = LatticeShards(store, run_uri, by_partition, smbr)
    return Dataset(
        store=store,
        run_uri=run_uri,
        labelled=tuple(labelled.outputs),
        unlabelled=unlabelled,
        delay=fit.model.delay,
        minibatch_frames=fit.training.minibatch_frames,
        seed=fit.training.seed,
        rank=group.rank(),
        world_size=group.size(),
        validation_one_in=fit.validation_one_in,
        augmentation=fit.augmentation,
        lattices=lattices,
        development=development,
        validation_ms=validation_ms,
        soft_targets=fit.training.soft_targets,
    )
