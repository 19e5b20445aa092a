"""Teachers of a user's own: features or audio in, logits out, alone and as an ensemble."""

import re
import shutil
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import softmax

from infra.devices.device_pool import DevicePool, _private_directory
from infra.settings import ConfigurationError, canonical_json, plain, read_record
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import KBest, TeacherFailure, joined, select_kbest
from pipeline.settings import TargetsConfig
from pipeline.steps.targets import TeacherInput
from tests.in_process_teacher import answer_alone
from tests.training.targets.own_teachers import weights
from tests.whole_path.processes import TINY
from training.models.precision import set_float32_products
from training.settings.decoding import MemberConfig, OwnTeacherConfig, WindowsConfig
from training.settings.recipe import read_recipe
from training.targets.own_teacher import check_untrained, serve_own_logits, serve_own_teacher
from training.targets.teacher import (
    PooledTeacher,
    decode_logits,
    decode_targets,
    encode_input,
    kept_targets,
)

OWN = "tests.training.targets.own_teachers"
NUM_SENONES = 30
LENGTHS = (7, 13, 1, 40)
CONFIG = TargetsConfig(5, 400, 3)


def named(factory: str, **settings: float | str) -> OwnTeacherConfig:
    return OwnTeacherConfig(factory=f"{OWN}:{factory}", settings=settings)


def inputs(num_values: int = NUM_INPUTS, lengths: Sequence[int] = LENGTHS) -> list[TeacherInput]:
    generator = np.random.default_rng(0)
    return [
        TeacherInput(generator.uniform(-1, 1, (length, num_values)).astype(np.float32), seed)
        for seed, length in enumerate(lengths)
    ]


