"""The teacher behind a device's server: messages, the k best, and the mean of several models."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import model_step, teachers
from pipeline.steps.targets import TeacherInput
from training.models.lstm import LstmModel
from training.models.precision import set_float32_products
from training.models.store import TrainedModel, store_model
from training.settings.models import LstmConfig
from training.targets.teacher import (
    TeacherFunction,
    decode_logits,
    decode_targets,
    encode_input,
    encode_logits,
    kbest_encoder,
    kbest_on_device,
    load_members,
    log_mean_posteriors,
    on_host,
    relative_logits,
    select_on_device,
    serve_logits,
    serve_teacher,
)

LENGTHS = (7, 1, 40)
SEEDS = (5, 0, 2**64 - 1)


def utterances() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=(length, NUM_INPUTS)).astype(np.float32) for length in LENGTHS]


CONFIG = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
INPUTS = [TeacherInput(*each) for each in zip(utterances(), SEEDS, strict=True)]


def assert_same(targets: list[KBest], expected: list[KBest]) -> None:
    for target, other in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target.senones, other.senones)
        np.testing.assert_array_equal(target.logits, other.logits)
        np.testing.assert_array_equal(target.log_z, other.log_z)


def store_teachers(folder: Path, names: Sequence[str]) -> list[LstmModel]:
    """Store small bidirectional models of 30 senones, of seeds 0, 1, ..."""
    store, models = ObjectStore((str(folder),)), []
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        models.append(LstmModel(CONFIG, 30).eval())
        trained = TrainedModel(models[-1], torch.zeros(30))
        spec = StepSpec(store, str(folder), model_step(name), {})
        run_step(spec, lambda step, made=trained: store_model(step, made, Tally(), {}, Tally()))
    return models


def logits_of(model: LstmModel, lengths: slice = slice(None)) -> list[np.ndarray]:
    frames = [torch.from_numpy(each) for each in utterances()[lengths]]
    return [each.numpy() for each in model.utterance_logits(frames)]


def answers(function: TeacherFunction, inputs: Sequence[TeacherInput]) -> list[bytes | Exception]:
    """Return the answers to one batch."""
    prepared = function.prepare([encode_input(each) for each in inputs])
    return list(function.finish(function.compute(prepared)))


def targets(function: TeacherFunction, k: int = 5, tail_samples: int = 0) -> list[KBest]:
    """Return the targets of the three utterances, in one batch."""
    found = answers(function, INPUTS)
    return [decode_targets(each, k, tail_samples) for each in found if isinstance(each, bytes)]


def test_the_server_draws_by_each_utterances_seed(tmp_path: Path) -> None:
    """The last columns are draws of the seed in the message, whatever else is in the batch."""
    (model,) = store_teachers(tmp_path, ["teacher"])
    function = serve_teacher("cpu", str(tmp_path), "5", canonical_json(CONFIG), tail_samples="2")
    together = targets(function, 5, 2)
    pairs = zip(logits_of(model), SEEDS, strict=True)
    assert_same(together, [select_kbest(each, 5, 2, seed) for each, seed in pairs])
    assert all(each.tail_samples == 2 for each in together)
    (alone,) = answers(function, INPUTS[2:])
    assert isinstance(alone, bytes)
    np.testing.assert_array_equal(decode_targets(alone, 5, 2).senones, together[2].senones)


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cpu#1", {}), ("cpu", {"models": "teacher_smbr"})]
)
def test_the_server_gives_the_models_own_best(
    tmp_path: Path, device: str, options: dict[str, str]
) -> None:
    """The answer is the k best of the stored model's logits, without TF32; of sMBR's model too."""
    (model,) = store_teachers(tmp_path, [options.get("models", "teacher")])
    set_float32_products("tf32")
    function = serve_teacher(device, str(tmp_path), "5", canonical_json(CONFIG), **options)
    found = targets(function)
    assert torch.backends.cudnn.rnn.fp32_precision == "ieee"
    assert_same(found, [select_kbest(each, 5) for each in logits_of(model)])


def test_a_device_selects_what_its_host_would(tmp_path: Path) -> None:
    """As on a GPU: the same answers, log Z within a rounding, NaN its utterance's own."""
    store_teachers(tmp_path, ["teacher"])
    cpu = torch.device("cpu")
    members = load_members(cpu, str(tmp_path), canonical_json(CONFIG), "teacher")
    here = TeacherFunction(members, cpu, kbest_encoder(cpu, "5", "0"))
    there = TeacherFunction(members, cpu, kbest_on_device(5))
    for one, other in zip(targets(there), targets(here), strict=True):
        np.testing.assert_array_equal(one.senones, other.senones)
        np.testing.assert_array_equal(one.logits, other.logits)
        np.testing.assert_allclose(one.log_z, other.log_z, rtol=1e-3)
    poison = TeacherInput(np.full((9, NUM_INPUTS), np.nan, np.float32), 0)
    first, failed, last = answers(there, [INPUTS[0], poison, INPUTS[2]])
    assert isinstance(failed, ValueError)
    assert [len(each) for each in (first, last)] == [22 * LENGTHS[0], 22 * LENGTHS[2]]


