"""The choice of a trainer and its settings: the fastest that keeps the accuracy, with reasons."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.settings import read_record
from tests.training.cost_model.settings import CALIBRATION, NETWORK, WORKLOAD
from training.cost_model.step_time import CostModel, Fitted, Network, ScalingCalibration
from training.cost_model.trainer_choice import (
    BLOCK_SIZES,
    EQUALLY_FAST,
    HTM_GROUP_SIZE,
    KEPT_ACCURACY,
    KEPT_SHARE,
    MEASURED,
    MEASURED_BLOCKS,
    Recommendation,
    TrainerChoice,
    choose_trainer,
    group_sizes,
    recommend,
    step_seconds,
)
from training.settings.trainers import TRAINERS, AdaGrad, AdaGradPlace, OneBitConfig


def choose(network: Network, num_ranks: int) -> TrainerChoice:
    model = CostModel(
        WORKLOAD, ScalingCalibration("by hand", CALIBRATION.rank, network, CALIBRATION.fitted)
    )
    return choose_trainer(model, num_ranks)


@given(
    st.sampled_from([1, 2, 4, 16, 32, 64, 128]),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_the_choice_is_accurate_and_no_faster_one_is(
    num_ranks: int, between_gbps: float, within_gbps: float
) -> None:
    """No candidate is both as accurate as the limit and faster by more than a tenth."""
    network = replace(NETWORK, between_gbps=between_gbps, within_gbps=within_gbps)
    choice = choose(network, num_ranks)
    speeds = [each.speed_up for each in choice.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert choice.chosen.accuracy >= KEPT_ACCURACY
    accurate = [each for each in choice.candidates if each.is_accurate]
    assert choice.chosen.speed_up >= EQUALLY_FAST * max(each.speed_up for each in accurate)
    reasons = [choice.reason(each) for each in choice.candidates]
    assert sum(reason.startswith("chosen") for reason in reasons) == 1


def test_a_slow_link_forbids_an_exchange_at_each_step() -> None:
    """Over 0.01 Gbit/s between hosts, blocks win and sums of gradients are said to be slower."""
    choice = choose(replace(NETWORK, between_gbps=0.01, connection_gbps=0.01), 32)
    assert choice.chosen.trainer in ("bmuf", "htm")
    reasons = {each.name: choice.reason(each) for each in choice.candidates}
    assert reasons["synchronous"].startswith("slower, 0.0")
    # At blocks of 200, measured on 128 ranks alone, it loses 4.1 %: it is faster, and no choice.
    assert choice.chosen.name == "bmuf, block_size = 100"
    assert reasons["bmuf, block_size = 200"] == "loses more than 1 %"


def test_a_candidate_has_the_accuracy_of_at_least_its_ranks() -> None:
    """On 20 ranks the accuracy of 32 counts; on 129 none does, and synchronous alone is left."""
    found = {each.name: each for each in choose(NETWORK, 20).candidates}
    assert found["bmuf, block_size = 50"].measured_ranks == 32
    for num_ranks, trainers in ((128, {"htm", "synchronous"}), (129, {"synchronous"})):
        choice = choose(replace(NETWORK, ranks_per_host=8), num_ranks)
        accurate = {each.trainer for each in choice.candidates if each.is_accurate}
        assert accurate == trainers
    reasons = {each.name: choice.reason(each) for each in choice.candidates}
    assert reasons["bmuf, block_size = 50"] == "not measured on more than 128 ranks"


def test_one_bit_is_credited_on_four_ranks_alone() -> None:
    """It is measured on 4 ranks: on 4 it may be chosen, on 5 it says why it is not."""
    for num_ranks, is_accurate in ((4, True), (5, False)):
        choice = choose(NETWORK, num_ranks)
        one_bit = next(each for each in choice.candidates if each.trainer == "one_bit")
        assert one_bit.is_accurate == is_accurate
    assert choice.reason(one_bit) == "not measured on more than 4 ranks"


def test_one_bit_is_proposed_as_it_was_measured() -> None:
    """Table 2's trainings have no AdaGrad; a recipe takes the settings that the choice names."""
    one_bit = next(each for each in choose(NETWORK, 4).candidates if each.trainer == "one_bit")
    assert one_bit.name == 'one_bit, adagrad.place = "nowhere", double_buffering = true'
    table = tomllib.loads("\n".join(one_bit.name.split(", ")[1:]))
    config = read_record(OneBitConfig, {**table, "name": "one_bit"}, "recipe")
    assert config == OneBitConfig(
        adagrad=AdaGrad(place=AdaGradPlace.NOWHERE), double_buffering=True
    )


