"""A recipe's optimizer, block momentum, warm-up and warm start decide what a fit does."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from infra.settings import ConfigurationError
from jobs.cli.job import recipe_path
from pipeline.normalization import Moments
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import realignment_rounds
from tests.training.fit.small_fits import (
    copy_stopped,
    fit,
    small_fit,
    speech,
    steps_saved,
    write_run,
    write_step,
)
from training.algorithms.block_filter import BlockFilter
from training.distributed.simulated_group import simulate_ranks
from training.fit.model_specs import (
    MOMENTS,
    Fit,
    aligner_fit,
    baseline_fit,
    sequence_fit,
    student_fit,
    teacher_fit,
)
from training.models.precision import has_bfloat16
from training.models.store import decode_model
from training.settings.models import LstmConfig
from training.settings.recipe import CheckpointConfig, Recipe, read_recipe
from training.settings.trainers import (
    AdamConfig,
    AdamwConfig,
    BmufConfig,
    GtcConfig,
    HtmConfig,
    OptimizerConfig,
    SgdConfig,
)
from training.trainers import Bmuf, Htm
from training.trainers.trainer import make_optimizer, make_trainer

EVERY_STEP = CheckpointConfig(steps=1, num_kept=1000)


def recipe(*overrides: str) -> Recipe:
    return read_recipe(recipe_path("demo"), overrides)


@pytest.fixture
def steps_taken() -> Iterator[list[tuple[type[Optimizer], dict[str, Any]]]]:
    """Each step's optimizer and hyperparameters, in the order in which simulated ranks step."""
    taken: list[tuple[type[Optimizer], dict[str, Any]]] = []

    def note(optimizer: Optimizer, *_: object) -> None:
        taken.append((type(optimizer), dict(optimizer.param_groups[0])))

    handle = register_optimizer_step_pre_hook(note)
    yield taken
    handle.remove()


