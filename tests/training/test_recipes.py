"""The recipe: a trainer's own settings, ranges, and another trainer by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.settings import ConfigurationError
from jobs.cli.job import recipe_path
from training.fit.model_specs import (
    baseline_fit,
    sequence_fit,
    sibling_fits,
    student_fit,
    teacher_fit,
)
from training.settings.models import ConformerConfig
from training.settings.recipe import Recipe, read_recipe
from training.settings.trainers import (
    TRAINERS,
    AdaGrad,
    AdaGradPlace,
    AdamConfig,
    BmufConfig,
    GtcConfig,
    HtmConfig,
    OneBitConfig,
    SgdConfig,
    SynchronousConfig,
    TrainerConfig,
)

TINY = Path(__file__).parents[1] / "whole_path" / "tiny.toml"


def tiny(*overrides: str, **trainers: str) -> Recipe:
    return read_recipe(str(TINY), overrides, trainers)


def test_each_trainer_has_settings_of_its_own() -> None:
    """The small recipe has one trainer of each kind, with its own keys and no others."""
    recipe = tiny()
    sections = (recipe.aligner, recipe.baseline, recipe.teacher, recipe.student)
    assert [section.trainer for section in sections] == [
        SynchronousConfig(),
        GtcConfig(gradient_threshold=8.0),
        BmufConfig(block_size=3),
        HtmConfig(gradient_threshold=2.0, block_size=2, group_size=2),
    ]


OWN = 'models.student={name = "factory", factory = "no_such:model", look_ahead = 2, %s}'


def test_a_model_without_a_name_is_an_lstm() -> None:
    """Keys of another architecture need its name; a typing error is named as before."""
    assert tiny("models.student.name=lstm") == tiny()
    assert tiny("models.student={name = 'conformer', chunk_frames = 8}").models.student == (
        ConformerConfig(chunk_frames=8)
    )
    # Read without an import: the module may be on other hosts.
    assert tiny(OWN % "settings.a = 1").models.student.settings == {"a": 1}
    for override, message in (
        ("models.student.factory=mine:tdnn", "student: name is missing: need one of 'lstm', 'conf"),
        ("models.student.num_layer=2", "unknown key num_layer: did you mean num_layers"),
        (
            "models.student.name=gmm",
            "name = 'gmm': need one of 'lstm', 'conformer', 'feed_forward', 'projected",
        ),
        (OWN % "settings.a = [1]", r"settings\.a = \[1\]: need a whole number, or a finite number"),
        (OWN % "settings.a-b = 1", "settings: key = 'a-b': need 1"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tiny(override)


def test_whole_utterances_refuse_chunks() -> None:
    """Each section that trains such a model is named, with the setting that makes chunks."""
    whole = OWN % "whole_utterances = true"
    without = [whole, "aligner.num_chunked_epochs=0", "baseline.num_chunked_epochs=0"]
    num_sub_epochs = tiny().student.num_sub_epochs * tiny().student.num_passes
    for overrides, message in (
        ([whole], "aligner: num_chunked_epochs = .*: need 0: its model declares whole_utterances"),
        (without, f"student: num_whole_utterance_sub_epochs = .*: need {num_sub_epochs}"),
        ([*without, "baseline.schedule=newbob"], "baseline: schedule = 'newbob': need 'exponen"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tiny(*overrides)
    tiny(*without, f"student.num_whole_utterance_sub_epochs={num_sub_epochs}")


def test_a_later_round_s_teacher_has_the_student_s_optimizer() -> None:
    """Its trainer is the teacher's: one that has momentum itself refuses Adam, and takes SGD."""
    own = 'teacher.optimizer={name = "sgd", momentum = 0}'
    trained = ['teacher.trainer={name = "one_bit"}', own]
    assert tiny(*trained).teacher.trainer.name == "one_bit"
    message = r"student: with targets\.rounds = 2 .* the teacher's trainer: optimizer = AdamConfig"
    with pytest.raises(ConfigurationError, match=message):
        tiny(*trained, "targets.rounds=2")
    tiny(*trained, "targets.rounds=2", own.replace("teacher", "student"))


def test_what_is_missing_of_the_targets_has_one_substitute() -> None:
    """Drawn columns and the class of all others exclude each other; both are named."""
    recipe = tiny("student.soft_targets=ghost", "targets.rounds=2")
    fits = student_fit(recipe), *sibling_fits(recipe)
    assert [each.training.soft_targets for each in fits] == ["ghost", "ghost"]
    assert student_fit(tiny()).config["training"]["soft_targets"] == "renormalized"
    assert sequence_fit(recipe, student_fit(recipe)).training.soft_targets == "renormalized"
    for form in ("ghost", "best"):
        message = rf"student: soft_targets = '{form}' with targets\.tail_samples = 2: need 0"
        with pytest.raises(ConfigurationError, match=message):
            tiny(f"student.soft_targets={form}", "targets.tail_samples=2")
    assert tiny("targets.tail_samples=2").targets.tail_samples == 2
    with pytest.raises(ConfigurationError, match=r"tail_samples = 8: need 0\.\.7, below k = 8"):
        tiny("targets.tail_samples=8")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("student.soft_targets=renormalized", [0, 0, 0, 0]),
        ("targets.offsets=all", [0, 1, 2, 0]),
        ("student.soft_targets=best", [0, 1, 2, 0]),
    ],
)
def test_passes_read_the_next_offset_where_they_can(override: str, expected: list[int]) -> None:
    """Where targets are at all offsets, or the best one is a label."""
    recipe = tiny(override, "student.num_passes=4")
    sub_epochs = [each for each in student_fit(recipe).sub_epochs if not each.labelled]
    firsts = sub_epochs[:: recipe.student.num_sub_epochs]
    assert [each.offset for each in firsts] == expected


