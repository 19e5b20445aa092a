"""Draws from the senones beyond the best: right in expectation, merged, repeatable."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax

from pipeline.kbest import (
    TAIL_TOLERANCE,
    KBest,
    check_kbest,
    retained_mass,
    select_kbest,
    soft_targets,
)
from pipeline.steps.targets import tail_seed
from pipeline.tail_samples import draw_tail

K, DRAWS = 20, 4
SEED_OF_A = 15565238360403752506
LOGITS = arrays(
    np.float32, st.tuples(st.integers(0, 6), st.integers(2, 150)), elements=st.floats(-30, 30)
)


def random_logits(num_frames: int = 40, num_senones: int = 300, scale: float = 2) -> np.ndarray:
    generator = np.random.default_rng(1)
    return (generator.standard_normal((num_frames, num_senones)) * scale).astype(np.float32)


def dense(kbest: KBest, num_senones: int) -> np.ndarray:
    """The stored distribution over all senones, [frames, senones]."""
    found = np.zeros((len(kbest.log_z), num_senones))
    frames = np.arange(len(found))[:, np.newaxis]
    np.add.at(found, (frames, kbest.senones.astype(np.int64)), soft_targets(kbest))
    return found


@given(LOGITS, st.data())
def test_what_is_drawn_passes_the_check(logits: np.ndarray, data: st.DataObject) -> None:
    """Whatever the mass: finite columns of which the weights sum to one within float16."""
    k = data.draw(st.integers(2, logits.shape[1]))
    kbest = select_kbest(logits, k, data.draw(st.integers(1, k - 1)), 5)
    check_kbest(kbest, "test")
    assert kbest.senones.shape == kbest.logits.shape == (len(logits), k)
    shares = np.exp(kbest.logits.astype(float) - kbest.log_z[:, np.newaxis].astype(float))
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=TAIL_TOLERANCE)
    # k roundings of float32: those of a sum of k terms and of a quotient.
    np.testing.assert_allclose(soft_targets(kbest).sum(axis=1, dtype=float), 1, rtol=k * 2**-24)


def test_the_head_is_that_of_fewer_columns() -> None:
    """Senones, logits, log Z and mass of k - draws columns; their probabilities are the teacher's.

    Within 2^-8, as log Z of 5 to 6 and logits have 11 bits. Renormalized, they are a third higher
    on average.
    """
    logits = random_logits()
    drawn, alone = select_kbest(logits, K, DRAWS, 9), select_kbest(logits, K - DRAWS)
    assert np.array_equal(drawn.senones[:, : K - DRAWS], alone.senones)
    assert np.array_equal(drawn.logits[:, : K - DRAWS], alone.logits)
    assert np.array_equal(drawn.log_z, alone.log_z)
    assert np.array_equal(retained_mass(drawn), retained_mass(alone))
    exact = -np.sort(-softmax(logits.astype(np.float64), axis=1), axis=1)[:, : K - DRAWS]
    np.testing.assert_allclose(soft_targets(drawn)[:, : K - DRAWS], exact, rtol=2**-8)
    assert (soft_targets(alone) > 1.02 * exact).all()
    assert (soft_targets(alone) / exact).mean() > 1.3


def test_the_mean_over_draws_is_the_teachers_distribution() -> None:
    """Within five standard errors of each senone; k = 20 renormalized is beyond twice that."""
    (frame,) = random_logits(1, 60, 1.0)
    num = 20_000
    exact = softmax(frame.astype(np.float64))
    found = dense(select_kbest(np.tile(frame, (num, 1)), K, DRAWS, 3), 60)
    errors = found.std(axis=0) / np.sqrt(num)
    # float16 rounds a logit by up to 2^-11 of itself, here of at most 4.
    bound = 5 * errors + 2**-9 * exact
    assert (np.abs(found.mean(axis=0) - exact) <= bound).all()
    assert errors.max() < 1e-3
    renormalized = dense(select_kbest(frame[np.newaxis], K), 60)[0]
    assert (np.abs(renormalized - exact) > 2 * bound).all()


def test_repeats_are_merged() -> None:
    """Against a count of the same draws, senone by senone, from a list of the whole tail."""
    logits = random_logits(200, 90, 3)
    kbest = select_kbest(logits, 12, 8, 77)
    uniforms = np.random.Generator(np.random.Philox(key=77)).random((200, 8))
    num_merged = 0
    for frame, row in enumerate(np.exp(logits - logits.max(axis=1, keepdims=True))):
        best = kbest.senones[frame, :4].tolist()
        tail = [number for number in range(90) if number not in best]
        ends = np.cumsum(row[tail].astype(np.float64))
        drawn = Counter(tail[int((ends <= each * ends[-1]).sum())] for each in uniforms[frame])
        found = {
            senone: float(np.exp(np.float64(logit)))
            for senone, logit in zip(kbest.senones[frame, 4:], kbest.logits[frame, 4:], strict=True)
            if logit > np.finfo(np.float16).min
        }
        assert list(found) == sorted(drawn)
        for senone, count in drawn.items():
            assert found[senone] == pytest.approx(count * ends[-1] / 8, rel=2**-8)
        num_merged += len(drawn) < 8
    assert num_merged > 50


def test_equal_seeds_give_equal_bytes() -> None:
    """Another seed gives other draws, and the same head."""
    logits = random_logits()
    first, again, other = (select_kbest(logits, K, DRAWS, seed) for seed in (1, 1, 2**64 - 1))
    assert first.senones.tobytes() == again.senones.tobytes()
    assert first.logits.tobytes() == again.logits.tobytes()
    assert not np.array_equal(first.senones, other.senones)


def test_seeds_are_of_the_utterance_and_its_offset() -> None:
    """64 bits, all different; they do not change with the version of the code."""
    seeds = [tail_seed(*key) for key in ((3, "a", 0), (3, "a", 1), (3, "b", 0), (4, "a", 0))]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[0] == SEED_OF_A


def test_without_a_tail_nothing_is_drawn() -> None:
    """A head that holds all probability leaves columns without weight, and no NaN."""
    logits = np.full((2, 70), -1e6, np.float32)
    logits[:, 5] = 0
    kbest = select_kbest(logits, 3, 2, 1)
    check_kbest(kbest, "test")
    assert kbest.senones[:, 1:].tolist() == [[0, 0], [0, 0]]
    assert soft_targets(kbest).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert retained_mass(kbest).tolist() == [1, 1]


def test_as_many_columns_as_senones_are_all_exact() -> None:
    """Where each senone of the tail has a column, it has its own weight."""
    logits = random_logits(30, 24)
    found = dense(select_kbest(logits, 24, 6, 1), 24)
    np.testing.assert_allclose(found, softmax(logits.astype(np.float64), axis=1), rtol=2**-8)


@given(st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_only_senones_of_the_tail_with_a_weight_are_drawn(seed: int, num_draws: int) -> None:
    """In blocks without any weight, and beyond the last senone, none is."""
    weights = np.zeros((3, 300), np.float32)
    weights[:, [7, 130, 131, 299]] = [1, 0.5, 0.25, 1e-30]
    tail = draw_tail(weights, np.full((3, 1), 7), num_draws, seed)
    drawn = tail.senones[tail.weights > 0]
    assert set(drawn.tolist()) <= {130, 131, 299}
    np.testing.assert_allclose(tail.weights.sum(axis=1), 0.75, rtol=1e-12)


@pytest.mark.parametrize("tail_samples", [-1, 12, 13])
def test_a_column_is_left_for_the_best(tail_samples: int) -> None:
    """The error names the number and the bound."""
    with pytest.raises(ValueError, match=rf"tail_samples = {tail_samples}: need 0\.\.11, below k"):
        select_kbest(random_logits(), 12, tail_samples)


@pytest.mark.parametrize(
    ("column", "senone", "logit", "message"),
    [
        (3, 4, None, "must rise"),
        (3, 40, None, "must rise"),
        (2, 0, None, "among the best"),
        (3, None, 1.0, "sum to"),
        (2, None, np.inf, "finite"),
        (3, None, np.finfo(np.float16).min, "sum to"),
    ],
)
def test_lying_tails_are_refused(
    column: int, senone: int | None, logit: float | None, message: str
) -> None:
    """Falling and repeated senones, one of the head, and weights that do not sum to one."""
    senones = np.array([[0, 1, 40, 50]], np.uint16)
    logits = np.array([[0, -1, -1.5, -1.5]], np.float16)
    log_z = np.log(np.exp(logits.astype(float)).sum(axis=1)).astype(np.float16)
    lying = KBest(senones, logits, log_z, tail_samples=2)
    check_kbest(lying, "u1")
    lying = replace(lying, senones=senones.copy(), logits=logits.copy())
    if senone is not None:
        lying.senones[0, column] = senone
    if logit is not None:
        lying.logits[0, column] = logit
    with pytest.raises(ValueError, match=f"u1: .*{message}"):
        check_kbest(lying, "u1")
