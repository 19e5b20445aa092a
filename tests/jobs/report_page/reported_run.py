"""Write what a report reads of a run, report it as the program does, and read what that wrote."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.settings import plain
from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import (
    EVALUATION_ERRORS,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    GRAPH_STEP,
    MODELS_FOLDER,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    TARGETS_STEP,
    TUNING_STEP,
    folder_of,
    job_record,
)
from pipeline.runs.sealed_json import seal
from tests.job_programs import RunJob, Said
from tests.jobs.job_records import RECORD, REPORTED_STEPS
from tests.whole_path.processes import TINY
from training.evaluate.scores import speaker_scores, word_error_scores
from training.evaluate.tuning import CurvePoint
from training.evaluate.word_errors import (
    DecodedUtterance,
    UtteranceErrors,
    WordErrors,
    reference_trn,
    write_errors,
)
from training.settings.decoding import DecodingSettings
from training.settings.recipe import read_recipe

CURVE = [
    {
        "labelled": True,
        "learning_rate": 0.01,
        "num_ranks": 2,
        "num_frames": 1000,
        "cross_entropy": 3.0,
        "frame_accuracy": 0.25,
    }
]
TRANSCRIPT = "see the wasp that sat on my lamp and would"
TARGETS = {"k": 20, "offsets": "one", "source": "logits", "tail_samples": 0}
TARGETS_STATISTICS = {"mean_retained_mass": 0.95, "num_frames": 400}


def report(run_job: RunJob, run: Path, *options: str) -> Said:
    """Report a run; it must succeed."""
    said = try_to_report(run_job, run, *options)
    assert said.code == 0, said.err
    return said


def try_to_report(run_job: RunJob, run: Path, *options: str) -> Said:
    return run_job("report", "--recipe", str(TINY), "--run", str(run), *options)


def document(run: Path) -> dict[str, Any]:
    """Return report.json."""
    found: dict[str, Any] = json.loads((run / REPORT_DOCUMENT).read_text())
    return found


def text_of_page(run: Path) -> str:
    """Return the page's text with single blanks."""
    return " ".join(re.sub(r"<[^>]*>", " ", (run / REPORT_PAGE).read_text()).split())


def utterances(errors: Mapping[str, Sequence[int]]) -> list[UtteranceErrors]:
    """Return an utterance of ten words of each speaker, with so many substitutions by model."""
    (num_speakers,) = {len(counts) for counts in errors.values()}
    return [
        UtteranceErrors(
            f"{speaker}-1",
            f"speaker-{speaker}",
            "all",
            1000,
            {model: WordErrors(counts[speaker], 0, 0, 10) for model, counts in errors.items()},
        )
        for speaker in range(num_speakers)
    ]


def reference(scored: Sequence[UtteranceErrors], transcript: str) -> bytes:
    """Return the transcripts that the utterances were scored against, all alike."""
    words = tuple(transcript.split())
    return reference_trn(
        DecodedUtterance(
            *(each.utterance_id, each.speaker_id, each.placement, each.duration_ms, words, ()),
            has_failed=False,
            num_aligned=0,
            num_correct=0,
        )
        for each in scored
    )


def write_reported_run(
    run: Path,
    errors: Mapping[str, Sequence[int]],
    *overrides: str,
    transcript: str = TRANSCRIPT,
    arpa: str = "",
    development: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write a run whose models made so many errors, a number by speaker.

    Its graph is of an ARPA of the digest `arpa`, if that is given. `development` are errors
    of each model in 50 words, of each acoustic scale that was tried; the fewest chose the scale.
    """
    store, run_uri = ObjectStore((str(run),)), str(run)
    for step in REPORTED_STEPS:
        write_step(run, step)
    context = step_context(store, run_uri, EVALUATION_STEP, {}, {})
    scored = utterances(errors)
    tally = Tally(len(scored), sum(each.duration_ms for each in scored))
    scores = {**word_error_scores(scored), **speaker_scores(scored)}
    if development:
        scores["decoding"] = write_tuning(run, development)
    data = json.dumps(scores, sort_keys=True).encode()
    outputs = (
        context.put_output(EVALUATION_SCORES, ".json", data, Tally()),
        context.put_output("reference", ".trn", reference(scored, transcript), Tally()),
        context.put_output(EVALUATION_ERRORS, ".jsonl", write_errors(scored), tally),
    )
    inputs = {"arpa": arpa} if arpa else {}
    built = Manifest(GRAPH_STEP, {}, inputs, ())
    store.put(join_uri(run_uri, GRAPH_STEP, "manifest.json"), built.to_bytes())
    evaluated = Manifest(EVALUATION_STEP, {}, {}, outputs, tally_in=tally, tally_out=tally)
    store.put(join_uri(run_uri, EVALUATION_STEP, "manifest.json"), evaluated.to_bytes())
    recipe = plain(read_recipe(str(TINY), overrides))
    record = {**RECORD, "step": "evaluate", "recipe": recipe}
    store.put(join_uri(run_uri, job_record("evaluate")), seal(record))


def write_tuning(run: Path, errors: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Write the step of tuning; return the settings that it chose for each model."""
    context = step_context(ObjectStore((str(run),)), str(run), TUNING_STEP, {}, {})
    start = DecodingSettings(0.0, 3)
    curves = {
        model: [
            CurvePoint(
                "acoustic_scale",
                start.with_value("acoustic_scale", (1 + number) / 10),
                WordErrors(count, 0, 0, 50),
            )
            for number, count in enumerate(counts)
        ]
        for model, counts in errors.items()
    }
    best = {
        model: min(points, key=lambda point: point.errors.errors).to_json()["settings"]
        for model, points in curves.items()
    }
    found = {model: [point.to_json() for point in points] for model, points in curves.items()}
    output = context.put_output("curves", ".json", json.dumps(found).encode(), Tally())
    write_manifest(context, Manifest(TUNING_STEP, {}, {}, (output,), statistics={"settings": best}))
    return best


def write_step(run: Path, step: str, lost: Sequence[Quarantined] = ()) -> None:
    """Write the manifest of a step that has kept nine utterances, an hour each."""
    context = step_context(ObjectStore((str(run),)), str(run), step, {}, {})
    ledger = context.put_ledger("000000", lost)
    kept, quarantined = Tally(9, 9 * 3_600_000), Tally.of(lost)
    statistics: dict[str, Any] = {}
    if folder_of(step) == MODELS_FOLDER:
        statistics = {"curve": CURVE}
    if step == TARGETS_STEP:
        statistics = TARGETS_STATISTICS
    manifest = Manifest(
        step,
        TARGETS if step == TARGETS_STEP else {},
        {},
        (),
        (ledger,) if ledger else (),
        tally_in=kept + quarantined,
        tally_out=kept,
        quarantined=quarantined,
        statistics=statistics,
    )
    write_manifest(context, manifest)