def expected(num_values: int = NUM_INPUTS, seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:
    """The logits of the linear teachers, by NumPy."""
    matrix = scale * weights(num_values, NUM_SENONES, seed).numpy()
    return [each.frames @ matrix for each in inputs(num_values)]


def served_logits(config: OwnTeacherConfig, num_values: int = NUM_INPUTS) -> list[np.ndarray]:
    """The logits that a server's function answers, each utterance alone."""
    function = serve_own_logits("cpu", canonical_json(config), str(NUM_SENONES))
    function.check()
    answers = [answer_alone(function, encode_input(each)) for each in inputs(num_values)]
    return [decode_logits(each) for each in answers if isinstance(each, bytes)]


@pytest.mark.parametrize(
    ("factory", "num_values", "scale"),
    [("spliced", NUM_INPUTS, 1.0), ("listening", 480, 100.0), ("Listener", 480, 100.0)],
)
def test_a_teacher_labels_by_features_or_by_audio(
    factory: str, num_values: int, scale: float
) -> None:
    """Features arrive as (frames, 192), audio as one row of 480 samples a frame."""
    found = served_logits(named(factory), num_values)
    for one, other in zip(found, expected(num_values, scale=scale), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    heard = "features" if num_values == NUM_INPUTS else "audio"
    assert check_untrained(named(factory)) == heard


@pytest.mark.parametrize(("factory", "num_values"), [("spliced", NUM_INPUTS), ("listening", 480)])
def test_the_teacher_computes_on_its_device(
    factory: str, num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch's meta device, where two devices do not mix, its logits lie there, too."""
    left = []
    cpu = torch.Tensor.cpu

    def leave(values: torch.Tensor) -> torch.Tensor:
        if values.device.type == "cpu":
            return cpu(values)  # of another test's thread, which has not ended yet
        left.append((values.device.type, values.shape))
        return torch.zeros(values.shape)

    function = serve_own_logits("meta", canonical_json(named(factory)), str(NUM_SENONES))
    monkeypatch.setattr(torch.Tensor, "cpu", leave)
    prepared = function.prepare([encode_input(each) for each in inputs(num_values)])
    function.finish(function.compute(prepared))
    assert left == [("meta", (length, NUM_SENONES)) for length in LENGTHS]


def test_products_are_float32_unless_the_factory_says_otherwise() -> None:
    """No TF32 of the server's remains, so that logits are the teacher's own."""
    set_float32_products("tf32")
    serve_own_logits("cpu", canonical_json(named("spliced")), str(NUM_SENONES))
    assert torch.backends.cudnn.rnn.fp32_precision == "ieee"
    serve_own_logits("cpu", canonical_json(named("in_tf32")), str(NUM_SENONES))
    assert torch.backends.cudnn.rnn.fp32_precision == "tf32"
    set_float32_products("float32")


def test_settings_reach_the_factory() -> None:
    """With the types that its signature wants: a whole number is a float where it says so."""
    config = read_record(
        OwnTeacherConfig, {"factory": f"{OWN}:spliced", "settings": {"seed": 4, "scale": 2}}, "r"
    )
    for one, other in zip(served_logits(config), expected(seed=4, scale=2.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_the_mean_of_the_posteriors() -> None:
    """Against NumPy's mean of the members' softmax to 1e-6, before the k best are taken."""
    seeds = (0, 1, 2)
    first, *others = (named("spliced", seed=seed, scale=9.0) for seed in seeds)
    members = tuple(MemberConfig(factory=o.factory, settings=o.settings) for o in others)
    config = OwnTeacherConfig(factory=first.factory, settings=first.settings, ensemble=members)
    by_member = [
        [softmax(e.astype(float), axis=1) for e in expected(NUM_INPUTS, s, 9.0)] for s in seeds
    ]
    means = [np.mean(each, axis=0) for each in zip(*by_member, strict=True)]
    for found, mean in zip(served_logits(config), means, strict=True):
        np.testing.assert_allclose(softmax(found.astype(float), axis=1), mean, rtol=0, atol=1e-6)
    function = serve_own_teacher("cpu", canonical_json(config), str(NUM_SENONES), "5")
    for given, mean in zip(inputs(), means, strict=True):
        answer = answer_alone(function, encode_input(given))
        assert isinstance(answer, bytes)
        best = np.argsort(-mean, axis=1)[:, :5]
        np.testing.assert_array_equal(decode_targets(answer, 5).senones, best)


@pytest.fixture
def pools() -> Iterator[list[DevicePool]]:
    made: list[DevicePool] = []
    yield made
    for pool in made:
        shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)


def pool_of(pools: list[DevicePool], config: OwnTeacherConfig) -> DevicePool:
    arguments = {
        "teacher": canonical_json(config),
        "num_senones": str(NUM_SENONES),
        "k": str(CONFIG.k),
    }
    serve = "training.targets.own_teacher:serve_own_teacher"
    pools.append(DevicePool(serve, arguments, ("cpu",), 400, idle_timeout_s=2.0))
    return pools[-1]


REASONS = {
    11: r"logits of shape \(10, 30\): need \(11, 30\)",
    12: r"logits of shape \(12, 60\): need \(12, 30\)",
    13: "logits of type torch.int64: need a tensor of floats",
    14: "logits of type ndarray: need a tensor of floats",
    15: "NaN or infinity",
    17: "0 answers: need 1, one an utterance",
    18: "no such utterance",
}


def test_a_wrong_answer_is_its_utterances_failure(pools: list[DevicePool]) -> None:
    """In a real server the others of the batch have their targets, and it stays in use."""
    pool = pool_of(pools, named("failing"))
    teacher = PooledTeacher(pool, WindowsConfig(), partial(kept_targets, CONFIG), joined)
    lengths = [20, *REASONS, 19, 5]
    given = inputs(lengths=lengths)
    for each, one in zip(teacher(given), given, strict=True):
        if reason := REASONS.get(len(one.frames)):
            assert isinstance(each, TeacherFailure)
            assert re.search(reason, each.reason), each.reason
        else:
            assert isinstance(each, KBest)
            logits = one.frames @ weights(NUM_INPUTS, NUM_SENONES).numpy()
            np.testing.assert_array_equal(each.senones, select_kbest(logits, 5).senones)


def test_a_teacher_of_other_senones_is_refused() -> None:
    """One that no utterance suits is found out by noise, before a server answers anything."""
    function = serve_own_logits("cpu", canonical_json(named("always_wrong")), str(NUM_SENONES))
    with pytest.raises(ValueError, match=r"logits of shape \(16, 31\): need \(16, 30\)"):
        function.check()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OwnTeacherConfig(factory="no_such:teacher"), "No module named 'no_such': need a module"),
        (named("absent"), "has no attribute 'absent'.*put its folder into PYTHONPATH"),
        (named("not_callable"), "not_callable is a int: need a function or a class"),
        (named("spliced", sede=3), "unknown key sede: did you mean seed?"),
        (named("spliced", seed="one"), "seed = 'one': need a whole number"),
        (named("broken"), "path is missing: the factory has no default"),
        (named("without_senones"), "has no argument num_senones: need one"),
        (named("hard_of_hearing"), "hears 'lips': need 'features' or 'audio'"),
        (
            OwnTeacherConfig(
                factory=f"{OWN}:spliced", ensemble=(MemberConfig(factory=f"{OWN}:listening"),)
            ),
            "own_teachers:spliced' features and .*own_teachers:listening' audio: need one input",
        ),
    ],
)
def test_each_mistake_is_named_before_a_run(config: OwnTeacherConfig, message: str) -> None:
    """Import, signature, settings and input are tried without making a teacher."""
    with pytest.raises(ConfigurationError, match=message):
        check_untrained(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (named("broken", path="/no/weights.pt"), "FileNotFoundError: /no/weights.pt .*correct the"),
        (named("no_function"), "returns a dict: need a function of utterances"),
    ],
)
def test_a_factory_that_fails_is_named_by_the_server(
    config: OwnTeacherConfig, message: str
) -> None:
    """Its error has the factory, the user's line and a remedy."""
    with pytest.raises(ConfigurationError, match=message):
        serve_own_teacher("cpu", canonical_json(config), "30", "5")


