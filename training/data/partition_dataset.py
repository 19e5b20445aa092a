"""A run's training partitions as a torch dataset, for trainers that are not megahour's."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from infra.settings import Range, Seed, check_ranges
from infra.store.object_store import ObjectStore, normalize_uri
from pipeline.filterbank import NUM_INPUTS, STACK
from pipeline.runs.increment import store_of_chain
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import PARTITIONS_STEP
from training.data.dataset import Dataset, SubEpochReader
from training.data.minibatch import Minibatch
from training.data.sub_epochs import DataCursor, SubEpoch
from training.data.targets import StoredTargets
from training.distributed.process_group import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSettings:
    """ReadingSettings: passes over the partitions, and the minibatches of each rank.

    Chunks have 32 low-rate frames, unless `whole_utterances`. The targets of a model whose outputs
    are late are `delay` frames late too. A pass has `num_sub_epochs` shares of the rows.
    """

    minibatch_frames: Annotated[int, Range(1, 100_000_000)] = 2048
    num_passes: Annotated[int, Range(1, 100_000)] = 1
    num_sub_epochs: Annotated[int, Range(1, 100_000)] = 1
    whole_utterances: bool = False
    delay: Annotated[int, Range(0, 1000)] = 0
    seed: Seed = 0

    __post_init__ = check_ranges

    def sub_epochs(self, rotates: bool) -> list[SubEpoch]:
        """Return the sub-epochs of all passes; each pass reads the next offset if it `rotates`."""
        return [
            SubEpoch(
                False,
                share,
                self.num_sub_epochs,
                number % STACK if rotates else 0,
                self.whole_utterances,
                0.0,
            )
            for number in range(self.num_passes)
            for share in range(self.num_sub_epochs)
        ]


class PartitionDataset(IterableDataset[Minibatch]):
    """PartitionDataset yields a rank's minibatches, with the k best as `StoredTargets`.

    All ranks of `group` iterate together, and each is given as many minibatches: a rank with fewer
    is given some without a target, whose `num_frames` is 0. Each row is on one rank once a pass.

    `state_dict` names a place between two minibatches, the same on all ranks. Loaded on any number
    of ranks, it continues there: no minibatch is lost or repeated.
    """

    def __init__(
        self,
        run_uri: str,
        group: ProcessGroup,
        settings: ReadingSettings | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings or ReadingSettings()
        run_uri = normalize_uri(run_uri)
        store = store or store_of_chain(run_uri)
        partitions = read_manifest(store, run_uri, PARTITIONS_STEP)
        self.dataset = Dataset(
            store=store,
            run_uri=run_uri,
            labelled=(),
            unlabelled=tuple(partitions.outputs),
            delay=self.settings.delay,
            minibatch_frames=self.settings.minibatch_frames,
            seed=self.settings.seed,
            rank=group.rank(),
            world_size=group.size(),
            soft_targets="stored",
        )
        rotates = partitions.statistic("offsets", str) == "all"
        self.sub_epochs = self.settings.sub_epochs(rotates)
        self._group = group
        self._cursor = DataCursor()
        digests = "".join(output.sha256 for output in partitions.outputs)
        self._partitions = hashlib.sha256(digests.encode()).hexdigest()

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield all minibatches from the present place on; threads read ahead.

        ValueError in a worker process of a DataLoader.
        """
        if get_worker_info() is not None:
            raise ValueError(
                "num_workers of the DataLoader: need 0: threads of this process read ahead, and a "
                "worker's place would not be in state_dict()"
            )
        reader = SubEpochReader(self.dataset, self.sub_epochs, self._group)
        while self._cursor.sub_epoch < len(self.sub_epochs):
            self._cursor, minibatches = reader.begin(self._cursor)
            with closing(minibatches):
                while self._cursor.num_steps_left > 0:
                    # Before the caller has it: a state saved after this step does not repeat it.
                    self._cursor = self._cursor.stepped()
                    found = next(minibatches, None)
                    yield _without_target() if found is None else found
            self._cursor = self._cursor.next_sub_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last minibatch that was given, as plain values."""
        return {
            "settings": asdict(self.settings),
            "partitions": self._partitions,
            "cursor": asdict(self._cursor),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a place that any rank saved.

        ValueError if other settings or partitions led there.
        """
        if dict(state["settings"]) != asdict(self.settings):
            raise ValueError(
                f"the state was saved with {state['settings']}, and these are "
                f"{asdict(self.settings)}: need the same, or another order would begin"
            )
        if state["partitions"] != self._partitions:
            raise ValueError(
                "the state was saved in other partitions than these: need the same, or begin anew"
            )
        saved = state["cursor"]
        done = tuple(tuple(counts) for counts in saved["done"])
        place = saved["sub_epoch"], done, tuple(saved["counts"]), saved["num_steps"]
        self._cursor = DataCursor(*place).resumed(self._group.size())


def _without_target() -> Minibatch:
    """Return a minibatch of one frame, which has no target."""
    targets = StoredTargets(
        torch.zeros(1, 1, 1, dtype=torch.int64),
        torch.zeros(1, 1, 1),
        torch.zeros(1, 1, 1),
        torch.zeros(1, 1),
    )
    return Minibatch(torch.zeros(1, 1, NUM_INPUTS), torch.ones(1, dtype=torch.int64), targets, 1)