def test_the_models_that_are_trained_beside_it_decide_no_model() -> None:
    """So one that is there stays, where a recipe adds others."""
    one = tiny("sequence_training.baseline=true")
    more = tiny("sequence_training={baseline=true, student=true}", "teacher.ensemble=3")
    first, then = (sequence_fit(each, baseline_fit(each)).config for each in (one, more))
    assert first == then
    assert teacher_fit(one).config == teacher_fit(more).config


def test_settings_that_are_not_given_are_the_papers() -> None:
    """GTC's threshold is 8, HTM's 2 (000 3.2); blocks have 50 steps, zeta and C are 1."""
    assert TRAINERS["gtc"]() == GtcConfig(gradient_threshold=8.0)
    blocks = {"block_size": 50, "block_learning_rate": 1.0, "momentum_constant": 1.0}
    assert TRAINERS["bmuf"]() == BmufConfig(**blocks)
    assert TRAINERS["htm"]() == HtmConfig(gradient_threshold=2.0, group_size=0, **blocks)


def test_a_misspelt_key_is_dropped_by_no_trainer() -> None:
    """Also where --trainer names another one."""
    with pytest.raises(ConfigurationError, match="unknown key blok_size: did you mean block_size"):
        tiny("student.trainer.blok_size=7", student="bmuf")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("aligner.trainer.gradient_threshold=1", "unknown key gradient_threshold: known: name"),
        ("student.trainer.grup_size=1", "unknown key grup_size: did you mean group_size"),
        ("student.trainer.name=gtc", "student: trainer: unknown key block_size: known: name, grad"),
        (
            "student.trainer.gradient_threshold=-1",
            r"gradient_threshold = -1.0: need 0 \(unquantized gradients\) or 1e-12",
        ),
    ],
)
def test_a_trainers_settings_are_checked_with_the_recipe(override: str, message: str) -> None:
    """Keys that the trainer does not have, and values out of range, before anything is trained."""
    with pytest.raises(ConfigurationError, match=message):
        tiny(override)


@pytest.mark.parametrize("name", TRAINERS)
def test_each_trainer_counts_its_vectors(name: str) -> None:
    """The check of a recipe asks for it; HTM has GTC's residual beside BMUF's vectors."""
    config = TRAINERS[name]()
    num_expected = {"synchronous": 0, "gtc": 1, "bmuf": 3, "htm": 4, "ad_psgd": 6}.get(name)
    assert 0 <= config.num_state_vectors <= 6
    assert num_expected is None or config.num_state_vectors == num_expected


def test_one_bit_brings_its_optimizer_and_refuses_others() -> None:
    """Named for a job it trains by plain SGD; a recipe that gives it another one is refused."""
    recipe = read_recipe(recipe_path("demo"), (), {"student": "one_bit"})
    assert recipe.student.optimizer == SgdConfig(momentum=0.0)
    for optimizer in (AdamConfig(), SgdConfig()):
        with pytest.raises(ValueError, match=r"need optimizer = \{ name = .sgd., momentum = 0 \}"):
            replace(recipe.student, optimizer=optimizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("baseline.num_chunked_epochs=99", "num_chunked_epochs = 99: need 0"),
        ("student.num_whole_utterance_sub_epochs=3", r"sub_epochs = 3: need 0\.\.2, the sub-ep"),
        ("targets.k=61", "targets: k = 61: need at most senones.max_senones = 60"),
        ("baseline.final_learning_rate=1", r"learning rates .* -> 1.0: need 0 < final <= initial"),
        ("checkpoints.steps=-1", r"steps = -1: need 0 \(never\) or 1\.\."),
        ("loss_budget=1", "loss_budget = 1.0: need 0 or more, below 1"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(override: str, message: str) -> None:
    """The message names the value and the bound, before anything is read or trained."""
    with pytest.raises(ConfigurationError, match=message):
        tiny(override)


def test_newbob_needs_rates_to_halve_between_and_utterances_to_validate_on() -> None:
    """Its bounds hold where the schedule is newbob's, and only there."""
    equal = ("baseline.initial_learning_rate=0.1", "baseline.final_learning_rate=0.1")
    none_left_out = "baseline.validation_one_in=0"
    tiny(*equal, none_left_out)
    with pytest.raises(ConfigurationError, match=r"0.1 -> 0.1: need 0 < minimum < initial"):
        tiny(*equal, "baseline.schedule=newbob")
    with pytest.raises(ConfigurationError, match="validation_one_in = 0: need at least 2"):
        tiny(none_left_out, "baseline.schedule=newbob")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BmufConfig(ranks_per_leader=3), "ranks_per_leader = 3: need a divisor of 4"),
        (HtmConfig(group_size=3), "group_size = 3: need a divisor of 4, the number of ranks"),
        (
            OneBitConfig(adagrad=AdaGrad(place=AdaGradPlace.RAW)),
            r"adagrad\.place = 'raw' on 4 ranks: need 1 rank",
        ),
    ],
)
def test_ranks_that_a_trainer_cannot_use_are_refused(config: TrainerConfig, message: str) -> None:
    """Before any data is read; the message names the setting and the number of ranks."""
    with pytest.raises(ValueError, match=message):
        config.check_ranks(4, 4)


def test_the_student_has_a_most_of_sub_epochs() -> None:
    """A plan of all passes is held in memory, so it is bounded, and one more is refused."""
    passes = "student.num_sub_epochs=10000", "student.num_passes=10"
    assert tiny(*passes).student.num_passes == 10
    with pytest.raises(ConfigurationError, match="num_passes = 110000: need at most 100000"):
        tiny(*passes, "student.num_passes=11")