def test_only_trainers_of_recipes_are_chosen() -> None:
    """Each measured trainer has its name in recipes, and those without blocks a step time."""
    assert MEASURED.keys() | MEASURED_BLOCKS.keys() <= TRAINERS.keys()
    assert MEASURED.keys() == step_seconds(CostModel(WORKLOAD, CALIBRATION), 4).keys()


@pytest.mark.parametrize("num_ranks", [8, 16, 24, 64, 128])
def test_only_measured_settings_are_proposed(num_ranks: int) -> None:
    """Blocks and groups are those of the accuracies; HTM needs two groups of 8 within hosts."""
    choice = choose(replace(NETWORK, ranks_per_host=8), num_ranks)
    for each in choice.candidates:
        if each.trainer in MEASURED_BLOCKS:
            assert each.settings["block_size"] in MEASURED_BLOCKS[each.trainer]
            measured = MEASURED_BLOCKS[each.trainer][each.settings["block_size"]]
            assert each.accuracy == measured[each.measured_ranks]
    groups = {each.settings["group_size"] for each in choice.candidates if each.trainer == "htm"}
    assert groups == ({HTM_GROUP_SIZE} if num_ranks > HTM_GROUP_SIZE else set())
    assert not any(each.trainer == "htm" for each in choose(NETWORK, num_ranks).candidates)


def recommended(num_ranks: int, between_gbps: float, within_gbps: float = 8.0) -> Recommendation:
    """Recommend settings for links of these bandwidths."""
    network = replace(
        NETWORK, between_gbps=between_gbps, connection_gbps=between_gbps, within_gbps=within_gbps
    )
    fitted = Fitted(waiting=0.03, congestion=0.01)
    calibration = replace(CALIBRATION, network=network, fitted=fitted)
    return recommend(CostModel(WORKLOAD, calibration), num_ranks)


def test_a_slower_link_needs_larger_blocks() -> None:
    """The block grows as the link slows; groups remain as large as a host."""
    choices = [recommended(32, gbps).chosen for gbps in (10.0, 0.1, 0.01)]
    assert [choice.group_size for choice in choices] == [4, 4, 4]
    assert [choice.block_size for choice in choices] == [25, 50, 400]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([4, 8, 24, 128]), st.floats(1e-4, 100), st.floats(1e-4, 100))
def test_nine_tenths_of_the_speed_are_kept(ranks: int, between: float, within: float) -> None:
    """The choice keeps 90 % of the best speed-up, and none exceeds the best."""
    found = recommended(ranks, between, within)
    assert KEPT_SHARE * found.fastest.speed_up <= found.chosen.speed_up <= found.fastest.speed_up
    assert found.chosen.block_size in BLOCK_SIZES


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "expected"),
    [
        (128, 8, [1, 2, 4, 8]),
        (24, 16, [1, 2, 4, 8]),
        (4, 8, [1, 2, 4]),
        (6, 8, [1, 2, 6]),
        (1, 8, [1]),
    ],
)
def test_groups_are_equal_and_within_a_host(
    num_ranks: int, ranks_per_host: int, expected: list[int]
) -> None:
    """Group sizes divide the ranks and the host; all ranks of one host are a group, too."""
    assert group_sizes(num_ranks, ranks_per_host) == expected
