"""The whole state of training: model, optimizer, trainer and random numbers, of this rank."""

import torch
from torch import nn
from torch.optim import Optimizer

from training.trainers.resharding import State
from training.trainers.trainer import Trainer


def whole_state(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> State:
    """Return all that training resumes from; this changes nothing and draws no random number.

    Store it before the next step: the tensors of model and optimizer are not copies. "claims" is
    not resumed from: `Checkpointer.save` compares it, and refuses ranks that have drifted apart.
    """
    random = {"cpu": torch.get_rng_state()}
    if trainer.parameters.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(trainer.parameters.device)
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "trainer": trainer.state_dict(),
        "random": random,
        "claims": trainer.replica().claims().to_json(),
    }


def load_whole_state(
    state: State, model: nn.Module, optimizer: Optimizer, trainer: Trainer
) -> None:
    """Restore `whole_state()`, as it was stored or resharded; then enter the trainer."""
    model.load_state_dict(state["model"])
    # Tied weights have several names in the model's state, of which only the trainer's is averaged.
    trained = {name: state["model"][name] for name in trainer.parameters.named}
    with torch.no_grad():
        trainer.parameters.set_weights(trainer.parameters.flatten(trained))
    optimizer.load_state_dict(state["optimizer"])
    trainer.load_state_dict(state["trainer"])
    random = state["random"]
    # A resharded state has a seed instead: no old rank's random numbers fit a new rank.
    if "seed" in random:
        torch.manual_seed(random["seed"])
        return
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], trainer.parameters.device)
