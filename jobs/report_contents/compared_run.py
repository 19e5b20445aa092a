"""Compare a run with another one: their scores, and the errors in the utterances of both."""

from collections.abc import Callable, Mapping
from typing import Any

from training.evaluate.significance import SpeakerCounts, compare, resample
from training.evaluate.word_errors import UtteranceErrors, joined, of_models

KEPT = ("run", "wer", "werr", "development", "hours", "steps", "recipe")
"""The parts of the other run's report that the comparison keeps."""

OTHER, THIS = "other", "this"
Errors = Callable[[], list[UtteranceErrors]]


def compared(other: Mapping[str, Any], here: Errors, there: Errors) -> dict[str, Any]:
    """Return the other run's scores beside the tests of each model that both runs have.

    `here` and `there` read the word errors by utterance. Runs of other utterances, and reports
    without them, are not paired: the comparison says why.
    """
    kept = {name: other[name] for name in KEPT if name in other}
    try:
        return kept | {"pairs": paired(here(), there())}
    except ValueError as error:
        return kept | {"pairs": [], "not_paired": str(error)}


def paired(here: list[UtteranceErrors], there: list[UtteranceErrors]) -> list[dict[str, Any]]:
    """Test each model that both evaluations scored, over all words of the same speakers."""
    if not here or not there:
        raise ValueError("one of the evaluations has no utterance")
    models = [model for model in here[0].errors if model in there[0].errors]
    found = []
    for model in models:
        both = joined(of_models(there, {model: OTHER}), of_models(here, {model: THIS}))
        counts = SpeakerCounts.of(both)
        if counts.errors[OTHER].sum():  # nothing is reduced where the other has no errors
            test = compare(resample(counts), OTHER, THIS)
            found.append({"model": model, **test.to_json()})
    return found
