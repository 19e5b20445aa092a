"""Automatic phonetic questions: sets of phones that sound alike, by bottom-up clustering."""

import numpy as np
from jaxtyping import Bool, Float64

from training.decoding.senones.gaussian_statistics import GaussianStatistics


def phonetic_questions(statistics: GaussianStatistics) -> Bool[np.ndarray, "questions phones"]:
    """Every phone alone, and every cluster met while merging the two closest until one is left.

    `statistics` has one row a phone. Closest are the two clusters whose merger costs the least
    log-likelihood; phones without frames merge first, at no cost.
    """
    num_phones = len(statistics)
    clusters = list(np.eye(num_phones, dtype=bool))
    questions = list(clusters)
    while len(clusters) > 2:
        first, second = _closest(np.stack(clusters).astype(np.float64), statistics)
        merged = clusters.pop(second) | clusters.pop(first)
        clusters.append(merged)
        questions.append(merged)
    return np.stack(questions)


def _closest(
    clusters: Float64[np.ndarray, "clusters phones"], statistics: GaussianStatistics
) -> tuple[int, int]:
    apart = statistics.pool(clusters).log_likelihoods()
    first, second = np.triu_indices(len(clusters), k=1)
    together = statistics.pool(clusters[first] + clusters[second]).log_likelihoods()
    best = int(np.argmin(apart[first] + apart[second] - together))
    return int(first[best]), int(second[best])
