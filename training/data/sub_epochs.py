"""Plan sub-epochs, shares of the data trained on at one learning rate (003 II-B, V-D).

`DataCursor` says how far training has come in them, whatever the number of ranks, and `Place` says
it in a checkpoint's record, to those who only watch. No module imported here imports torch.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from pipeline.filterbank import STACK
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import CHECKPOINTS_FOLDER
from pipeline.runs.sealed_json import read_sealed, typed_record
from pipeline.settings import LATTICE_OFFSET
from training.settings.model_training import SoftTargetsForm


@dataclass(frozen=True, slots=True)
class SubEpoch:
    """SubEpoch says which share of which data is trained on, how, and at what rate.

    Unlabelled rows begin `offset` after their own offset. That needs targets at all offsets, or a
    student that takes the best of them for labels.
    A validation sub-epoch reads what labelled training sub-epochs leave out.
    """

    labelled: bool
    share: int
    num_shares: int
    offset: int
    whole_utterances: bool
    learning_rate: float
    is_validation: bool = False

    on_one_rank: ClassVar[bool] = False
    """Whether rank 0 alone has data; the other ranks take empty steps."""


@dataclass(frozen=True, slots=True)
class ColdStart(SubEpoch):
    """ColdStart is the beginning of the first epoch, which rank 0 alone reads (004 5.2)."""

    on_one_rank: ClassVar[bool] = True


def supervised_sub_epochs(
    learning_rates: Sequence[float],
    num_chunked_epochs: int,
    data_one_in: int = 1,
    cold_start_one_in: int = 0,
) -> list[SubEpoch]:
    """Plan epochs over the labelled data, the offset rotating, whole utterances last (II-B).

    Each epoch reads the same one utterance in `data_one_in` (000 3.2). With a cold start the first
    epoch is `cold_start_one_in` sub-epochs, the first of which rank 0 alone reads (004 5.2).
    """
    found = list[SubEpoch]()
    for epoch, rate in enumerate(learning_rates):
        offset, whole = epoch % STACK, epoch >= num_chunked_epochs
        if epoch == 0 and cold_start_one_in:
            num_shares = cold_start_one_in
            found.append(ColdStart(True, 0, num_shares, offset, whole, rate))
            found += [
                SubEpoch(True, share, num_shares, offset, whole, rate)
                for share in range(1, num_shares)
            ]
        else:
            found.append(SubEpoch(True, 0, data_one_in, offset, whole, rate))
    return found


def sequence_sub_epochs(learning_rates: Sequence[float]) -> list[SubEpoch]:
    """Plan epochs over the labelled data in whole utterances, at the lattices' offset (VII-C3)."""
    return [SubEpoch(True, 0, 1, LATTICE_OFFSET, True, rate) for rate in learning_rates]


def trained_share(
    sub_epochs: Sequence[SubEpoch], begun: int, share: float, labelled: float, unlabelled: float
) -> float:
    """Return the share of a training that is done, by the hours that its sub-epochs read.

    It has trained on a share of the sub-epoch with the number `begun`, and on all before it. The
    labelled and the unlabelled data have so many hours.
    """
    hours = [(labelled if each.labelled else unlabelled) / each.num_shares for each in sub_epochs]
    done = sum(hours[:begun]) + share * sum(hours[begun : begun + 1])
    return done / sum(hours) if sum(hours) else 0.0


def check_offsets(
    sub_epochs: Sequence[SubEpoch], soft_targets: SoftTargetsForm, partitions: Manifest
) -> None:
    """Raise ValueError if passes rotate over offsets, and soft targets that need all are at one."""
    rotates = any(each.offset for each in sub_epochs if not each.labelled)
    if rotates and soft_targets != "best" and partitions.statistic("offsets", str) != "all":
        raise ValueError(
            f"{partitions.step}: its targets are at one offset, and targets.offsets = 'all' reads "
            "another in each pass: use targets.offsets = 'one', or make targets and partitions in "
            "a new --run"
        )


