"""The hybrid two-tier method: GTC within groups, BMUF across them (paper 000 2.3)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from training.distributed import collectives
from training.settings.trainers import HtmConfig
from training.trainers.bmuf import Bmuf, Mean
from training.trainers.gtc import ThresholdTrainer
from training.trainers.trainer import Trainer


class Htm(ThresholdTrainer, Bmuf):
    """Htm trains one model by GTC in each group of `group_size` ranks; BMUF joins the models.

    By default a group is the ranks of a host; their names are exchanged on construction. Groups of
    one rank are BMUF, where nothing is quantized; one group of several is GTC, where no
    block is filtered. Residuals survive a block's end. The papers' 2 is for gradients summed over a
    2048-frame minibatch: for a loss divided by 2048 it is 2 / 2048.
    """

    record = HtmConfig
    config: HtmConfig
    tier_setting = "group_size"

    def set_up(self) -> None:
        """Add GTC's residual to BMUF's blocks."""
        super().set_up()
        # One group skips the filter and so equals GTC: W_g + (W - W_g) is not W in floats.
        self._is_one_tier = self.num_models == 1 and self.config.group_size > 1

    @property
    def num_models(self) -> int:
        """Count the groups, N := M in eq. (5)."""
        return self._num_leaders

    @property
    def part(self) -> int:
        """Number this rank's group."""
        return self.group.rank() // self.config.group_size

    @property
    def first_rank(self) -> int:
        """Return the number of the group's first rank."""
        return self.part * self.config.group_size

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return BMUF's block state; with one group, the parameters, as GTC does."""
        return Trainer.shared_tensors(self) if self._is_one_tier else super().shared_tensors()

    def part_tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters, which GTC keeps equal within a group."""
        return {} if self._is_one_tier else Trainer.shared_tensors(self)

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return BMUF's update; with one group, the optimizer's state, as GTC does."""
        return Trainer.shared_state(self) if self._is_one_tier else super().shared_state()

    def is_comparison_due(self) -> bool:
        """Return whether ranks compare their replicas after this step, as BMUF or as GTC."""
        if self._is_one_tier:
            return Trainer.is_comparison_due(self)
        return super().is_comparison_due()

    def exchange_gradients(self) -> None:
        """Replace each gradient by the sum of what this rank's group sent."""
        assert self._tiers is not None
        # Fig. 1(a) of 000: GTC joins a group's gradients at every minibatch.
        if (lower := self._tiers.lower) is None:
            super().exchange_gradients()
            return
        gradients = self.parameters.gradients()
        try:
            gradients = self._sum.of(gradients, lower)
        except FloatingPointError:
            if not self._is_group_on_trial:
                raise
            # An error would leave the other groups waiting: NaNs reach them at the block's end.
            self._fault.note(self.num_steps + 1, self.parameters.present_gradients())
            gradients.fill_(torch.nan)
        self.parameters.set_gradients(gradients)

    @property
    def _is_group_on_trial(self) -> bool:
        """Return whether this is a trial, of which each group alone knows its gradients' NaNs."""
        return self._is_trial and not self._is_one_tier

    def average(self, values: Tensor, mean: Mean = collectives.all_reduce_mean) -> None:
        """Replace `values`, the same within a group, by their `mean` over the groups."""
        assert self._tiers is not None
        # Fig. 1(b), (c) of 000: one leader a group averages, and its group receives the mean.
        self._tiers.average(values, mean)

    def begin(self) -> None:
        """Start a block; with one group there are no blocks, and no models to keep for them."""
        if self._is_one_tier:
            self._take_over_residuals()
            self._models = None
        else:
            super().begin()

    def end_step(self) -> None:
        """Count the step; at a block's end join the groups, where there are several."""
        if not self._is_one_tier:
            super().end_step()

    def conclude(self) -> None:
        """Leave the global model to be evaluated; with one group, it is the ranks' own."""
        # A GPU's last headers arrive only now, and one may report a gradient that is not finite.
        if not self._is_group_on_trial:
            self._sum.check()
        if not self._is_one_tier:
            super().conclude()

    def set_evaluated(self) -> None:
        """Set the parameters to the global model; with one group, they are it."""
        if not self._is_one_tier:
            super().set_evaluated()
