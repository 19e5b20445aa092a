"""The teacher behind a device's server: messages, and the targets that come back."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.configuration import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Tally
from pipeline.runs.names import model_step, teachers
from pipeline.runs.step import StepSpec, run_step
from training.models.lstm import LstmConfig, LstmModel
from training.models.precision import set_float32_products
from training.models.store import TrainedModel, store_model
from training.targets.teacher import (
    decode_seeds,
    decode_targets,
    decode_utterances,
    encode_targets,
    encode_utterances,
    serve_teacher,
)

LENGTHS = (7, 1, 40)
SEEDS = (5, 0, 2**64 - 1)


def utterances() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=(length, 192)).astype(np.float32) for length in LENGTHS]


def assert_same(targets: list[KBest], expected: list[KBest]) -> None:
    for target, other in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target.senones, other.senones)
        np.testing.assert_array_equal(target.logits, other.logits)
        np.testing.assert_array_equal(target.log_z, other.log_z)


def test_utterances_survive_the_message() -> None:
    """Frames come back to the bit, utterance by utterance."""
    for sent, received in zip(
        utterances(), decode_utterances(encode_utterances(utterances(), SEEDS)), strict=True
    ):
        np.testing.assert_array_equal(received, sent)


def test_seeds_survive_the_message() -> None:
    """All 64 bits, in the order of the utterances."""
    assert decode_seeds(encode_utterances(utterances(), SEEDS)) == list(SEEDS)


def test_the_server_draws_by_each_utterances_seed(tmp_path: Path) -> None:
    """The last columns are draws of the seed in the message, whatever else is in the request."""
    store = ObjectStore((str(tmp_path),))
    torch.manual_seed(0)
    config = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    trained = TrainedModel(LstmModel(config, 30).eval(), torch.zeros(30))
    spec = StepSpec(store, str(tmp_path), "models/teacher", {})
    run_step(spec, lambda context: store_model(context, trained, Tally(), {}))
    label = serve_teacher("cpu", str(tmp_path), "5", canonical_json(config), tail_samples="2")
    together = decode_targets(label(encode_utterances(utterances(), SEEDS)), 5, 2)
    frames = [torch.from_numpy(each) for each in utterances()]
    logits = [each.numpy() for each in trained.model.utterance_logits(frames)]
    pairs = zip(logits, SEEDS, strict=True)
    assert_same(together, [select_kbest(each, 5, 2, seed) for each, seed in pairs])
    assert all(each.tail_samples == 2 for each in together)
    alone = decode_targets(label(encode_utterances(utterances()[2:], SEEDS[2:])), 5, 2)
    np.testing.assert_array_equal(alone[0].senones, together[2].senones)


def test_targets_survive_the_message() -> None:
    """Senones, logits and log Z come back to the bit."""
    generator = np.random.default_rng(1)
    targets = [
        select_kbest(generator.normal(size=(length, 30)).astype(np.float32), 5)
        for length in LENGTHS
    ]
    assert_same(decode_targets(encode_targets(targets), k=5), targets)


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cpu#1", {}), ("cpu", {"models": "teacher_smbr"})]
)
def test_the_server_gives_the_models_own_best(
    tmp_path: Path, device: str, options: dict[str, str]
) -> None:
    """The answer is the k best of the stored model's logits, without TF32; of sMBR's model too."""
    store = ObjectStore((str(tmp_path),))
    torch.manual_seed(0)
    config = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    model = LstmModel(config, 30).eval()
    trained = TrainedModel(model, torch.zeros(30))
    spec = StepSpec(store, str(tmp_path), f"models/{options.get('models', 'teacher')}", {})
    run_step(spec, lambda context: store_model(context, trained, Tally(), {}))
    set_float32_products("tf32")
    label = serve_teacher(device, str(tmp_path), "5", canonical_json(config), **options)
    answer = label(encode_utterances(utterances(), SEEDS))
    assert torch.backends.cudnn.rnn.fp32_precision == "ieee"
    logits = model.utterance_logits([torch.from_numpy(frames) for frames in utterances()])
    expected = [select_kbest(frames.numpy(), 5) for frames in logits]
    assert_same(decode_targets(answer, k=5), expected)


@pytest.mark.parametrize("models", ["teacher,teacher_2,teacher_3", "teacher_3,teacher,teacher_2"])
def test_an_ensemble_answers_with_the_mean_posteriors(tmp_path: Path, models: str) -> None:
    """Against the mean of the members' softmax in float64; their order does not matter."""
    store, by_member = ObjectStore((str(tmp_path),)), []
    config = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    for seed, name in enumerate(teachers(3)):
        torch.manual_seed(seed)
        model = LstmModel(config, 30).eval()
        trained = TrainedModel(model, torch.zeros(30))
        spec = StepSpec(store, str(tmp_path), model_step(name), {})
        run_step(spec, partial(store_model, trained=trained, data=Tally(), statistics={}))
        frames = [torch.from_numpy(each) for each in utterances()]
        by_member.append(
            [each.numpy().astype(np.float64) for each in model.utterance_logits(frames)]
        )
    label = serve_teacher("cpu", str(tmp_path), "5", canonical_json(config), models)
    answer = label(encode_utterances(utterances(), SEEDS))
    for found, *members in zip(decode_targets(answer, k=5), *by_member, strict=True):
        weights = [np.exp(logits) for logits in members]
        mean = np.mean([each / each.sum(axis=1, keepdims=True) for each in weights], axis=0)
        best = np.argsort(-mean, axis=1)[:, :5]
        np.testing.assert_array_equal(found.senones, best)
        kept = np.take_along_axis(mean, best, axis=1)
        np.testing.assert_allclose(found.logits, np.log(kept / kept[:, :1]), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.log_z, -np.log(kept[:, 0]), rtol=1e-3)


def test_the_server_computes_on_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, where two devices do not mix, logits alone leave it."""
    store = ObjectStore((str(tmp_path),))
    config = LstmConfig(1, 8, bidirectional=True, look_ahead=0, dropout=0.0)
    trained = TrainedModel(LstmModel(config, 30).eval(), torch.zeros(30))
    spec = StepSpec(store, str(tmp_path), "models/teacher", {})
    run_step(spec, lambda context: store_model(context, trained, Tally(), {}))
    left = []

    def leave(values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():  # not the indices of packing
            left.append((values.device.type, values.shape))
        return torch.zeros(values.shape, dtype=values.dtype)

    label = serve_teacher("meta", str(tmp_path), "5", canonical_json(config))
    monkeypatch.setattr(torch.Tensor, "cpu", leave)
    answer = label(encode_utterances(utterances(), SEEDS))
    assert [len(each.log_z) for each in decode_targets(answer, k=5)] == list(LENGTHS)
    assert left == [("meta", (length, 30)) for length in LENGTHS]
