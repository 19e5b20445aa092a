"""Keep a run's word errors by speaker and utterance, as the rotation does, for its table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.report_page.collect import output_of
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import EVALUATION_SCORES, EVALUATION_STEP
from training.evaluate.word_errors import UtteranceErrors, read_errors


@dataclass(frozen=True, slots=True)
class ResultKey:
    """ResultKey names a result: its recipe, its models' seed, and what it differs in."""

    recipe: str
    seed: int
    label: str


def keep_errors(run_folder: Path, key: ResultKey, settings: Sequence[str], folder: Path) -> None:
    """Write the errors of an evaluated run to a file in the folder, one line a speaker and column.

    `settings` are the values that differ from the recipe's.
    """
    run = str(run_folder)
    store = ObjectStore((run,))
    manifest = read_manifest(store, run, EVALUATION_STEP)
    scores = json.loads(read_output(store, run, output_of(manifest, EVALUATION_SCORES)))
    (errors,) = (each for each in manifest.outputs if each.key == scores["files"]["errors.jsonl"])
    about = {
        "condition": key.recipe,
        "fold": 0,
        "seed": key.seed,
        "label": key.label,
        "settings": settings,
        "hours": {},
        "models": {},
    }
    lines = [json.dumps(about), *_lines(read_errors(read_output(store, run, errors)))]
    folder.mkdir(exist_ok=True)
    target = folder / f"{key.label}-{key.recipe}-seed{key.seed}.jsonl"
    target.write_text("".join(f"{line}\n" for line in lines))


def _lines(utterances: Sequence[UtteranceErrors]) -> list[str]:
    lines = []
    for (placement, speaker), same in groupby(sorted(utterances, key=_place), key=_place):
        of_speaker = list(same)
        errors = {
            model: [each.errors[model].errors for each in of_speaker]
            for model in of_speaker[0].errors
        }
        words = [next(iter(each.errors.values())).reference_words for each in of_speaker]
        line = {"placement": placement, "speaker": speaker, "words": words, "errors": errors}
        lines.append(json.dumps(line))
    return lines


def _place(utterance: UtteranceErrors) -> tuple[str, str]:
    return utterance.placement, utterance.speaker_id