def recipe_with(*overrides: str):
    factory = "targets.teacher.factory='my_teachers:one'"
    return read_recipe(str(TINY), [factory, *overrides])


def test_a_recipe_names_a_teacher_by_its_factory() -> None:
    """The run then trains none, and the fingerprint of targets has factory and settings."""
    recipe = recipe_with("targets.teacher.settings.path='w.pt'")
    settings = {"factory": "my_teachers:one", "settings": {"path": "w.pt"}, "ensemble": []}
    assert plain(recipe.targets)["teacher"] == {"name": "own", **settings}
    assert (recipe.num_teachers, recipe.num_labelling) == (0, 1)
    own = read_record(OwnTeacherConfig, plain(recipe.targets)["teacher"], "r")
    assert own == recipe.targets.teacher
    other = "{factory = 'my_teachers:two', settings = {seed = 2}}"
    assert recipe_with(f"targets.teacher.ensemble=[{other}]").num_labelling == 2
    trained = read_recipe(str(TINY))
    assert plain(trained.targets)["teacher"] == {"name": "trained"}
    assert (trained.num_teachers, trained.num_labelling) == (1, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.ensemble=3", "teacher: ensemble = 3: need 1"),
        ("sequence_training.teacher=true", "sequence_training: teacher = True: need false"),
        ("targets.teacher.settings.device='cpu'", "device is given to every factory: leave it out"),
        ("targets.teacher.factory='my_teachers'", "factory = 'my_teachers': need"),
        ("targets.teacher.ensemble=[{settings = {}}]", r"ensemble\[0\]: factory is missing"),
        ("targets.teacher.name='trained'", "unknown key factory"),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str) -> None:
    """Each with the setting and a remedy, when the recipe is read."""
    with pytest.raises(ConfigurationError, match=message):
        recipe_with(override)


def test_logits_of_half_precision_are_taken() -> None:
    """A teacher in bfloat16 answers without a conversion of its own."""
    config = named("in_bfloat16")
    for one, other in zip(served_logits(config), expected(), strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)
