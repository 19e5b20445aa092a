"""The recommended trainer: the fastest that is known to be accurate, on any link and ranks."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infra.settings import read_record
from tests.training.cost_model.settings import CALIBRATION, NETWORK, WORKLOAD
from training.cost_model.step_time import CostModel, Network
from training.cost_model.trainer_choice import (
    BY_HOST,
    EQUALLY_FAST,
    KEPT_ACCURACY,
    KEYS,
    SIMULATED,
    SOURCES,
    Candidate,
    Recommendation,
    recommend,
)
from training.settings.trainers import TRAINERS, AdaGrad, AdaGradPlace, OneBitConfig

HOSTS_OF_8 = replace(NETWORK, ranks_per_host=8)


def recommended(
    num_ranks: int, minibatch_frames: int = 2048, network: Network = HOSTS_OF_8
) -> Recommendation:
    """Recommend a trainer for the model of a million parameters."""
    workload = replace(WORKLOAD, minibatch_frames=minibatch_frames)
    return recommend(CostModel(workload, replace(CALIBRATION, network=network)), num_ranks)


def candidate(found: Recommendation, name: str) -> Candidate:
    """Return the candidate of a trainer with its settings."""
    return next(each for each in found.candidates if each.name == name)


@pytest.mark.parametrize("minibatch_frames", [16, 64, 256, 2048])
@given(
    st.sampled_from([1, 2, 4, 8, 12, 16, 32, 64, 128, 256]),
    st.floats(1e-4, 1e3),
    st.floats(1e-4, 1e3),
    st.sampled_from([4, 8, 16]),
)
@example(128, 25.0, 300.0, 8)
def test_the_recommendation_loses_nothing_that_another_keeps(
    minibatch_frames: int, num_ranks: int, between: float, within: float, ranks_per_host: int
) -> None:
    """It stays within 1 % where any row is known to, and then none such is faster by a tenth.

    Where none is, it loses least of those whose accuracy is known.
    """
    network = replace(
        NETWORK, between_gbps=between, within_gbps=within, ranks_per_host=ranks_per_host
    )
    found = recommended(num_ranks, minibatch_frames, network)
    speeds = [each.speed_up for each in found.candidates]
    assert speeds == sorted(speeds, reverse=True)
    known = [each for each in found.candidates if each.simulated or each.printed]
    if found.chosen is None:
        assert not known
        return
    assert found.chosen in known
    kept = [each for each in known if each.percent >= KEPT_ACCURACY]
    if kept:
        assert found.chosen in kept
        assert found.chosen.speed_up >= EQUALLY_FAST * max(each.speed_up for each in kept)
    else:
        assert found.chosen.percent == max(each.percent for each in known)
    verdicts = [found.verdict(each) for each in found.candidates]
    assert verdicts.count("recommended") == 1


@given(st.integers(2, 1000), st.integers(1, 10_000))
def test_an_accuracy_holds_for_no_more_ranks_and_frames(num_ranks: int, frames: int) -> None:
    """Each stands for its ranks and its frames of all ranks at most; else both are unknown."""
    for each in recommended(num_ranks, frames).candidates:
        for accuracy in filter(None, (each.simulated, each.printed)):
            assert accuracy.num_ranks >= num_ranks
            assert accuracy.frames >= num_ranks * frames
        assert bool(each.unknown) == (each.simulated is each.printed is None)


@pytest.mark.parametrize("minibatch_frames", [1, 2048])
def test_nothing_is_said_of_synchronous_on_several_ranks(minibatch_frames: int) -> None:
    """Its steps have the frames of all ranks: only one rank's accuracy is known to be kept."""
    several = candidate(recommended(2, minibatch_frames), "synchronous")
    assert several.unknown == "ranks > 1"
    alone = recommended(1, minibatch_frames)
    assert alone.chosen == candidate(alone, "synchronous")


