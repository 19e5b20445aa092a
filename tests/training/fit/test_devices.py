"""The job's loop on another device than the CPU: torch's meta device, whose tensors are shapes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_INPUTS
from pipeline.runs.manifest import read_manifest
from tests.training.fit.host_reads import look_late
from tests.training.fit.small_fits import ALIGNMENT_STEP, NUM_SENONES, small_fit, write_run
from training.checkpoints.checkpointer import Checkpointer
from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed import checks
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.fit import steps
from training.fit.model_specs import Fit
from training.fit.train_model import open_dataset
from training.fit.training_loop import Fitting
from training.models.store import make_model
from training.settings.models import ConformerConfig, ModelConfig
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Trainer, parameters
from training.trainers.trainer import make_optimizer, make_trainer

META = torch.device("meta")


LSTM = small_fit().model
CONFORMER = ConformerConfig(num_layers=1, num_units=8, num_heads=2)


class Arrival:
    """Arrival of what lies on the device; meta has no values, so these say that all is finite."""

    def __init__(self, values: Tensor) -> None:
        assert values.device == META
        self._values = torch.zeros(values.shape, dtype=values.dtype)
        self._values.view(-1)[0] = 1

    def values(self) -> Tensor:
        return self._values


@pytest.fixture(autouse=True)
def shapes_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers take meta's tensors for those of a device that computes."""
    monkeypatch.setattr(parameters, "holds_no_values", lambda _: False)


def fitting_on(device: torch.device, folder: Path, what: Fit, group: ProcessGroup) -> Fitting:
    """Return the fit of a rank as it begins."""
    store, run_uri = ObjectStore((str(folder),)), str(folder)
    labelled = read_manifest(store, run_uri, ALIGNMENT_STEP)
    dataset = open_dataset(what, store, run_uri, labelled, group)
    model = make_model(what.model, NUM_SENONES).to(device)
    checkpoints = Checkpointer(store, f"{run_uri}/checkpoints", "fingerprint", group)
    return Fitting(what, model, dataset, checkpoints, group)


def devices(value: Any) -> set[str]:
    """Return where the tensors of nested containers lie; a step's number may be on the host."""
    if isinstance(value, Tensor):
        return {value.device.type} if value.ndim else set()
    inner = list(value.values()) if isinstance(value, dict) else value
    return set().union(*map(devices, inner)) if isinstance(inner, list | tuple) else set()


@pytest.mark.parametrize(
    ("trainer", "model"), [("synchronous", CONFORMER), ("synchronous", LSTM), ("bmuf", LSTM)]
)
def test_every_tensor_of_a_step_is_on_the_models_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, model: ModelConfig
) -> None:
    """Model, minibatches, losses, gradients, norms, exchanges, optimizer and totals are there.

    An operation on tensors of two devices fails, and so does one that needs a value on the host.
    """
    look_late(monkeypatch)
    for module in (steps, checks):
        monkeypatch.setattr(module, "Arrival", Arrival)
    monkeypatch.setattr(Trainer, "_compare", lambda _: None)  # it reads, outside of steps
    write_run(tmp_path)
    what = replace(small_fit(trainer, student=True, minibatch_frames=2048), model=model)

    def train(group: ProcessGroup) -> Fitting:
        fitting = fitting_on(META, tmp_path, what, group)
        # torch has no fused optimizers on meta.
        fitting.optimizer.param_groups[0]["fused"] = False
        with fitting.trainer:
            for sub_epoch in what.sub_epochs[:2]:  # soft targets, then hard ones
                fitting._train(sub_epoch)
                fitting.progress.cursor = fitting.progress.cursor.next_sub_epoch()
        return fitting

    for fitting in simulate_ranks(1, train):
        totals = fitting.progress.totals
        assert totals.num_frames > 0
        assert totals.cross_entropy.device == totals.num_correct.device == META
        assert devices(fitting.optimizer.state_dict()) == {"meta"}
        assert devices(list(fitting.model.parameters())) == {"meta"}
        assert all(each.grad.device == META for each in fitting.model.parameters())


@pytest.mark.filterwarnings("ignore:.* which is a no-op")  # as on meta
@pytest.mark.parametrize("name", ["gtc", "bmuf"])
def test_a_checkpoint_of_the_cpu_is_loaded_to_another_device(name: str) -> None:
    """Model, optimizer and the trainer's residuals or block are then all on that device."""
    what = small_fit(name)
    saved: list[bytes] = []

    def load_and_save(group: ProcessGroup, device: torch.device) -> set[str]:
        model = make_model(what.model, NUM_SENONES).to(device)
        optimizer = make_optimizer(what.training.optimizer, model.parameters())
        trainer = make_trainer(what.training.trainer, model, optimizer, group)
        if saved:
            load_whole_state(decode_state(saved[0]), model, optimizer, trainer)
        else:
            with trainer:
                model(torch.ones(1, 2, NUM_INPUTS)).sum().backward()
                optimizer.step()
                saved.append(encode_state(whole_state(model, optimizer, trainer)))
        # BMUF's state_dict() looks for a NaN on the host.
        held = dict(trainer.shared_tensors()) if name == "bmuf" else trainer.state_dict()
        states = (model.state_dict(), optimizer.state_dict(), held)
        return set().union(*map(devices, states))

    assert simulate_ranks(1, load_and_save, torch.device("cpu")) == [{"cpu"}]
    assert simulate_ranks(1, load_and_save, META) == [{"meta"}]


@pytest.mark.filterwarnings("ignore:.* which is a no-op")  # as on meta
@pytest.mark.parametrize("name", ["synchronous", "bmuf", "htm"])
def test_a_model_moves_before_its_trainer_is_entered(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The trainer looks for NaNs where the model then lies, a step later than on a CPU."""
    monkeypatch.setattr(checks, "Arrival", Arrival)
    monkeypatch.setattr(Trainer, "_compare", lambda _: None)
    what = small_fit(name)

    def move(group: ProcessGroup) -> set[str]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make_trainer(what.training.trainer, model, optimizer, group)
        for parameter in model.parameters():  # as model.to() of a GPU, within the same object
            moved = torch.nn.Parameter(parameter.detach().to(META))
            torch.utils.swap_tensors(parameter, moved)
        with trainer:
            for _ in range(4):
                model(torch.ones(1, 3, device=META)).sum().backward()
                optimizer.step()
        return devices(dict(trainer.shared_tensors()))

    assert simulate_ranks(1, move) == [{"meta"}]
