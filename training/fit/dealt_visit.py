"""One visit as the present ranks make it, from any position in it."""

from collections.abc import Generator

import torch

from training.data.cursor import Position
from training.data.dataset import Dataset
from training.data.minibatch import Minibatch
from training.data.resharding import redeal
from training.data.sub_epochs import Visit
from training.distributed import gather
from training.distributed.collectives import ProcessGroup


def deal_visit(
    visit: Visit, position: Position, dataset: Dataset, group: ProcessGroup
) -> tuple[Position, Generator[Minibatch, None, None]]:
    """The position, with every rank's number of minibatches, and what this rank has left to make.

    All ranks call this together; they count where the visit begins or is dealt again.
    """
    if position.done:
        plan = redeal(dataset, visit, position.visit, position.done)
    else:
        plan = dataset.plan(visit, position.visit)
    if not position.counts:
        count = torch.tensor([plan.num_minibatches()], dtype=torch.int32)
        position = position.dealt([int(each) for each in gather.gather(count, group, "visit")])
    return position, plan.minibatches(position.num_steps)