def test_blocks_count_in_steps_and_minibatches_together() -> None:
    """HTM's -71.6 % is of blocks of 2 steps and 8,192 frames; paper 000's blocks have 25 steps."""
    two_steps = "htm, group_size = 8, block_size = 2"
    assert candidate(recommended(128, 64), two_steps).percent == -71.6
    at_2048 = recommended(128)
    assert two_steps not in [each.name for each in at_2048.candidates]
    printed = candidate(at_2048, "htm, group_size = 8, block_size = 25").printed
    assert printed is not None
    assert (printed.percent, printed.frames, printed.source) == (-4.4, 262_144, "000")


def test_of_two_papers_the_worse_counts() -> None:
    """On 128 ranks at blocks of 100, 000 prints -13.7 and 003 -2.46; on 64, 003 alone prints."""
    name = "bmuf, block_size = 100"
    assert candidate(recommended(128), name).percent == -13.7
    assert candidate(recommended(64), name).percent == -0.13


def test_a_slow_link_forbids_an_exchange_at_each_step() -> None:
    """Over 0.01 Gbit/s between hosts, blocks win and GTC, as accurate, is said to be slower."""
    found = recommended(16, network=replace(HOSTS_OF_8, between_gbps=0.01, connection_gbps=0.01))
    assert found.chosen is not None
    assert found.chosen.trainer in ("bmuf", "htm")
    assert found.verdict(candidate(found, "gtc")).endswith(" as fast")
    assert found.verdict(candidate(found, "bmuf, block_size = 200")) == "may lose > 1 %"


def test_one_bit_is_proposed_as_it_was_measured() -> None:
    """Table 2's trainings have no AdaGrad; a recipe takes the settings that the name has."""
    found = recommended(4, 64)
    one_bit = next(each for each in found.candidates if each.trainer == "one_bit")
    assert one_bit.simulated is not None
    table = tomllib.loads("\n".join(one_bit.name.split(", ")[1:]))
    config = read_record(OneBitConfig, {**table, "name": "one_bit"}, "recipe")
    assert config == OneBitConfig(
        adagrad=AdaGrad(place=AdaGradPlace.NOWHERE), double_buffering=True
    )
    more = next(each for each in recommended(5, 64).candidates if each.trainer == "one_bit")
    assert more.unknown == "ranks > 4"


def test_only_trainers_of_recipes_are_recommended() -> None:
    """Each trainer has its name in recipes, but the one whose accuracy nobody knows."""
    assert {key[0] for key in KEYS} - TRAINERS.keys() == {BY_HOST}
    assert not any(each.accuracies((BY_HOST, 1, 50)) for each in SOURCES)


def test_papers_losses_are_copied_right() -> None:
    """Rows of the papers' tables, as accuracies relative to one rank."""
    found = {
        (each.name, key, ranks): percent
        for each in SOURCES
        if each.name != SIMULATED
        for key, percents in each.percents.items()
        for ranks, percent in percents.items()
    }
    wers = {("ad_psgd", 64): (8.1, 14.0), ("d1d_psgd", 128): (7.7, 13.3)}
    for (trainer, ranks), (swb, ch) in wers.items():
        worse = min(100 * (7.5 - swb) / 7.5, 100 * (13.0 - ch) / 13.0)
        assert found["001", (trainer, 1, 0), ranks] == pytest.approx(worse, abs=0.05)
    assert found["004", ("one_bit", 1, 0), 4] == pytest.approx(100 * (16.5 - 16.6) / 16.5, abs=0.05)
    groups = [found["000", ("htm" if n > 1 else "bmuf", n, 25), 128] for n in (1, 2, 4, 8)]
    assert groups == [-8.1, -7.9, -5.8, -4.4]


def test_groups_are_equal_and_within_a_host() -> None:
    """Groups divide the ranks and the host; one group of all ranks is GTC."""
    for num_ranks, ranks_per_host, groups in ((128, 8, {2, 4, 8}), (12, 4, {2, 4}), (8, 8, {2, 4})):
        found = recommended(num_ranks, network=replace(NETWORK, ranks_per_host=ranks_per_host))
        htm = [each for each in found.candidates if each.trainer == "htm"]
        assert {each.settings["group_size"] for each in htm} == groups
