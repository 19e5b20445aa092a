"""The scores of an evaluation: rates, intervals, significance, speakers, the worst utterances."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.runs.names import BASELINE, STUDENT, sequence_trained
from training.evaluate.decoded import DecodedUtterance
from training.evaluate.significance import (
    LEVEL,
    NUM_RESAMPLES,
    SEED,
    Resamples,
    SpeakerCounts,
    compare,
    resample,
)
from training.evaluate.word_errors import UtteranceErrors, WordErrors, werr

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
            accuracy, num_failed, tuple(_shown(each) for each in worst if each.errors.errors)
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

    `werr_smbr` compares the two after sequence training, as Table II does, where both had it.
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
    scores = {"wer": rates, "werr": reductions(rates[BASELINE], rates[STUDENT])}
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
    return {
        "num_speakers": len(counts.speakers),
        "reference_words": int(counts.words.sum()),
        "wer": {name: drawn.word_error_rate(name).to_json() for name in counts.errors},
        "comparisons": [
            {"baseline": baseline, "system": system, **compare(drawn, baseline, system).to_json()}
            for baseline, system in _pairs(drawn)
        ],
    }


def _pairs(drawn: Resamples) -> list[tuple[str, str]]:
    """Pair each model with the baseline, and the student after sMBR with the baseline after it."""
    pairs = [(BASELINE, name) for name in drawn.errors if name != BASELINE]
    trained_on = sequence_trained(BASELINE), sequence_trained(STUDENT)
    if drawn.errors.keys() >= set(trained_on):
        pairs.append(trained_on)
    # Nothing is reduced where a baseline has no errors.
    return [pair for pair in pairs if drawn.errors[pair[0]][0]]


def model_scores(models: Mapping[str, ModelScores]) -> dict[str, Any]:
    """Return frame accuracy, failed searches, and the worst utterances of the model to deploy."""
    after = sequence_trained(STUDENT)
    deployed = after if after in models else STUDENT
    return {
        "frame_accuracy": {name: dict(each.frame_accuracy) for name, each in models.items()},
        "failed_searches": {name: each.num_failed for name, each in models.items()},
        "worst": {"model": deployed, "utterances": [dict(u) for u in models[deployed].worst]},
    }
