"""Hold a run against an oracle: another run's baseline, of the same held-out utterances."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.store.object_store import ObjectStore, join_uri
from jobs.cli.job import Job
from jobs.report_contents.other_report import OtherReport, output_of, utterance_errors
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    BASELINE,
    EVALUATION_STEP,
    LABELLED,
    ORACLE,
    SCRATCH_FOLDER,
    sequence_trained,
)
from training.evaluate.scores import counts_by_placement
from training.evaluate.significance import (
    LEVEL,
    NUM_RESAMPLES,
    SEED,
    Resamples,
    SpeakerCounts,
    resample,
)
from training.evaluate.word_errors import joined, of_models

ORACLES = {BASELINE: ORACLE, sequence_trained(BASELINE): sequence_trained(ORACLE)}
"""The oracle's baseline, with and without sMBR, by the name that this run's report gives it."""


def recovered(job: Job, oracle: OtherReport, hours: Mapping[str, float]) -> dict[str, Any]:
    """Return the oracle's rates and what each model of this run recovers, by placement.

    `hours` are this run's by subset. ValueError for an oracle that was evaluated on other
    utterances or words.
    """
    places = (job.store, job.run_uri), (oracle.store, oracle.run_uri)
    here, there = (utterance_errors(*place) for place in places)
    names = {old: new for old, new in ORACLES.items() if there and old in there[0].errors}
    try:
        both = joined(here, of_models(there, names))
        _check_transcripts(*(_transcripts(*place) for place in places))
    except ValueError as error:
        raise ValueError(
            f"--oracle {oracle.run_uri}: {error}; give the oracle's run the held-out list of this "
            "run, and report it again"
        ) from error
    after = sequence_trained(BASELINE)
    return {
        "run": oracle.run_uri,
        "labelled_hours": {
            "this": hours.get(LABELLED),
            "oracle": (oracle.document.get("hours") or {}).get(LABELLED),
        },
        "has_same_language_model": _has_same_language_model(job, oracle),
        "lacks": after if after in here[0].errors and after not in names else "",
        "num_resamples": NUM_RESAMPLES,
        "seed": SEED,
        "level": LEVEL,
        "pooled": _scores(SpeakerCounts.of(both)),
        "by_placement": {
            name: _scores(counts) for name, counts in counts_by_placement(both).items()
        },
    }


def _transcripts(store: ObjectStore, run_uri: str) -> dict[str, str]:
    """Read the held-out transcripts that a run was scored against, by speaker and utterance."""
    evaluation = read_manifest(store, run_uri, EVALUATION_STEP)
    data = read_output(store, run_uri, output_of(evaluation, "reference", ".trn"))
    found = (line.rpartition("(") for line in data.decode().splitlines())
    return {name.removesuffix(")"): words.rstrip() for words, _, name in found}


def _check_transcripts(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise ValueError with the first transcript that the other run has otherwise."""
    for name, words in here.items():
        if there.get(name) != words:
            other = there.get(name)
            raise ValueError(f"{name} is {words!r} here and {other!r} there: need the same words")


def _has_same_language_model(job: Job, oracle: OtherReport) -> bool:
    """Return whether it is known: both name one ARPA, or the oracle's is one that this run made."""
    here, there = (
        read_manifest(store, run_uri, EVALUATION_STEP).inputs.get("arpa")
        for store, run_uri in ((job.store, job.run_uri), (oracle.store, oracle.run_uri))
    )
    if there is None or here is not None:
        return here is not None and here == there
    made = job.store.list(join_uri(job.run_uri, EVALUATION_STEP, SCRATCH_FOLDER))
    return any(each.uri.endswith(f"-{there[:16]}.arpa") for each in made)


def _scores(counts: SpeakerCounts) -> dict[str, Any]:
    drawn = resample(counts)
    return {
        "num_speakers": len(counts.speakers),
        "reference_words": int(counts.words.sum()),
        "wer": {name: drawn.word_error_rate(name).to_json() for name in counts.errors},
        "recovery": {
            name: _recovery(drawn, name, *stage) for name, stage in _stages(list(counts.errors))
        },
    }


def _stages(models: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each model with the baseline and the oracle of its stages, where both are there."""
    after = set(map(sequence_trained, models))
    for name in models:
        change = sequence_trained if name in after else str
        stage = change(BASELINE), change(ORACLE)
        if name not in stage and set(stage) <= set(models):
            yield name, stage


def _recovery(
    drawn: Resamples, model: str, baseline: str, oracle: str
) -> dict[str, float | None] | None:
    """Return what a model recovers; None where the oracle gains nothing."""
    if drawn.errors[baseline][0] <= drawn.errors[oracle][0]:
        return None
    return drawn.recovery(baseline, model, oracle).to_json()
