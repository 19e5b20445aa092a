"""Fit one acoustic model: restore, train visit by visit on all ranks, checkpoint, store."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from infra.object_store import ObjectStore, join_uri
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.steps.commit import StepContext, finished_manifest, step_context
from pipeline.steps.manifest import Manifest, Output, input_digests, read_manifest
from training import collectives
from training.acoustic_model import AcousticModel, ModelConfig
from training.checkpoint import Checkpoints
from training.collectives import ProcessGroup
from training.dataset import Dataset
from training.loop import LoopConfig, VisitResult, train_visits
from training.model_store import TrainedModel, log_priors, store_model
from training.recipes import TrainerConfig
from training.schedule import Visit
from training.trainers import Bmuf, Gtc, Htm, Synchronous, Trainer


@dataclass(frozen=True, slots=True)
class Fit:
    """One model to be trained: its name, form, data, visits and trainer."""

    name: str
    model: ModelConfig
    labelled: str
    unlabelled: str | None
    visits: Sequence[Visit]
    loop: LoopConfig
    trainer: TrainerConfig
    seed: int

    @property
    def inputs(self) -> list[str]:
        """The steps whose manifests this model depends on."""
        moments = [f"features/{subset}" for subset in ("labelled", "unlabelled")]
        return [self.labelled, *([self.unlabelled] if self.unlabelled else []), *moments]


def fit_model(
    fit: Fit, store: ObjectStore, run_uri: str, group: ProcessGroup
) -> tuple[Manifest, bool]:
    """Train and store a model on all ranks of `group`; its manifest, and whether it was there."""
    config = {**asdict(fit), "num_ranks": group.size()}
    inputs = input_digests(store, run_uri, fit.inputs)
    context = step_context(store, run_uri, f"models/{fit.name}", config, inputs)
    if (done := finished_manifest(context)) is not None:
        return done, True
    labelled = read_manifest(store, run_uri, fit.labelled)
    torch.manual_seed(fit.seed + group.rank())
    model = AcousticModel(fit.model, len(labelled.statistics["senone_counts"]))
    model.freeze_normalization(global_moments(store, run_uri))
    dataset = open_dataset(fit, store, run_uri, labelled.outputs, group)
    curve = train(fit, context, model, dataset, group)
    data = labelled.tally_out + unlabelled_tally(fit, store, run_uri)
    trained = TrainedModel(model.eval(), log_priors(labelled.statistics["senone_counts"]))
    if group.rank() == 0:
        store_model(context, trained, config, inputs, data, {"curve": curve})
    collectives.barrier(group)
    return read_manifest(store, run_uri, context.step), False


def global_moments(store: ObjectStore, run_uri: str) -> Moments:
    """The statistics of labelled and unlabelled frames together; held-out ones take no part."""
    parts = [
        Moments.from_dict(read_manifest(store, run_uri, f"features/{subset}").statistics["moments"])
        for subset in ("labelled", "unlabelled")
    ]
    return parts[0].merge(parts[1])


def unlabelled_tally(fit: Fit, store: ObjectStore, run_uri: str) -> Tally:
    """What the unlabelled partitions hold, if this model is trained on them."""
    return read_manifest(store, run_uri, fit.unlabelled).tally_out if fit.unlabelled else Tally()


def open_dataset(
    fit: Fit, store: ObjectStore, run_uri: str, labelled: tuple[Output, ...], group: ProcessGroup
) -> Dataset:
    """One rank's view of the training partitions."""
    unlabelled = read_manifest(store, run_uri, fit.unlabelled).outputs if fit.unlabelled else ()
    return Dataset(
        store=store,
        run_uri=run_uri,
        labelled=labelled,
        unlabelled=unlabelled,
        look_ahead=fit.model.look_ahead,
        minibatch_frames=fit.loop.minibatch_frames,
        seed=fit.seed,
        rank=group.rank(),
        world_size=group.size(),
    )


def train(
    fit: Fit, context: StepContext, model: AcousticModel, dataset: Dataset, group: ProcessGroup
) -> list[dict[str, Any]]:
    """Train visit by visit, going on from a checkpoint if there is one; the learning curve."""
    optimizer = torch.optim.Adam(model.parameters())
    trainer = make_trainer(fit.trainer, model, optimizer, group)
    checkpoints = Checkpoints(
        context.store,
        join_uri(context.run_uri, context.step, "checkpoints"),
        context.identity,
        group.rank(),
        group.size(),
        lambda: collectives.barrier(group),
    )
    first, state = checkpoints.restore()
    curve: list[dict[str, Any]] = []
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        trainer.load_state_dict(state["trainer"])
        curve = state["curve"]

    def end_of_visit(index: int, result: VisitResult) -> None:
        curve.append(point(fit.visits[index], result, group))
        whole = {
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "trainer": trainer.state_dict(),
            "curve": curve,
        }
        checkpoints.save(index, whole)

    with trainer:
        train_visits(
            model,
            optimizer,
            dataset,
            fit.visits,
            first,
            fit.loop,
            lambda count: collectives.maximum(count, group),
            end_of_visit,
            f"train {fit.name}",
        )
    return curve


def point(visit: Visit, result: VisitResult, group: ProcessGroup) -> dict[str, Any]:
    """One point of the learning curve: this visit's means over all ranks' frames."""
    totals = torch.tensor(
        [result.num_frames, result.cross_entropy, result.num_correct], dtype=torch.float64
    )
    collectives.add(totals, group)
    num_frames, cross_entropy, num_correct = totals.tolist()
    return {
        "labelled": visit.labelled,
        "learning_rate": visit.learning_rate,
        "num_frames": int(num_frames),
        "cross_entropy": cross_entropy / max(num_frames, 1),
        "frame_accuracy": num_correct / max(num_frames, 1),
    }


def make_trainer(
    config: TrainerConfig,
    model: AcousticModel,
    optimizer: torch.optim.Optimizer,
    group: ProcessGroup,
) -> Trainer:
    """The trainer that the recipe names (003 VI, 000 2)."""
    if config.name == "synchronous":
        return Synchronous(model, optimizer, group=group)
    if config.name == "gtc":
        threshold = config.gradient_threshold
        return Gtc(model, optimizer, group=group, gradient_threshold=threshold)
    blocks: Mapping[str, Any] = {
        "block_size": config.block_size,
        "block_learning_rate": config.block_learning_rate,
        "momentum_constant": config.momentum_constant,
    }
    if config.name == "bmuf":
        return Bmuf(model, optimizer, group=group, **blocks)
    return Htm(
        model,
        optimizer,
        group=group,
        group_size=config.group_size,
        gradient_threshold=config.gradient_threshold,
        **blocks,
    )
