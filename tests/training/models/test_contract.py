"""Models of a user's own: settings against the signature, and what holds of the module."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from infra.settings import ConfigurationError, canonical_json
from pipeline.filterbank import NUM_INPUTS
from training.models.contract import check_contract
from training.models.parameter_count import num_parameters
from training.models.store import TrainedModel, decode_model, encode_model, make_model
from training.settings.models import (
    ConformerConfig,
    FactoryConfig,
    LstmConfig,
    ModelConfig,
    read_form,
)
from training.tensor_encoding import decode_state, encode_state

OWN = "tests.training.models.own_models"


def own(name: str, look_ahead: int = 0, **others: Any) -> FactoryConfig:
    return FactoryConfig(factory=f"{OWN}:{name}", look_ahead=look_ahead, **others)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        own("tdnn", 2),
        own("tdnn", 3, settings={"num_units": 8, "context": 3, "scale": 2, "kind": "relu"}),
        own("untyped", settings={"num_units": 3, "anything": True}),
        own("Linear"),
        own("TwoFramesLate", 2, delay=2),
        own("Rotated", settings={"kind": "complex64"}),
        ConformerConfig(num_layers=2, num_units=16, chunk_frames=3, left_frames=7),
        ConformerConfig(num_layers=2, num_units=16, chunk_frames=1, left_frames=0, kernel_frames=1),
        LstmConfig(2, 8, False, 3, 0.2),
        LstmConfig(2, 8, True, 0, 0.2),
        LstmConfig(2, 8, False, 3, 0.2, num_filters=5),
        LstmConfig(2, 8, True, 0, 0.2, num_filters=5),
    ],
    ids=lambda config: str(getattr(config, "factory", config.name)).rpartition(":")[2],
)
def test_right_models_pass(config: ModelConfig, precision: Any) -> None:
    """Of every architecture, in both precisions, with another look-ahead and delay."""
    check_contract(config, 11, precision)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (own("tdnn", 1), "look_ahead = 1: the logits of frame .* need 2 or more, or bidirec"),
        (own("FarAhead"), "look_ahead = 0: the logits of frame .* need 40 or more"),
        (own("DependsOnPadding", bidirectional=True), "padding changes the logits of 21 frames"),
        (own("Random"), r"two models of one seed differ in network\.output\.bias: need random"),
        (own("RandomStep"), r"gradients of one minibatch, computed twice, differ in network\.out"),
        (own("Double"), r"give torch\.float64 \(3, 32, 11\): need float32 \(3, 32, 11\)"),
        (own("Infinite"), "give logits that are not finite"),
        (
            own("Rotated", settings={"kind": "float8_e4m3fn"}),
            r"state_dict\(\) cannot be stored: .*",
        ),
        (own("Frozen"), r"backward\(\): RuntimeError: .* does not require grad"),
        (own("Failing"), r"KeyError: 'a\\nmistake' \(own_models\.py:\d+\)"),
        (own("Forgetful"), r"advance\(\) gives other logits for pieces of \[1, 7, 0, 3"),
        (own("no_module"), "no_module': returns a str: need a torch.nn.Module"),
        (own("deaf"), "has no argument num_inputs: need one, as every factory"),
        (own("OWN"), "AttributeError: .*: need a module that every process finds: install"),
        (own("Range"), "settings: least is missing|has no argument num_inputs"),
        (replace(own("tdnn"), factory="no_such:tdnn"), "No module named 'no_such': need a module"),
        (own("tdnn", settings={"num_unit": 3}), "unknown key num_unit: did you mean num_units?"),
        (own("tdnn", settings={"num_units": 0}), r"num_units = 0: need 1\.\.512"),
        (own("tdnn", settings={"num_units": True}), "num_units = True: need a whole number"),
        (own("tdnn", settings={"scale": "a"}), "scale = 'a': need a finite number"),
        (own("untyped", settings={"lambda": 1}), "settings: lambda is a word of Python: need ano"),
        (own("Tdnn", settings={"context": 1}), "settings: num_units is missing: the factory has"),
        (own("tdnn", settings={"context": -3}), "RuntimeError.*: correct the settings, or the"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.factory.rpartition(":")[2],
)
def test_each_violation_is_named(config: FactoryConfig, message: str) -> None:
    """On one line: the key or the frames, and a remedy."""
    with pytest.raises(ConfigurationError, match=message) as raised:
        check_contract(config, 11, "float32")
    assert "\n" not in str(raised.value)


def test_logits_for_too_few_frames_are_named() -> None:
    """In a process without the tests' checks of arrays, which would report them before."""
    source = (
        "from tests.training.models.test_contract import own, check_contract\n"
        "check_contract(own('Short'), 11, 'float32')"
    )
    command = [sys.executable, "-c", source]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    message = (
        f"frames (3, 32, {NUM_INPUTS}) and lengths [32, 21, 1] in float32 give torch.float32 "
        "(3, 16, 11): need float32 (3, 32, 11)"
    )
    assert found.stderr.rstrip().endswith(message)


