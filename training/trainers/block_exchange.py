"""Average what the models' blocks changed, and keep for later what a code does not send."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.gtc.encoding import take_message
from training.algorithms.gtc.gradient_threshold import Encoding, add_message
from training.algorithms.sparsification import top_k
from training.configuration.block_codes import BlockCode, Threshold, TopK
from training.distributed import collectives
from training.distributed.gather import gather_equal, gather_ragged
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import EntryPath, Rule
from training.trainers.statistics import norm_of

Mean: TypeAlias = Callable[[Tensor, ProcessGroup], None]
"""Replace values by their mean over a group's ranks, bitwise the same on each."""

RESIDUALS = "block_residuals"
PURPOSE = "block changes"


class BlockExchange:
    """BlockExchange averages changes by a code; what a message leaves out is in a residual.

    A message holds this model's share of the mean, change / N, and the mean is the messages' sum.
    So residuals add up to what the global model still lacks, and a sum over other numbers of
    models is the same. In HTM only a group's leader has a residual other than zeros.
    """

    def __init__(self, code: BlockCode, parameters: FlatParameters) -> None:
        self.code = code
        self._residual = parameters.zeros() if code.has_residual else None

    def mean(self, change: Float[Tensor, " elements"], group: ProcessGroup) -> None:
        """Replace `change` by the mean of what ranks sent; one that is not finite reaches all."""
        if self._residual is None:
            _average_rounded(change, group)
            return
        share = change / group.size()
        # In rank order on each rank, so that all have the same bits.
        if isinstance(self.code, TopK):
            message = top_k.take_message(self._residual, share, self.code)
            change.zero_()
            for each in gather_equal(message, group, PURPOSE):
                top_k.add_message(change, each, self.code)
        elif isinstance(self.code, Threshold):
            change.copy_(_sum_signs(self._residual, share, self.code.change_threshold, group))

    def gather_residuals(self, lower: ProcessGroup) -> None:
        """Give a group's leader the residuals that resharding left on others of its ranks."""
        if self._residual is None:
            return
        collectives.all_reduce_sum(self._residual, lower)
        if lower.rank() > 0:
            self._residual.zero_()

    def take_up_residual(self, parameters: FlatParameters, lower: ProcessGroup | None) -> None:
        """Add to the model what more leaders had not sent, as one leader alone sends nothing.

        Only resharding leaves such a residual; `lower` are the leader's ranks, None if it is one.
        """
        if self._residual is None:
            return
        if lower is not None:
            collectives.all_reduce_sum(self._residual, lower)
        if self._residual.any():
            parameters.set_weights(parameters.weights() + self._residual)
            self._residual.zero_()

    def carry_over(self, old: FlatParameters, new: FlatParameters) -> None:
        """Keep the residual of tensors that are still trained; that of frozen ones is dropped."""
        if self._residual is not None:
            self._residual = new.carry_over(self._residual, old)

    def residual_norm(self) -> float:
        """Return the residual's norm, 0 where a code has none; waits for its device."""
        return 0.0 if self._residual is None else norm_of(self._residual)

    def state_dict(self, parameters: FlatParameters) -> dict[str, Any]:
        """Copy the residual, by parameter."""
        return {} if self._residual is None else {RESIDUALS: parameters.by_name(self._residual)}

    def load_state_dict(self, state: Mapping[str, Any], parameters: FlatParameters) -> None:
        """Restore `state_dict()`."""
        if self._residual is not None:
            self._residual = parameters.flatten(state[RESIDUALS])


def residual_rules(trainer: Mapping[str, Any]) -> dict[EntryPath, Rule]:
    """Return how other numbers of ranks take the residuals over: nothing of a change is lost."""
    return {("trainer", RESIDUALS): "sum"} if RESIDUALS in trainer else {}


def _average_rounded(change: Float[Tensor, " elements"], group: ProcessGroup) -> None:
    rounded = change.to(torch.bfloat16)
    collectives.all_reduce_sum(rounded, group)
    change.copy_(rounded).div_(group.size())


def _sum_signs(
    residual: Float[Tensor, " elements"],
    share: Float[Tensor, " elements"],
    threshold: float,
    group: ProcessGroup,
) -> Float[Tensor, " elements"]:
    # On a CPU: one message a block is no step's.
    kept = residual.cpu()
    message = take_message(kept, share.cpu(), threshold)
    residual.copy_(kept)
    messages = gather_ragged(message.to(residual.device), group, PURPOSE)
    counts = torch.zeros(len(residual), dtype=torch.int32)
    if any(int(each[0]) == Encoding.NOT_FINITE for each in messages):
        return torch.full_like(share, torch.nan)
    for each in messages:
        add_message(counts, each.cpu())
    return counts * threshold
