"""Prune a back-off n-gram model by what each n-gram is worth.

A. Stolcke, "Entropy-based pruning of backoff language models", Proc. DARPA Broadcast News
Transcription and Understanding Workshop, 1998. How often a history occurs, its P(h), another model
should say than one by Kneser-Ney, whose shorter n-grams count the words before them: C. Chelba,
T. Brants, W. Neveitt, P. Xu, "Study on interaction between entropy pruning and Kneser-Ney
smoothing", Proc. Interspeech, 2010.
"""

from dataclasses import dataclass

import numpy as np

from training.decode.ngrams import END, START, BackoffModel, ngram_keys

_LEAST = 1e-12
"""Less than this is the rounding error of a sum of probabilities."""

FULL = 0.9
"""A history is full if the words listed after it have this share of what backing off gives.

Any one of them that is removed gets its old probability back by the new back-off weight, so it
seems worth nothing, though all of them together are worth something.
"""

_SMALLEST = np.finfo(np.float64).tiny


def pruned(
    model: BackoffModel, threshold: float, histories: BackoffModel | None = None
) -> BackoffModel:
    """Remove each n-gram without which perplexity rises by less than a share, `threshold`.

    `histories` is the model of P(h), of the same words and without pruning; by default the same.
    What one n-gram's removal changes is computed by the whole model; a history that is `FULL` keeps
    all of its n-grams if those to be removed together change more than the threshold of each.
    Unigrams stay, and so do the histories of n-grams that stay. What the probabilities after a
    history that is listed sum to, which is one in an estimated model, does not change. With 0 the
    model stays as it is.
    """
    if threshold == 0:
        return model
    masses = Masses.of(model)
    is_kept = np.expm1(masses.relative_entropies(histories or model)) >= threshold
    is_kept[: model.starts[2]] = True
    history = model.ngrams["history"]
    after_full = np.flatnonzero(~is_kept & masses.is_full[history])
    of_history, entropies = masses.joint_entropies(histories or model, after_full)
    is_worth_more = np.expm1(entropies) >= threshold * np.bincount(of_history)
    is_kept[after_full[is_worth_more[of_history]]] = True
    for length in range(model.order, 2, -1):
        some = model.of_length(length)
        is_kept[model.ngrams["history"][some][is_kept[some]]] = True
    removed = ~is_kept
    removed_mass = np.bincount(
        history[removed], masses.probabilities[removed], minlength=len(history)
    )
    return _renormalized(
        model.restricted_to(is_kept),
        unlisted=(masses.unlisted + removed_mass)[is_kept],
        totals=masses.totals[is_kept],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Masses:
    """Masses of a model, by n-gram hw: P(w | h) and, but for unigrams, P(w | h less a word).

    By n-gram as a history: what all words' probabilities after it sum to, `totals`; by the history
    to which it backs off, those of words not listed after it, `shorter_unlisted`; by itself,
    `unlisted`; and whether those listed have the share `FULL`.
    """

    model: BackoffModel
    probabilities: np.ndarray
    shorter_probabilities: np.ndarray
    totals: np.ndarray
    shorter_unlisted: np.ndarray
    unlisted: np.ndarray
    is_full: np.ndarray

    @classmethod
    def of(cls, model: BackoffModel) -> "Masses":
        """Sum up a model."""
        ngrams, suffixes = model.ngrams, model.suffixes()
        history = ngrams["history"]
        probabilities = 10 ** ngrams["log_probability"]
        probabilities[0] = 0
        if START in model.words:  # KenLM writes a probability of 1, though no word is before it
            probabilities[1 + model.words.index(START)] = 0
        shorter = np.zeros(len(ngrams))
        for length in range(2, model.order + 1):
            shorter[model.of_length(length)] = 10 ** model.backed_off(suffixes, length)
        listed = np.bincount(history[1:], probabilities[1:], minlength=len(ngrams))
        listed_shorter = np.bincount(history[1:], shorter[1:], minlength=len(ngrams))
        weights = 10 ** ngrams["log_backoff"]
        totals = listed.copy()  # of the empty history, all unigrams
        shorter_unlisted, is_full = np.zeros(len(ngrams)), np.zeros(len(ngrams), np.bool_)
        for length in range(1, model.order + 1):
            some = model.of_length(length)
            rest = np.maximum(totals[suffixes[some]] - listed_shorter[some], 0)
            totals[some] += weights[some] * rest
            shorter_unlisted[some] = rest
            is_full[some] = listed_shorter[some] >= FULL * totals[suffixes[some]]
        unlisted = weights * shorter_unlisted
        return cls(model, probabilities, shorter, totals, shorter_unlisted, unlisted, is_full)

    def joint_entropies(
        self, histories: BackoffModel, removed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return D(p || p') in nats of each history that has some of the `removed` n-grams.

        That is Equation 3 with one new weight for all that are removed after it. First comes, for
        each of these, its history's place in the second array. `removed` has numbers of n-grams.
        """
        ngrams = self.model.ngrams[removed]
        history, place = np.unique(ngrams["history"], return_inverse=True)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(place, values, len(history))

        p, shorter = self.probabilities[removed], self.shorter_probabilities[removed]
        shorter = np.maximum(shorter, _SMALLEST)
        mass, unlisted = total(p), self.unlisted[history]
        rest = self.shorter_unlisted[history] + total(shorter)
        log_weight = np.log(np.maximum(unlisted + mass, _SMALLEST) / np.maximum(rest, _SMALLEST))
        log_ratio = ngrams["log_probability"] * np.log(10) - np.log(shorter)
        old_log_weight = self.model.ngrams["log_backoff"][history] * np.log(10)
        divergence = total(p * log_ratio) - mass * log_weight
        divergence += unlisted * (old_log_weight - log_weight)
        probabilities = np.exp(_log_history_probabilities(self.model, histories)[history])
        return place, probabilities * divergence

    def relative_entropies(self, histories: BackoffModel) -> np.ndarray:
        """Return for each n-gram hw D(p || p') in nats, if it alone of those after h is removed.

        That is P(h) times the divergence of the distributions after h. Equation 3 of the paper,
        whose P(h) is the chain rule's by `histories`; as in SRILM, P(<s>) is the unigram of </s>. 0
        for unigrams.
        """
        model, p = self.model, self.probabilities
        entropies = np.zeros(len(p))
        some = slice(model.starts[2], None)
        history, p = model.ngrams["history"][some], p[some]
        shorter = self.shorter_probabilities[some]
        unlisted = self.unlisted[history]
        # A probability may be too small for its number.
        shorter = np.maximum(shorter, _SMALLEST)
        mass = np.maximum(unlisted + p, _SMALLEST)
        log_weight = np.log(mass / (self.shorter_unlisted[history] + shorter))
        log_ratio = model.ngrams["log_probability"][some] * np.log(10) - np.log(shorter)
        old_log_weight = model.ngrams["log_backoff"][history] * np.log(10)
        divergence = p * (log_ratio - log_weight) + unlisted * (old_log_weight - log_weight)
        entropies[some] = np.exp(_log_history_probabilities(model, histories))[history] * divergence
        return entropies


def _log_history_probabilities(model: BackoffModel, histories: BackoffModel) -> np.ndarray:
    """Return ln P(h) by `histories`, by the chain rule, of each n-gram of `model` as a history."""
    assert model.words == histories.words
    ngrams, places = model.ngrams, np.arange(len(model.ngrams))  # in `histories`
    if histories is not model:
        keys = ngram_keys(histories.ngrams["history"], histories.ngrams["word"], len(model.words))
        for length in range(2, model.order):
            some = model.of_length(length)
            wanted = ngram_keys(
                places[ngrams["history"][some]], ngrams["word"][some], len(model.words)
            )
            places[some] = np.searchsorted(keys, wanted)
            assert (keys[places[some]] == wanted).all(), "a history that the other model lacks"
    logs: np.ndarray = histories.ngrams["log_probability"] * np.log(10)
    if {START, END} <= {*model.words}:
        logs[1 + model.words.index(START)] = logs[1 + model.words.index(END)]
    for length in range(2, histories.order):
        some = histories.of_length(length)
        logs[some] += logs[histories.ngrams["history"][some]]
    return logs[np.minimum(places, len(logs) - 1)]


def _renormalized(model: BackoffModel, unlisted: np.ndarray, totals: np.ndarray) -> BackoffModel:
    """Choose all back-off weights so that unlisted words have their mass after each history.

    `totals` are what the probabilities after each history sum to.
    """
    suffixes = model.suffixes()
    for length in range(2, model.order + 1):
        # Shorter histories back off by their new weights already.
        some = model.of_length(length)
        shorter = 10 ** model.backed_off(suffixes, length)
        listed = np.bincount(model.ngrams["history"][some], shorter, minlength=len(totals))
        of_histories = model.of_length(length - 1)
        rest = totals[suffixes[of_histories]] - listed[of_histories]
        mass = unlisted[of_histories]
        can_back_off = (rest > _LEAST) & (mass > _LEAST)
        weights = model.ngrams["log_backoff"][of_histories]
        logs = np.log10(np.where(can_back_off, mass, 1) / np.where(can_back_off, rest, 1))
        # Where no n-gram is left to continue a history, the weight is 1 but for rounding.
        weights[can_back_off] = np.round(logs[can_back_off], 12) + 0.0
    return model