def test_the_check_draws_no_random_number() -> None:
    """Training after it begins from the weights that it would have begun from."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    check_contract(own("tdnn", 2), 11, "float32")
    assert torch.equal(torch.get_rng_state(), before)


def test_declarations_must_fit_together() -> None:
    """A delay is a look-ahead; all frames are no number of frames; two arguments are given."""
    for others, message in (
        ({"delay": 3}, "delay = 3: need at most look_ahead = 2"),
        ({"bidirectional": True}, "look_ahead = 2: need 0 for a bidirectional model"),
        ({"settings": {"num_senones": 9}}, "num_senones is given to every factory"),
    ):
        with pytest.raises(ValueError, match=message):
            own("tdnn", 2, **others)


def test_a_stored_model_imports_what_the_recipe_names_alone() -> None:
    """The module that a store names is compared and never imported; the remedy names both."""
    config = own("tdnn", 2, settings={"num_units": 8})
    trained = TrainedModel(make_model(config, 5).eval(), torch.zeros(5))
    data = encode_model(trained)
    again = decode_model(data, config).model
    frames = torch.randn(9, NUM_INPUTS)
    assert torch.equal(*(each.utterance_logits([frames])[0] for each in (trained.model, again)))
    # As an attacker would write it: bytes of a good model that name another module.
    state = decode_state(data)
    state["config"]["factory"] = "antigravity:fly"
    state["config"]["settings"]["num_units"] = "\x1b[31m\n" * 1000
    hostile = encode_state(state)
    for expected in (config, replace(config, look_ahead=3), LstmConfig(1, 8, False, 2, 0.0)):
        with pytest.raises(ConfigurationError, match="take the recipe that it was") as raised:
            decode_model(hostile, expected)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1000
    assert "antigravity" not in sys.modules


def test_weights_of_another_code_are_refused() -> None:
    """The factory has changed since: the parameter is named, with a remedy."""
    trained = TrainedModel(make_model(own("tdnn", 2), 5), torch.zeros(5))
    trained.model.network.output = torch.nn.Linear(17, 5)
    with pytest.raises(ConfigurationError, match=r"output\.weight.* its code now makes another"):
        decode_model(encode_model(trained), own("tdnn", 2))


@pytest.mark.parametrize(
    "config",
    [
        LstmConfig(2, 8, False, 3, 0.1),
        ConformerConfig(),
        own("tdnn", settings={"a": 1, "b": True, "c": "x"}),
    ],
)
def test_a_form_is_read_as_it_was_written(config: ModelConfig) -> None:
    """Of each kind, by its name."""
    assert read_form(canonical_json(config)) == config


def test_parameters_are_counted_without_memory() -> None:
    """By a factory too; the Conformer has the size of the recorded recipe's LSTM to 5 %."""
    lstm, conformer = LstmConfig(2, 256, False, 3, 0.2), ConformerConfig()
    for num_senones in (106, 200):
        size = num_parameters(lstm, num_senones)
        assert num_parameters(conformer, num_senones) == pytest.approx(size, rel=0.05)
    assert num_parameters(own("Linear"), 100_000) == (NUM_INPUTS + 1) * 100_000


@pytest.mark.parametrize(
    "config",
    [
        LstmConfig(1, 3, False, 2, 0.0),
        LstmConfig(3, 8, False, 3, 0.1),
        LstmConfig(2, 5, True, 0, 0.0),
        LstmConfig(2, 5, True, 0, 0.0, num_filters=3),
    ],
)
def test_parameters_are_counted_without_a_model(config: ModelConfig) -> None:
    """The count by formula, which needs no torch, is that of the model that torch makes."""
    made = make_model(config, 29)
    assert num_parameters(config, 29) == sum(each.numel() for each in made.parameters())
