"""The whole state of training: model, optimizer, trainer and random numbers, of this rank."""

import hashlib

import torch
from torch import nn
from torch.optim import Optimizer

from infra.settings import printable
from training.trainers.parameters import plain_name
from training.trainers.trainer import State, Trainer


def whole_state(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> State:
    """Return all that training resumes from; this changes nothing and draws no random number.

    Names are those of the model without `torch.compile`.
    Store it before the next step: the tensors of model and optimizer are not copies. "claims" is
    not resumed from: `Checkpointer.save` compares it, and refuses ranks that have drifted apart.
    """
    random = {"cpu": torch.get_rng_state()}
    if trainer.parameters.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(trainer.parameters.device)
    return {
        "model": {plain_name(name): tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "trainer": trainer.state_dict(),
        "random": random,
        "claims": trainer.replica().claims().to_json(),
    }


def load_whole_state(
    state: State, model: nn.Module, optimizer: Optimizer, trainer: Trainer
) -> None:
    """Restore `whole_state()`, as it was stored or resharded; then enter the trainer.

    ValueError for a state of another model, optimizer or trainer.
    """
    try:
        _load(state, model, optimizer, trainer)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        said = printable(f"{type(error).__name__}: {error}", 500)
        raise ValueError(
            f"the checkpoint holds another training's state ({said}): remove the checkpoints to "
            "train again from the start"
        ) from error


def _load(state: State, model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> None:
    # Either model, the stored one or this one, may be compiled, wholly or in parts.
    stored = {plain_name(name): tensor for name, tensor in state["model"].items()}
    own_names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({own_names.get(name, name): each for name, each in stored.items()})
    # Tied weights have several names in the model's state, of which only the trainer's is averaged.
    trained = {name: stored[name] for name in trainer.parameters.named}
    with torch.no_grad():
        trainer.parameters.set_weights(trainer.parameters.flatten(trained))
    optimizer.load_state_dict(state["optimizer"])
    trainer.load_state_dict(state["trainer"])
    _restore_random(state["random"], trainer.parameters.device)


def _restore_random(random: State, device: torch.device) -> None:
    if "seed" in random:
        torch.manual_seed(random["seed"])
        return
    torch.set_rng_state(random["cpu"])
    if device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], device)
    elif device.type == "cuda":  # saved on a CPU, whose random numbers seed the GPU's
        torch.cuda.manual_seed(seed_of(random, "on a GPU"))
    elif "cuda" in random:
        # On a GPU the CPU's generator may never have moved: dropout would repeat its first masks.
        torch.manual_seed(seed_of(random, "on a CPU"))


def seed_of(random: State, purpose: str) -> int:
    """Draw a seed from a random state of any devices, the same one for the same purpose."""
    states = b"".join(random[name].numpy().tobytes() for name in sorted(random))
    return int.from_bytes(hashlib.sha256(states + purpose.encode()).digest()[:6], "big")
