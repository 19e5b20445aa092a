"""The scores of an evaluation: rates, intervals over speakers, significance, worst utterances.

A speaker's utterances share the voice and the room, so the bootstrap draws speakers, not utterances
(Bisani & Ney 2004; 003 Table II). All models are counted on the same draws, which makes comparisons
paired. MAPSSWE takes segments of an utterance as independent, and their differences as normal. One
voice makes the same error in many segments, so here a pair is a speaker, and nothing is assumed
normal.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.runs.names import BASELINE, STUDENT, sequence_trained
from training.evaluate.confidence import Calibration, calibration
from training.evaluate.word_errors import DecodedUtterance, UtteranceErrors, WordErrors, werr

NUM_RESAMPLES = 10_000
SEED = 17
LEVEL = 95
"""The share of resamples within an interval, in percent: the percentiles 2.5 and 97.5."""

_MAX_DRAWN = 2**20  # of speakers, at a time: 8 MB


@dataclass(frozen=True, slots=True, eq=False)
class SpeakerCounts:
    """SpeakerCounts: reference words of each speaker, and the word errors of each model."""

    speakers: tuple[str, ...]
    words: Int64[np.ndarray, " speakers"]
    errors: Mapping[str, Int64[np.ndarray, " speakers"]]

    @classmethod
    def of(cls, utterances: Iterable[UtteranceErrors]) -> "SpeakerCounts":
        """Add up utterances by speaker, of several folds, seeds or placements too.

        ValueError for an utterance that one of the first one's models did not decode.
        """
        rows: dict[str, list[int]] = {}
        models: tuple[str, ...] = ()
        for each in utterances:
            models = models or tuple(each.errors)
            if missing := [name for name in models if name not in each.errors]:
                known = ", ".join(each.errors)
                raise ValueError(f"{each.utterance_id}: no model {missing[0]}: there are {known}")
            words = each.errors[models[0]].reference_words
            counts = [words, *(each.errors[name].errors for name in models)]
            before = rows.get(each.speaker_id, [0] * len(counts))
            rows[each.speaker_id] = [a + b for a, b in zip(before, counts, strict=True)]
        if not any(words for words, *_ in rows.values()):
            raise ValueError(f"{len(rows)} speakers without a reference word: need transcripts")
        speakers = tuple(sorted(rows))
        table = np.array([rows[name] for name in speakers], np.int64)
        errors = {name: table[:, column] for column, name in enumerate(models, start=1)}
        return cls(speakers, table[:, 0], errors)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate: a value in percent, and its 95 % interval, infinite where nothing bounds it."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        """Return plain values; a bound that is infinite is None."""
        low, high = (each if np.isfinite(each) else None for each in (self.low, self.high))
        return {"value": self.value, "low": low, "high": high}


@dataclass(frozen=True, slots=True, eq=False)
class Resamples:
    """Resamples holds the totals of all speakers, as element 0, then those of each draw of them."""

    counts: SpeakerCounts
    words: Int64[np.ndarray, " totals"]
    errors: Mapping[str, Int64[np.ndarray, " totals"]]

    def word_error_rate(self, model: str) -> Estimate:
        """Return a model's errors in percent of the reference words."""
        return self._ratio(self.errors[model], self.words)

    def reduction(self, baseline: str, system: str) -> Estimate:
        """Return the WERR of `system`; ValueError if the baseline has no errors to reduce."""
        before = self.errors[baseline]
        if not before[0]:
            raise ValueError(f"{baseline} has 0 errors: need at least 1, as WERR is their share")
        return self._ratio(before - self.errors[system], before)

    def recovery(self, baseline: str, system: str, oracle: str) -> Estimate:
        """Return the share of the oracle's gain that `system` has, in percent.

        The oracle is trained on the transcripts that the system does without. ValueError if it has
        as many errors as the baseline, or more.
        """
        before, best = self.errors[baseline], self.errors[oracle]
        if before[0] <= best[0]:
            raise ValueError(
                f"{oracle} has {best[0]} errors, {baseline} {before[0]}: need fewer, as recovery "
                "is the share of what the oracle gains"
            )
        return self._ratio(before - self.errors[system], before - best)

    def share_without_gain(self, baseline: str, system: str) -> float:
        """Return the share of draws in which `system` has as many errors as the baseline, or more.

        It is the p-value of the paired bootstrap against "the system is no better".
        """
        return float(np.mean(self.errors[system][1:] >= self.errors[baseline][1:]))

    def _ratio(
        self, numerator: Int64[np.ndarray, " totals"], denominator: Int64[np.ndarray, " totals"]
    ) -> Estimate:
        is_defined = denominator > 0
        ratios = 100 * np.divide(
            numerator, denominator, out=np.zeros(len(numerator)), where=is_defined
        )
        if len(self.counts.speakers) < 2:
            return Estimate(float(ratios[0]), -np.inf, np.inf)  # one speaker says nothing of others
        # A draw in which the ratio has no meaning widens the interval on both sides.
        tail = (100 - LEVEL) / 2
        lows, highs = (np.where(is_defined, ratios, end)[1:] for end in (-np.inf, np.inf))
        low = np.percentile(lows, tail, method="lower")
        high = np.percentile(highs, 100 - tail, method="higher")
        return Estimate(float(ratios[0]), float(low), float(high))