def scheduled_learning_sub_epochs(
    learning_rates: Sequence[float],
    num_sub_epochs: int,
    num_whole: int,
    labelled_rate_factor: float,
    num_labelled_shares: int,
    rotates: bool = False,
) -> list[SubEpoch]:
    """Plan sub-epochs of unlabelled data with labelled data after each, at a higher rate (V-D).

    A pass has `num_sub_epochs`; the rates are those of all passes. The paper makes one pass of 18
    sub-epochs, the last 3 on whole utterances. After each sub-epoch the next of
    `num_labelled_shares` of the labelled data is trained on. With `rotates`, each pass reads the
    unlabelled utterances at their next offset.
    """
    sub_epochs = []
    for step, rate in enumerate(learning_rates):
        whole = step >= len(learning_rates) - num_whole
        number, share = divmod(step, num_sub_epochs)
        offset = number % STACK if rotates else 0
        sub_epochs.append(SubEpoch(False, share, num_sub_epochs, offset, whole, rate))
        # The offset rotates once all shares of the labelled data have been trained on (V-D).
        share, offset = step % num_labelled_shares, step // num_labelled_shares % STACK
        labelled_rate = rate * labelled_rate_factor
        sub_epochs.append(SubEpoch(True, share, num_labelled_shares, offset, whole, labelled_rate))
    return sub_epochs


@dataclass(frozen=True, slots=True)
class DataCursor:
    """DataCursor holds the sub-epoch, and the steps that the present ranks have taken in it.

    A step is a minibatch; one of a larger minibatch size counts as several.

    `counts` holds the minibatches that each of them has in all, () where the sub-epoch, or its
    rest, is not sharded yet. `done` holds how many each rank took of those that came before them.
    """

    sub_epoch: int = 0
    done: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    num_steps: int = 0

    @property
    def num_steps_left(self) -> int:
        """Count the steps left in the sub-epoch: those of the rank with most minibatches."""
        return max(self.counts) - self.num_steps

    @property
    def share(self) -> float:
        """Return the share of all ranks' minibatches of the sub-epoch that they have taken."""
        before = sum(map(sum, self.done))
        taken = sum(min(self.num_steps, count) for count in self.counts)
        return (before + taken) / max(before + sum(self.counts), 1)

    def stepped(self, num_minibatches: int = 1) -> "DataCursor":
        """Return the place one step later, in which each rank took so many minibatches, if left."""
        return replace(self, num_steps=self.num_steps + min(num_minibatches, self.num_steps_left))

    def resumed(self, num_ranks: int) -> "DataCursor":
        """Return the same place for `num_ranks` ranks; after others the rest must be resharded."""
        if not self.counts or len(self.counts) == num_ranks:
            return self
        # A rank with fewer minibatches took them all, and then empty steps.
        done = tuple(min(self.num_steps, count) for count in self.counts)
        return DataCursor(self.sub_epoch, (*self.done, done))

    def next_sub_epoch(self) -> "DataCursor":
        """Return the beginning of the next sub-epoch."""
        return DataCursor(self.sub_epoch + 1)


MEASURES = (
    "cross_entropy",
    "frame_accuracy",
    "validation_cross_entropy",
    "validation_frame_accuracy",
)
"""What a point of a learning curve says of the model: in training, and where it is validated."""


def measures_of(point: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures that a point of a learning curve has."""
    return {name: point[name] for name in MEASURES if name in point}


def last_measures(manifest: Manifest) -> dict[str, float]:
    """Return the measures of a model's last sub-epoch; {} for what is no model."""
    if "curve" not in manifest.statistics:
        return {}
    curve = manifest.statistic("curve", list[dict[str, Any]])
    return measures_of(curve[-1]) if curve else {}


def measures_text(measures: Mapping[str, float]) -> str:
    """Write the measures of a sub-epoch for people; nothing if there are none."""
    parts = []
    for kind, prefix in (("training", ""), ("validation", "validation_")):
        if f"{prefix}cross_entropy" in measures:
            loss, accuracy = (measures[prefix + name] for name in MEASURES[:2])
            parts.append(f"{kind} cross-entropy {loss:.3f}, frame accuracy {accuracy:.1%}")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Place:
    """Place: the sub-epoch, from 0, and the share of its minibatches that are trained on.

    `measures` are those of the sub-epoch before; {} in the first.
    """

    sub_epoch: int = 0
    share: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)


def newest_place(store: ObjectStore, run_uri: str, step: str) -> Place:
    """Read the place of a model's newest checkpoint; the beginning where none is whole and says it.

    Checkpoints of training loops of the user's own say no place.
    """
    checkpoints = store.list(join_uri(run_uri, step, CHECKPOINTS_FOLDER))
    records = [info.uri for info in checkpoints if info.uri.endswith(".json")]
    # A training at work may remove it meanwhile.
    with suppress(ObjectNotFound, ValueError):
        if records:
            found = store.get(max(records))
            return read_sealed(found, "", lambda record: typed_record(Place, record["place"]))
    return Place()
