"""Compare Gaussian mixtures with their definition."""

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm

from training.align.monophone_hmm import Mixture, log_likelihoods


def _mixture(num_gaussians: int, random: np.random.Generator) -> Mixture:
    weights = random.random(num_gaussians)
    return Mixture(
        weights / weights.sum(),
        random.normal(size=(num_gaussians, 4)),
        0.5 + random.random((num_gaussians, 4)),
    )


def _total(frames: np.ndarray, mixture: Mixture) -> float:
    return float(log_likelihoods(frames, [mixture]).sum())


def test_log_likelihoods_against_scipy() -> None:
    """Log-likelihoods equal SciPy's weighted sums of normal densities, for several sizes."""
    random = np.random.default_rng(0)
    mixtures = [_mixture(size, random) for size in (1, 3, 2)]
    frames = random.normal(size=(7, 4)).astype(np.float32)
    for state, mixture in enumerate(mixtures):
        densities = norm.logpdf(frames[:, None], mixture.means, np.sqrt(mixture.variances))
        expected = logsumexp(densities.sum(axis=2) + np.log(mixture.weights), axis=1)
        np.testing.assert_allclose(log_likelihoods(frames, mixtures)[:, state], expected, atol=1e-4)


def test_expectation_maximization_raises_the_likelihood() -> None:
    """No re-estimation loses likelihood, and two Gaussians fit two clusters better than one."""
    random = np.random.default_rng(1)
    frames = np.concatenate([random.normal(c, 1, size=(200, 4)) for c in (-3, 3)])
    frames = frames.astype(np.float32)
    one = Mixture.standard(4).reestimate(frames)
    np.testing.assert_allclose(one.means[0], frames.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(one.variances[0], frames.var(axis=0), rtol=1e-4)
    two = one.split(2)
    scores = [_total(frames, two)]
    for _ in range(6):
        two = two.reestimate(frames)
        scores.append(_total(frames, two))
    assert np.diff(scores).min() > -0.1
    assert scores[-1] > _total(frames, one) + 300