def resample(counts: SpeakerCounts, seed: int = SEED) -> Resamples:
    """Draw as many speakers as there are, with replacement, and add up their counts.

    The draws depend on the number of speakers and the seed alone, so all comparisons share them.
    """
    num_speakers = len(counts.speakers)
    table = np.stack([counts.words, *counts.errors.values()], axis=1)
    generator = np.random.default_rng(seed)
    shares = np.full(num_speakers, 1 / num_speakers)
    totals = [table.sum(axis=0, keepdims=True)]
    for start in range(0, NUM_RESAMPLES, step := max(1, _MAX_DRAWN // num_speakers)):
        num_drawn = min(step, NUM_RESAMPLES - start)
        times_drawn = generator.multinomial(num_speakers, shares, size=num_drawn)
        totals.append(times_drawn @ table)
    words, *errors = np.concatenate(totals).T
    return Resamples(counts, words, dict(zip(counts.errors, errors, strict=True)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison: what a system gains on a baseline, and how sure that is.

    `p_value` is of the exact permutation test over speakers, two-sided; `share_without_gain` is of
    the paired bootstrap, one-sided.
    """

    reduction: Estimate
    p_value: float
    share_without_gain: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "reduction": self.reduction.to_json()}


def compare(drawn: Resamples, baseline: str, system: str) -> Comparison:
    """Compare two models on the same speakers; ValueError if the baseline has no errors."""
    errors = drawn.counts.errors
    return Comparison(
        drawn.reduction(baseline, system),
        permutation_p_value(errors[baseline] - errors[system]),
        drawn.share_without_gain(baseline, system),
    )


def permutation_p_value(differences: Int64[np.ndarray, " speakers"]) -> float:
    """Return the two-sided p-value of the sum of the speakers' differences in errors.

    If the models are equally good, each speaker's difference d could as well be -d. The p-value is
    the share of all 2^n choices of signs whose sum is as far from 0 as the observed one, or
    farther. It is exact: no signs are drawn.
    """
    sizes, repeats = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    reach = int(sizes @ repeats)
    # A sum of independent +-d has the characteristic function prod cos(d t). The sum is between
    # -reach and reach, so as many points t invert it exactly.
    num_points = 2 * reach + 1
    angles = 2 * np.pi * np.arange(num_points) / num_points
    characteristic = np.ones(num_points)
    for size, repeat in zip(sizes, repeats, strict=True):
        characteristic *= np.cos(size * angles) ** repeat
    probabilities = np.fft.fft(characteristic).real / num_points
    sums = np.fft.fftfreq(num_points, 1 / num_points)
    # Less half a unit, as sums are integers that a float may miss by its last bits.
    is_as_far = np.abs(sums) > abs(int(differences.sum())) - 0.5
    return float(np.clip(probabilities[is_as_far].sum(), 0, 1))


NUM_WORST = 20
"""So many utterances with the most errors are shown in full."""

_NO_WORD = "\0"


@dataclass(frozen=True, slots=True)
class ModelScores:
    """ModelScores: what one model's hypotheses give besides word errors.

    `frame_accuracy` is the percentage of aligned frames whose best senone is the label's, by
    placement; `worst` are the utterances with the most errors.
    """

    frame_accuracy: Mapping[str, float]
    confidence: Calibration | None
    num_failed: int
    worst: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, utterances: Sequence[DecodedUtterance]) -> "ModelScores":
        """Sum up a model's hypotheses."""
        aligned, correct = Counter[str](), Counter[str]()
        for each in utterances:
            aligned[each.placement] += each.num_aligned
            correct[each.placement] += each.num_correct
        accuracy = {name: 100 * correct[name] / aligned[name] for name in sorted(+aligned)}
        worst = sorted(utterances, key=lambda each: -each.errors.errors)[:NUM_WORST]
        num_failed = sum(each.has_failed for each in utterances)
        return cls(
            accuracy,
            calibration(utterances),
            num_failed,
            tuple(_shown(each) for each in worst if each.errors.errors),
        )


def _shown(utterance: DecodedUtterance) -> dict[str, Any]:
    """Return an utterance's words beside those of its transcript; an empty text stands for none."""
    import kaldialign  # noqa: PLC0415 - reports of stored errors need none

    hypothesis = [word.word for word in utterance.words]
    pairs = kaldialign.align(list(utterance.reference), hypothesis, _NO_WORD)
    return {
        "utterance_id": utterance.utterance_id,
        "speaker_id": utterance.speaker_id,
        "placement": utterance.placement,
        "word_errors": asdict(utterance.errors),
        "words": [[word.replace(_NO_WORD, "") for word in pair] for pair in pairs],
    }


def word_error_scores(utterances: Iterable[UtteranceErrors]) -> dict[str, Any]:
    """Return counts and rates by model and placement, and the student's WERR by placement.

    A run without unlabelled speech has no student. `werr_smbr` compares the two after sequence
    training, as Table II does, where both had it.
    """
    errors: dict[str, dict[str, WordErrors]] = defaultdict(lambda: defaultdict(WordErrors))
    for each in utterances:
        for name, counts in each.errors.items():
            # Errors are summed before dividing, so that long utterances weigh by their words.
            errors[name][each.placement] += counts
    rates = {
        # A placement whose transcripts are all empty has no rate.
        name: {
            placement: counts.word_error_rate
            for placement, counts in sorted(by_placement.items())
            if counts.reference_words
        }
        for name, by_placement in errors.items()
    }
    reduced = reductions(rates[BASELINE], rates[STUDENT]) if STUDENT in rates else {}
    scores = {"wer": rates, "werr": reduced}
    trained_on = [sequence_trained(name) for name in (BASELINE, STUDENT)]
    if errors.keys() >= set(trained_on):
        scores["werr_smbr"] = reductions(*(rates[name] for name in trained_on))
    return {
        **scores,
        "word_errors": {
            name: {placement: asdict(counts) for placement, counts in sorted(by_placement.items())}
            for name, by_placement in errors.items()
        },
    }


def reductions(baseline: Mapping[str, float], student: Mapping[str, float]) -> dict[str, float]:
    """Return the WERR by placement, where the baseline has errors."""
    return {place: werr(rate, student[place]) for place, rate in baseline.items() if rate > 0}


def speaker_scores(utterances: Sequence[UtteranceErrors]) -> dict[str, Any]:
    """Return intervals and significance, by placement and over all, and the counts by speaker."""
    pooled = SpeakerCounts.of(utterances)
    return {
        "statistics": {
            "num_resamples": NUM_RESAMPLES,
            "seed": SEED,
            "level": LEVEL,
            "pooled": _compared(pooled),
            "by_placement": {
                name: _compared(counts) for name, counts in counts_by_placement(utterances).items()
            },
        },
        "speakers": {
            name: {
                "reference_words": int(pooled.words[row]),
                "errors": {model: int(errors[row]) for model, errors in pooled.errors.items()},
            }
            for row, name in enumerate(pooled.speakers)
        },
    }


def counts_by_placement(utterances: Iterable[UtteranceErrors]) -> dict[str, SpeakerCounts]:
    """Add up utterances by speaker, at each placement that has reference words."""
    at: dict[str, list[UtteranceErrors]] = defaultdict(list)
    for each in utterances:
        at[each.placement].append(each)
    return {
        name: SpeakerCounts.of(some)
        for name, some in sorted(at.items())
        if any(counts.reference_words for each in some for counts in each.errors.values())
    }


def _compared(counts: SpeakerCounts) -> dict[str, Any]:
    drawn = resample(counts)
    pairs = [(BASELINE, name) for name in drawn.errors if name != BASELINE]
    after = sequence_trained(BASELINE), sequence_trained(STUDENT)
    if drawn.errors.keys() >= set(after):
        pairs.append(after)
    return {
        "num_speakers": len(counts.speakers),
        "reference_words": int(counts.words.sum()),
        "wer": {name: drawn.word_error_rate(name).to_json() for name in counts.errors},
        "comparisons": [
            {"baseline": baseline, "system": system, **compare(drawn, baseline, system).to_json()}
            for baseline, system in pairs
            if drawn.errors[baseline][0]  # else nothing can be reduced
        ],
    }


def model_scores(models: Mapping[str, ModelScores]) -> dict[str, Any]:
    """Return each model's frame accuracy, confidence and failed searches, and worst utterances.

    Those are of the model to deploy: the student, or, where there is none, the baseline, of the
    same form. A model that decoded no word has no confidence.
    """
    deployed = next(
        name for of in (STUDENT, BASELINE) for name in (sequence_trained(of), of) if name in models
    )
    return {
        "frame_accuracy": {name: dict(each.frame_accuracy) for name, each in models.items()},
        "confidence": {
            name: asdict(each.confidence) for name, each in models.items() if each.confidence
        },
        "failed_searches": {name: each.num_failed for name, each in models.items()},
        "worst": {"model": deployed, "utterances": [dict(u) for u in models[deployed].worst]},
    }
