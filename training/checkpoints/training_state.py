"""The whole state of training: model, optimizer, trainer and random numbers, of this rank."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from training.trainers.trainer import Trainer


def whole_state(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> dict[str, Any]:
    """All that training goes on from; taking it changes nothing, and draws no random number.

    Store it before training goes on: the tensors of model and optimizer are not copies.
    """
    random = {"cpu": torch.get_rng_state()}
    if trainer.parameters.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(trainer.parameters.device)
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "trainer": trainer.state_dict(),
        "random": random,
    }


def load_whole_state(
    state: dict[str, Any], model: nn.Module, optimizer: Optimizer, trainer: Trainer
) -> None:
    """Restore `whole_state()`, or what `folding.fold` made of it; then enter the trainer."""
    model.load_state_dict(state["model"])
    # Tied weights have several names in the model's state, of which folding averages the trainer's.
    trained = {name: state["model"][name] for name in trainer.parameters.named}
    with torch.no_grad():
        trainer.parameters.set_weights(trainer.parameters.flatten(trained))
    optimizer.load_state_dict(state["optimizer"])
    trainer.load_state_dict(state["trainer"])
    random = state["random"]
    if "seed" in random:
        torch.manual_seed(random["seed"])
        return
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], trainer.parameters.device)