@pytest.mark.parametrize(
    ("optimizer", "made", "settings"),
    [
        (SgdConfig(momentum=0.8), SGD, {"momentum": 0.8, "weight_decay": 0}),
        (AdamConfig(beta1=0.8, epsilon=1e-7), Adam, {"betas": (0.8, 0.999), "eps": 1e-7}),
        (AdamwConfig(beta2=0.99), AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.01}),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_fit_steps_the_optimizer_that_it_names(
    tmp_path: Path,
    steps_taken: list[tuple[type[Optimizer], dict[str, Any]]],
    optimizer: OptimizerConfig,
    made: type[Optimizer],
    settings: dict[str, object],
) -> None:
    """With its settings, at every step; the loss falls."""
    write_run(tmp_path)
    what = small_fit()
    what = replace(what, training=replace(what.training, optimizer=optimizer))
    manifest, _ = simulate_ranks(1, fit, tmp_path, what)[0]
    assert {each for each, _ in steps_taken} == {made}
    assert all(settings.items() <= taken.items() for _, taken in steps_taken)
    losses = [point["cross_entropy"] for point in manifest.statistics["curve"]]
    assert losses[-1] < losses[0]


def test_recipes_choose_the_optimizer() -> None:
    """By its name; Adam's defaults are torch's, fused; another optimizer's setting is refused."""
    chosen = student_fit(recipe("student.optimizer.name=sgd", "student.optimizer.momentum=0.5"))
    assert chosen.training.optimizer == SgdConfig(momentum=0.5)
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    for config, made in ((AdamConfig(), Adam), (AdamwConfig(), AdamW)):
        assert make_optimizer(config, parameters).defaults == made(parameters, fused=True).defaults
    with pytest.raises(ConfigurationError, match="unknown key momentum: known: name, beta1"):
        recipe("student.optimizer.name=adam", "student.optimizer.momentum=0.5")
    with pytest.raises(ConfigurationError, match="optimizer: name = 'sgdm': need one of 'sgd'"):
        recipe("student.optimizer.name=sgdm")


def steps(optimizer: Optimizer, numbers: range, num_threads: int = 1) -> list[Tensor]:
    """The weights after steps on gradients that follow from the steps' numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    weights = optimizer.param_groups[0]["params"]
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for each in weights:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    torch.set_num_threads(before)
    return [each.detach().clone() for each in weights]


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((301, 201), (97,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


OPTIMIZERS = [
    (SgdConfig(), partial(SGD, momentum=0.9)),
    (AdamConfig(), Adam),
    (AdamwConfig(), partial(AdamW, weight_decay=0.01)),
]


@pytest.mark.parametrize(("config", "plain"), OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_fused_steps_are_the_optimizers(config: OptimizerConfig, plain: Any) -> None:
    """Within rounding those of torch's plain ones; the same bits on any number of threads."""
    fused = [steps(make_optimizer(config, weights()), range(20), threads) for threads in (1, 3)]
    expected = steps(plain(weights(), lr=1e-3), range(20))
    for one, three, right in zip(*fused, expected, strict=True):
        assert torch.equal(one, three)
        torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("config", "plain"), OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_a_checkpoint_says_whether_its_optimizer_was_fused(
    config: OptimizerConfig, plain: Any
) -> None:
    """One of a plain optimizer resumes as such, and one of a fused one fused, to the bit."""
    for make in (lambda given: plain(given, lr=1e-3), partial(make_optimizer, config)):
        whole = make(weights())
        steps(whole, range(3))
        copies = [torch.nn.Parameter(each.clone()) for each in whole.param_groups[0]["params"]]
        resumed = make_optimizer(config, copies)
        resumed.load_state_dict(deepcopy(whole.state_dict()))
        pairs = zip(steps(whole, range(3, 6)), steps(resumed, range(3, 6)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_the_papers_recipe_is_sgd_from_a_warm_start() -> None:
    """All models of hours_1m are trained by SGD; the student begins with the baseline (000 3.2)."""
    papers = read_recipe(recipe_path("hours_1m"))
    aligners = [aligner_fit(papers, each) for each in realignment_rounds(papers.alignment.rounds)]
    others = [describe(papers) for describe in (baseline_fit, teacher_fit, student_fit)]
    fits = [*aligners, *others]
    assert {each.training.optimizer for each in fits} == {SgdConfig(momentum=0.9)}
    assert [each.warm_start for each in fits] == ["none", "none", "none", "none", "baseline"]
    assert isinstance(fits[-1].training.trainer, BmufConfig)
    assert (fits[-1].training.trainer.form, fits[-1].training.trainer.block_momentum) == (
        "nesterov",
        None,
    )


def test_the_papers_recipe_trains_all_models_on_by_smbr() -> None:
    """Three epochs after the 10 + 2 of cross-entropy, by GTC, at a density of 10 (003 VII-C3)."""
    papers = read_recipe(recipe_path("hours_1m"))
    supervised = [describe(papers) for describe in (baseline_fit, teacher_fit)]
    for made in supervised:
        chunked = [each for each in made.sub_epochs if not each.whole_utterances]
        assert (len(chunked), len(made.sub_epochs)) == (10, 12)
    assert papers.sequence_training.models == ("baseline", "teacher", "student")
    assert papers.sequence_training.lattices.density == 10
    for made in (*supervised, student_fit(papers)):
        by_sequence = sequence_fit(papers, made)
        assert len(by_sequence.sub_epochs) == 3
        assert by_sequence.training.trainer == GtcConfig(gradient_threshold=8.0)


@pytest.mark.parametrize("trainer", [BmufConfig, HtmConfig])
def test_recipes_choose_the_block_filter(trainer: type[BmufConfig] | type[HtmConfig]) -> None:
    """Form, block momentum and the optimizer's state reach the trainer; eq. (5) is the default."""
    chosen = trainer(block_momentum=0.25, form="as_printed", optimizer_state="average")
    made, usual = (simulate_ranks(4, make, each)[0] for each in (chosen, trainer()))
    assert made.filter == BlockFilter(1.0, 0.25, "as_printed")
    assert made.blocks.optimizer_state == "average"
    assert usual.filter == BlockFilter(1.0, 0.0 if isinstance(usual, Htm) else 0.75, "nesterov")
    assert usual.blocks.optimizer_state == "keep"


def make(group: Any, config: BmufConfig | HtmConfig) -> Bmuf:
    model = torch.nn.Linear(2, 2)
    return make_trainer(config, model, torch.optim.SGD(model.parameters()), group)


def test_a_given_block_momentum_needs_no_eq_5() -> None:
    """C = 0.1 gives 4 models a negative block momentum, which a given one takes the place of."""
    with pytest.raises(ValueError, match=r"momentum_constant = 0\.1: need at least"):
        BmufConfig(momentum_constant=0.1).check_ranks(4, 4)
    BmufConfig(momentum_constant=0.1, block_momentum=0.0).check_ranks(4, 4)


def warmed_up() -> Fit:
    what = small_fit("bmuf", checkpoints=EVERY_STEP)
    return replace(what, training=replace(what.training, warm_up_steps=5))


def test_the_rate_rises_over_the_warm_up(
    tmp_path: Path, steps_taken: list[tuple[type[Optimizer], dict[str, Any]]]
) -> None:
    """From a fifth by a fifth each step, across sub-epochs; then the sub-epochs' own rates."""
    what = warmed_up()
    write_run(tmp_path)
    simulate_ranks(1, fit, tmp_path, what)
    rates = [taken["lr"] for _, taken in steps_taken]
    steps = len(rates) // len(what.sub_epochs)
    expected = [each.learning_rate for each in what.sub_epochs for _ in range(steps)]
    assert steps < 5 < len(rates)
    warm = [(number + 1) / 5 * rate for number, rate in enumerate(expected[:4])]
    assert rates == [*warm, *expected[4:]]


def test_the_warm_up_resumes(tmp_path: Path) -> None:
    """Its steps are counted over all of training, so that resuming is bitwise."""
    what = warmed_up()
    write_run(tmp_path / "whole")
    expected = simulate_ranks(2, fit, tmp_path / "whole", what)
    for step in steps_saved(tmp_path / "whole", what)[:4]:
        copy_stopped(tmp_path / "whole", what, step, tmp_path / f"stopped-{step}")
        assert simulate_ranks(2, fit, tmp_path / f"stopped-{step}", what) == expected


def test_a_fit_computes_in_the_precision_that_it_names(tmp_path: Path) -> None:
    """In bfloat16 nearly the loss of float32, which falls; what is stored is float32.

    A CPU that does not multiply bfloat16 computes in float32, to the bit.
    """
    fits = {each: f"student.precision={each}" for each in ("float32", "bfloat16")}
    assert {each: student_fit(recipe(text)).training.precision for each, text in fits.items()} == {
        each: each for each in fits
    }
    losses = []
    for precision in fits:
        what = small_fit(student=True)
        what = replace(what, training=replace(what.training, precision=precision))
        write_run(tmp_path / precision)
        manifest, model = simulate_ranks(1, fit, tmp_path / precision, what)[0]
        losses.append([point["cross_entropy"] for point in manifest.statistics["curve"]])
        stored = decode_model(model, what.model).model
        assert {each.dtype for each in stored.parameters()} == {torch.float32}
    assert (losses[0] != losses[1]) == has_bfloat16(torch.device("cpu"))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < losses[1][0]


def warm_student() -> Fit:
    """A student that begins from the baseline, and whose rate leaves it there."""
    what = replace(small_fit(student=True), warm_start="baseline")
    still = [replace(each, learning_rate=1e-30) for each in what.sub_epochs[:1]]
    return replace(what, sub_epochs=still)


def test_a_warm_start_begins_from_an_earlier_model(tmp_path: Path) -> None:
    """Its weights are the baseline's, on all ranks; the baseline is one of its inputs."""
    write_run(tmp_path)
    _, baseline = simulate_ranks(2, fit, tmp_path, small_fit())[0]
    manifest, student = simulate_ranks(2, fit, tmp_path, warm_student())[0]
    form = small_fit().model
    before, after = (decode_model(each, form).model.state_dict() for each in (baseline, student))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "models/baseline" in manifest.inputs
    assert "models/baseline" not in small_fit(student=True).inputs


def test_a_warm_start_keeps_the_normalization_of_its_weights(tmp_path: Path) -> None:
    """The baseline's is of labelled speech; a student that begins from nothing has that of all."""
    store, run_uri = write_run(tmp_path)
    Path(manifest_uri(run_uri, "features/unlabelled")).unlink()
    higher = Moments.of(3 + np.concatenate([speech(number)[0] for number in range(8)]))
    write_step(store, run_uri, "features/unlabelled", None, moments=higher.to_dict())
    supervised = replace(small_fit(), moments=MOMENTS["labelled"])
    manifest, baseline = simulate_ranks(1, fit, tmp_path, supervised)[0]
    assert "features/unlabelled" not in manifest.inputs
    cold = replace(small_fit(student=True), name="teacher_round_2")
    students = [simulate_ranks(1, fit, tmp_path, each)[0][1] for each in (warm_student(), cold)]
    form = small_fit().model
    before, warm, of_all = (decode_model(each, form).model for each in (baseline, *students))
    assert all(torch.equal(*each) for each in zip(before.buffers(), warm.buffers(), strict=True))
    assert torch.allclose(of_all.mean, before.mean + 1.5, atol=0.01)


def test_a_warm_start_needs_a_model_of_the_same_form(tmp_path: Path) -> None:
    """Both forms are named; so is a model that a recipe cannot begin from."""
    write_run(tmp_path)
    simulate_ranks(1, fit, tmp_path, small_fit())
    wider = replace(warm_student(), model=LstmConfig(2, 9, False, 1, 0.1))
    with pytest.raises(ConfigurationError, match=r"'baseline': .*_units': 8.* has .*_units': 9"):
        simulate_ranks(1, fit, tmp_path, wider)
    assert student_fit(recipe("student.warm_start=aligner")).warm_start == "aligner"
    for section in ("aligner", "teacher"):
        with pytest.raises(ConfigurationError, match="warm_start = 'aligner': need one of none:"):
            recipe(f"{section}.warm_start=aligner")
    with pytest.raises(ConfigurationError, match="baseline: warm_start = 'baseline': need one of"):
        recipe("baseline.warm_start=baseline")