@pytest.mark.parametrize(
    ("device", "tail_samples", "copies"),
    [("cpu", "0", True), ("meta", "0", True), ("cuda", "0", False), ("cuda", "2", True)],
)
def test_a_gpu_selects_what_is_not_drawn(device: str, tail_samples: str, copies: bool) -> None:
    """All other logits are copied to the host, which selects and draws."""
    encode = kbest_encoder(torch.device(device), "5", tail_samples)
    assert (encode.__qualname__ == on_host(encode_logits).__qualname__) is copies


@pytest.mark.parametrize("models", ["teacher,teacher_2,teacher_3", "teacher_3,teacher,teacher_2"])
def test_an_ensemble_answers_with_the_mean_posteriors(tmp_path: Path, models: str) -> None:
    """Against the mean of the members' softmax in float64; their order does not matter."""
    members = store_teachers(tmp_path, teachers(3))
    by_member = [[each.astype(np.float64) for each in logits_of(model)] for model in members]
    function = serve_teacher("cpu", str(tmp_path), "5", canonical_json(CONFIG), models)
    for found, *logits in zip(targets(function), *by_member, strict=True):
        weights = [np.exp(each) for each in logits]
        mean = np.mean([each / each.sum(axis=1, keepdims=True) for each in weights], axis=0)
        best = np.argsort(-mean, axis=1)[:, :5]
        np.testing.assert_array_equal(found.senones, best)
        kept = np.take_along_axis(mean, best, axis=1)
        np.testing.assert_allclose(found.logits, np.log(kept / kept[:, :1]), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.log_z, -np.log(kept[:, 0]), rtol=1e-3)


@pytest.mark.parametrize("serve", ["targets", "logits"])
def test_an_utterance_of_nan_fails_alone(tmp_path: Path, serve: str) -> None:
    """Its neighbours in the batch have their own targets, or logits."""
    (model,) = store_teachers(tmp_path, ["teacher"])
    place = "cpu", str(tmp_path)
    form = canonical_json(CONFIG)
    functions = {
        "targets": lambda: serve_teacher(*place, "5", form),
        "logits": lambda: serve_logits(*place, form, "teacher"),
    }
    poison = TeacherInput(np.full((9, NUM_INPUTS), np.nan, np.float32), 0)
    first, failed, last = answers(functions[serve](), [INPUTS[0], poison, INPUTS[2]])
    assert isinstance(failed, ValueError)
    assert "NaN or infinity" in str(failed)
    assert isinstance(first, bytes)
    assert isinstance(last, bytes)
    if serve == "logits":
        np.testing.assert_allclose(decode_logits(last), logits_of(model)[2], rtol=1e-5, atol=1e-6)


def test_the_server_computes_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, where two devices do not mix, logits alone leave it."""
    store_teachers(tmp_path, ["teacher"])
    left = []

    def leave(values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():  # not the indices of packing
            left.append((values.device.type, values.shape))
        return torch.zeros(values.shape, dtype=values.dtype)

    function = serve_teacher("meta", str(tmp_path), "5", canonical_json(CONFIG))
    monkeypatch.setattr(torch.Tensor, "cpu", leave)
    assert [len(each.log_z) for each in targets(function)] == list(LENGTHS)
    assert left == [("meta", (length, 30)) for length in LENGTHS]
    left.clear()
    function.check()
    assert left == [("meta", (16, 30))]


FEW_VALUES = st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.25, 2.0, 2.0000002, 30.0, -90000.0])
LOGITS = st.integers(1, 9).flatmap(
    lambda senones: st.tuples(
        arrays(np.float32, (7, senones), elements=FEW_VALUES), st.integers(1, senones)
    )
)


@given(LOGITS)
def test_selects_what_the_host_does(drawn: tuple[np.ndarray, int]) -> None:
    """Senones and logits to the bit, with many ties; log Z within float16's last place."""
    logits, k = drawn
    expected = select_kbest(logits, k)
    (found,) = select_on_device([torch.from_numpy(logits)], k)
    assert isinstance(found, KBest)
    np.testing.assert_array_equal(found.senones, expected.senones)
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_allclose(found.log_z, expected.log_z, rtol=1e-3)


def test_k_is_at_most_the_senones() -> None:
    """The message names both."""
    with pytest.raises(ValueError, match="k = 6 of 5 senones: need 1 <= k"):
        select_on_device([torch.zeros(2, 5)], 6)


def mean_of_softmax(members: list[np.ndarray]) -> np.ndarray:
    """The definition in plain float64, for logits that do not overflow."""
    weights = [np.exp(logits.astype(np.float64)) for logits in members]
    return np.mean([each / each.sum(axis=1, keepdims=True) for each in weights], axis=0)


def log_mean(members: list[np.ndarray]) -> np.ndarray:
    return log_mean_posteriors([torch.from_numpy(each) for each in members]).numpy()


def stored(members: list[np.ndarray], k: int = 10) -> KBest:
    """Return the k best that a server stores of an ensemble."""
    mean = log_mean_posteriors([torch.from_numpy(each) for each in members])
    return select_kbest(relative_logits(mean).numpy(), k)


@settings(deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda number: arrays(np.float32, (number, 3, 6), elements=st.floats(-300, 300, width=32))
    )
)
def test_it_is_the_log_of_the_mean_posterior(members: np.ndarray) -> None:
    """Of any number of members; each frame's posteriors sum to one."""
    found = log_mean(list(members))
    assert found.dtype == np.float64
    np.testing.assert_allclose(
        np.exp(found), mean_of_softmax(list(members)), rtol=1e-9, atol=1e-300
    )
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, rtol=1e-12)
