"""The contract of acoustic models, whatever their architecture, over spliced log-mel frames."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from pipeline.filterbank import NUM_INPUTS, STACK
from pipeline.normalization import Moments
from training.settings.model_training import Precision
from training.settings.models import ModelConfig


class AcousticModel(nn.Module, ABC):
    """AcousticModel maps spliced frames to senone logits, with global mean and variance frozen in.

    Outputs are `config.delay` low-rate frames late: logits[t] speak of frame t - delay.
    """

    mean: Tensor
    inverse_deviation: Tensor

    def __init__(self, config: ModelConfig, num_senones: int) -> None:
        super().__init__()
        self.config = config
        self.num_senones = num_senones
        self.register_buffer("mean", torch.zeros(NUM_INPUTS))
        self.register_buffer("inverse_deviation", torch.ones(NUM_INPUTS))

    @property
    def device(self) -> torch.device:
        """Return where the model lies, and its inputs must."""
        return self.mean.device

    def whole_norm(self, norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the norm of the whole model's gradients, of that of those held here: the same."""
        return norm

    def freeze_normalization(self, moments: Moments) -> None:
        """Set the global mean and variance (003 IV-B2), the same for each of the spliced frames."""
        mean = torch.from_numpy(moments.mean).float()
        deviation = torch.from_numpy(moments.standard_deviation).float()
        self.mean.copy_(mean.repeat(STACK))
        self.inverse_deviation.copy_(deviation.clamp(min=1e-5).reciprocal().repeat(STACK))

    def forward(
        self,
        features: Float[Tensor, "batch frames dim"],
        lengths: Int64[Tensor, " batch"] | None = None,
        precision: Precision = "float32",
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `delay` frames late; padding starts at `lengths`, of the host, if any."""
        if lengths is None:
            lengths = torch.full((len(features),), features.shape[1])
        # Normalizing here spares a second pass over the features, 46 TB at a million hours.
        normalized = (features - self.mean).mul_(self.inverse_deviation)
        if precision == "bfloat16":
            # Logits of 8 bits: a CPU has no product of bfloat16 that gives float32. The softmax
            # over thousands of senones sums them in float32.
            return self.bfloat16_logits(normalized.bfloat16(), lengths).float()
        return self.normalized_logits(normalized, lengths)

    @abstractmethod
    def normalized_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return the logits of frames of mean 0 and variance 1."""

    @abstractmethod
    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Compute logits by weights rounded to bfloat16; gradients arrive at the float32 ones."""

    @property
    def carries_state(self) -> bool:
        """Return whether a state is carried from one piece of an utterance to the next."""
        return False

    def advance(
        self, normalized: Float[Tensor, "frames dim"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], object]:
        """Return the logits that an utterance's next frames complete, and the state after them.

        The state is None before the first frames; only models that carry one are asked.
        """
        del normalized, state, is_last
        raise AssertionError(f"a {type(self).__name__} carries no state")

    @torch.inference_mode()
    def utterance_logits(
        self, utterances: list[Float[Tensor, "_frames dim"]], precision: Precision = "float32"
    ) -> list[Float[Tensor, "_frames senones"]]:
        """Return logits of whole utterances, aligned with their frames, the delay undone."""
        delay = self.config.delay
        extended = utterances
        if delay:  # the last frame is repeated, so that the delayed outputs cover all frames
            extended = [torch.cat([each, each[-1:].expand(delay, -1)]) for each in utterances]
        lengths = torch.tensor([len(frames) for frames in extended])
        logits = self(pad_sequence(extended, batch_first=True), lengths, precision)
        return [
            row[delay : delay + len(frames)] for row, frames in zip(logits, utterances, strict=True)
        ]

    @torch.inference_mode()
    def piece_logits(
        self, pieces: Iterable[Float[Tensor, "_frames dim"]]
    ) -> Iterator[Float[Tensor, "_outputs senones"]]:
        """Yield an utterance's logits as its pieces arrive, of any lengths, 1 frame or more.

        Together they are those of `utterance_logits`. ValueError of a model that carries no state.
        """
        if not self.carries_state:
            raise ValueError(f"a {type(self).__name__} takes no pieces: give it whole utterances")
        state: object = None
        num_late = self.config.delay
        last = torch.empty(0, NUM_INPUTS, device=self.device)
        for piece in pieces:
            normalized = (piece - self.mean) * self.inverse_deviation
            logits, state = self.advance(normalized, state, False)
            yield logits[num_late:]
            num_late = max(num_late - len(logits), 0)
            last = normalized[-1:] if len(piece) else last
        logits, _ = self.advance(last.expand(self.config.delay, -1), state, True)
        yield logits[num_late:]


class NetworkModel(AcousticModel):
    """NetworkModel: any module from normalized frames and lengths to logits.

    `network(frames, lengths)` is given (batch, frames, 192) and the lengths on the host; it returns
    (batch, frames, senones). If it takes pieces, its `advance` is `AcousticModel.advance`.
    """

    def __init__(self, config: ModelConfig, num_senones: int, network: nn.Module) -> None:
        super().__init__(config, num_senones)
        self.network = network

    def normalized_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return the network's logits."""
        logits: Tensor = self.network(normalized, lengths)
        return logits

    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Call the network with rounded weights and buffers in the places of its own."""
        own = {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}
        rounded = {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in own.items()
        }
        logits: Tensor = functional_call(self.network, rounded, (normalized, lengths))
        return logits

    @property
    def carries_state(self) -> bool:
        """Return whether the network has the method."""
        return hasattr(self.network, "advance")

    def advance(
        self, normalized: Float[Tensor, "frames dim"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], object]:
        """Let the network advance."""
        logits, after = self.network.advance(normalized, state, is_last)  # type: ignore[operator]
        return logits, after
