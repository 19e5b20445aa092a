"""Try a model of a user's own on small minibatches: what every other part takes for granted."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from infra.settings import ConfigurationError
from pipeline.filterbank import NUM_INPUTS
from training.entry_point import described
from training.models.acoustic_model import AcousticModel
from training.models.losses import NO_LABEL, hard_cross_entropy
from training.models.store import make_model
from training.settings.model_training import Precision
from training.settings.models import ModelConfig
from training.tensor_encoding import decode_state, encode_state

LENGTHS = (32, 21, 1)
"""The frames of a minibatch's segments: chunks of training have 1 to 32."""

NUM_CUTS = 40
"""The places at which the future is changed: more than the frames of most models' chunks."""

NUM_AFTER = 256
"""The frames after these places: a model that sees a single frame so far ahead is found."""

PIECES = [1, 7, 0, 3, 16, 13]
"""The frames of an utterance's pieces, as they might arrive."""

TOLERANCE = 1e-4
"""The largest difference that is rounding, relative to the largest logit."""


def check_contract(config: ModelConfig, num_senones: int, precision: Precision) -> None:
    """Make a model, and try all that training, targets and decoding assume of it.

    Same seed, same weights and gradients; a state that can be stored; a finite logit for each frame
    and senone; padding reaches no frame; the look-ahead is as declared; pieces of an utterance give
    what the whole gives.
    ConfigurationError says which does not hold, and a remedy.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = make_model(config, num_senones)
        torch.manual_seed(1)
        twin = make_model(config, num_senones)
        _require_equal(model.state_dict(), twin.state_dict(), "two models of one seed")
        _check_storage(model)
        first, second = _gradients(model, precision), _gradients(twin, precision)
        _require_equal(first, second, "the gradients of one minibatch, computed twice,")
        with torch.inference_mode():
            model.eval()
            _check_padding(model)
            if not config.bidirectional:
                _check_look_ahead(model)
            if model.carries_state:
                _check_pieces(model)


def _check_storage(model: AcousticModel) -> None:
    try:
        decode_state(encode_state(model.state_dict()))
    except (TypeError, ValueError) as error:
        need = "need tensors of numbers: register other buffers with persistent=False"
        raise ConfigurationError(f"state_dict() cannot be stored: {error}: {need}") from error


def _gradients(model: AcousticModel, precision: Precision) -> dict[str, Tensor]:
    """Return the gradients of a minibatch of chunks, or of utterances, in training."""
    torch.manual_seed(2)
    lengths = torch.tensor(LENGTHS)
    features = torch.randn(len(LENGTHS), max(LENGTHS), NUM_INPUTS)
    labels = torch.randint(model.num_senones, features.shape[:2])
    labels[torch.arange(max(LENGTHS)) >= lengths.view(-1, 1)] = NO_LABEL
    model.train()
    logits = _logits(model, features, lengths, precision)
    try:
        hard_cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(f"backward(): {described(error)}") from error
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    if not found:
        raise ConfigurationError("no parameter has a gradient: need one to train")
    for name, gradient in found.items():
        if not bool(gradient.isfinite().all()):
            raise ConfigurationError(f"the gradient of {name} is not finite: need a finite one")
    return found


def _check_padding(model: AcousticModel) -> None:
    lengths = torch.tensor(LENGTHS)
    features = torch.randn(len(LENGTHS), max(LENGTHS), NUM_INPUTS)
    is_padding = (torch.arange(max(LENGTHS)) >= lengths.view(-1, 1)).unsqueeze(-1)
    zeros, noise = features.masked_fill(is_padding, 0.0), torch.randn_like(features)
    padded = _logits(model, zeros, lengths)
    others = _logits(model, torch.where(is_padding, noise, features), lengths)
    for row, length in enumerate(LENGTHS):
        alone = _logits(model, features[row : row + 1, :length], lengths[row : row + 1])[0]
        for logits in (padded[row, :length], others[row, :length]):
            if not _is_close(logits, alone):
                raise ConfigurationError(
                    f"padding changes the logits of {length} frames, padded to {max(LENGTHS)}: "
                    "need frames that see none beyond `lengths`, such as by a mask"
                )


def _check_look_ahead(model: AcousticModel) -> None:
    """Change an utterance from some frame on, at each of many places, and compare what is before.

    Logits are aligned with their frames, so that a delay counts as looking ahead.
    """
    look_ahead = model.config.look_ahead
    cuts = range(look_ahead + 1, look_ahead + 1 + NUM_CUTS)
    utterance = torch.randn(cuts.stop + NUM_AFTER, NUM_INPUTS)
    changed = utterance.repeat(len(cuts), 1, 1)
    for row, cut in enumerate(cuts):
        changed[row, cut:] = 3 * torch.randn(len(utterance) - cut, NUM_INPUTS)
    # In one minibatch, so that all are computed in the same order.
    logits, *others = model.utterance_logits([utterance, *changed])
    seen = {
        cut - frame: (frame, cut)
        for cut, other in zip(cuts, others, strict=True)
        for frame in range(cut)
        if not _is_close(other[frame], logits[frame])
    }
    if seen and (most := max(seen)) > look_ahead:
        frame, cut = seen[most]
        raise ConfigurationError(
            f"look_ahead = {look_ahead}: the logits of frame {frame} change with frame {cut}: need "
            f"{most} or more, or bidirectional = true for a model that sees all frames"
        )


def _check_pieces(model: AcousticModel) -> None:
    utterance = torch.randn(sum(PIECES), NUM_INPUTS)
    (whole,) = model.utterance_logits([utterance])
    found = torch.cat(list(model.piece_logits(torch.split(utterance, PIECES))))
    if found.shape != whole.shape or not _is_close(found, whole):
        raise ConfigurationError(
            f"advance() gives other logits for pieces of {PIECES} frames than the whole utterance "
            "has: need the same, or no such method"
        )


def _logits(
    model: AcousticModel,
    features: Float[Tensor, "batch frames dim"],
    lengths: Int64[Tensor, " batch"],
    precision: Precision = "float32",
) -> Float[Tensor, "batch frames senones"]:
    """Compute logits; ConfigurationError if the model fails, or gives none for each frame."""
    given = f"frames {tuple(features.shape)} and lengths {lengths.tolist()} in {precision}"
    try:
        logits: Tensor = model(features, lengths, precision)
    except Exception as error:
        raise ConfigurationError(f"{given}: {described(error)}") from error
    shape = *features.shape[:2], model.num_senones
    if logits.shape != shape or logits.dtype != torch.float32:
        found = f"{logits.dtype} {tuple(logits.shape)}"
        raise ConfigurationError(f"{given} give {found}: need float32 {shape}")
    for row, length in enumerate(lengths.tolist()):
        if not bool(logits[row, :length].isfinite().all()):
            raise ConfigurationError(f"{given} give logits that are not finite: need finite ones")
    return logits


def _require_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    differing = [name for name, each in first.items() if not torch.equal(each, second[name])]
    if differing:
        raise ConfigurationError(
            f"{what} differ in {differing[0]}: need random numbers of torch's generator alone, and "
            "sums in a fixed order"
        )


def _is_close(found: Tensor, expected: Tensor) -> bool:
    largest = float(expected.abs().max())
    return float((found - expected).abs().max()) <= TOLERANCE * max(largest, 1e-3)
