"""Models of a user's own: a function that the recipe names makes them, "module:function"."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import nn

from infra.configuration import canonical_json
from infra.ranges import Range, check_ranges
from pipeline.splicing import NUM_INPUTS
from training.entry_point import EntryPoint, FactoryName, Settings, require_not_given
from training.models.acoustic_model import NetworkModel

GIVEN = ("num_inputs", "num_senones")
"""The arguments that every factory is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryConfig:
    """FactoryConfig: `factory(num_inputs=, num_senones=, **settings)` makes a torch module.

    `module(frames, lengths)` maps normalized frames (batch, frames, 192), and lengths on the host,
    to logits (batch, frames, senones). Logits t speak of frame t - `delay`, and depend on no frame
    more than `look_ahead` after that one; if `bidirectional`, they may depend on every frame. With
    `whole_utterances` it is not trained on chunks.
    """

    name: Literal["factory"] = "factory"
    factory: FactoryName
    look_ahead: Annotated[int, Range(0, 1000)]
    delay: Annotated[int, Range(0, 1000)] = 0
    bidirectional: bool = False
    whole_utterances: bool = False
    settings: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.bidirectional and self.look_ahead:
            raise ValueError(
                f"look_ahead = {self.look_ahead}: need 0 for a bidirectional model, which sees "
                "all frames"
            )
        if self.delay > self.look_ahead:
            raise ValueError(
                f"delay = {self.delay}: need at most look_ahead = {self.look_ahead}: a model that "
                "waits longer sees more"
            )
        require_not_given(self.settings, GIVEN)

    def __hash__(self) -> int:
        return hash(canonical_json(self))

    @property
    def ignores_lengths(self) -> bool:
        """Return False: nothing is known of the module."""
        return False

    def make_model(self, num_senones: int) -> NetworkModel:
        """Import the factory and let it make the module.

        ConfigurationError if it cannot be imported, does not take the settings, or fails.
        """
        entry_point = EntryPoint(self.factory, self.settings, GIVEN)
        network = entry_point.call(num_inputs=NUM_INPUTS, num_senones=num_senones)
        if not isinstance(network, nn.Module):
            raise entry_point.error(f"returns a {type(network).__name__}: need a torch.nn.Module")
        return NetworkModel(self, num_senones, network)
