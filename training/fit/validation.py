"""The loss on labelled data that training leaves out, evaluated by all ranks together."""

from contextlib import closing

import torch

from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.fit.steps import FrameTotals, minibatch_loss
from training.models.acoustic_model import AcousticModel

VALIDATION = SubEpoch(True, 0, 1, 0, False, 0.0, is_validation=True)
"""The utterances left out, in chunks, always at offset 0: losses of epochs are comparable."""


def validation_loss(model: AcousticModel, dataset: Dataset, group: ProcessGroup) -> float:
    """Mean cross-entropy a frame, the same on all ranks; draws no random number.

    Raises ValueError if no utterance is left out.
    """
    model.eval()
    total = FrameTotals()
    with torch.no_grad(), closing(dataset.plan(VALIDATION, 0).minibatches()) as minibatches:
        for minibatch in minibatches:
            total.add(minibatch_loss(model, minibatch)[1])
    sums = torch.tensor([total.num_frames, total.cross_entropy], dtype=torch.float64)
    collectives.all_reduce_sum(sums, group)
    num_frames, cross_entropy = map(float, sums)
    if num_frames == 0:
        raise ValueError(
            f"validation_one_in = {dataset.validation_one_in}: leaves no utterance out of "
            "training: need at least one for newbob's loss"
        )
    return cross_entropy / num_frames
