"""Results of a run make a table."""

import json
from pathlib import Path

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.engine import StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import EVALUATION_STEP
from tests.benchmarks.kept_errors import ResultKey, keep_errors
from tests.benchmarks.rotation.table import Measured
from training.evaluate.word_errors import UtteranceErrors, WordErrors, write_errors


def test_errors_are_kept_by_speaker(tmp_path: Path) -> None:
    """The rotation's table reads them, with the words of each speaker's utterances."""
    run = tmp_path / "ghost-3"
    store = ObjectStore((str(run),))
    counts = {"DP1": (4, 1), "DP2": (6, 2)}
    utterances = [
        UtteranceErrors(
            f"{placement}-{number}",
            "a speaker",
            placement,
            1000,
            {"student": WordErrors(0, 0, errors, words)},
        )
        for placement, (words, errors) in counts.items()
        for number in range(3)
    ]

    def contents(step: StepRun) -> Manifest:
        errors = step.context.put_output("errors", ".jsonl", write_errors(utterances), Tally())
        scores = json.dumps({"files": {"errors.jsonl": errors.key}}).encode()
        kept = step.context.put_output("scores", ".json", scores, Tally())
        return step.lossless(Tally(), (kept, errors))

    run_step(StepSpec(store, str(run), EVALUATION_STEP, {}), contents)
    key = ResultKey("demo", 3, "ghost")
    keep_errors(run, key, ["student.soft_targets=ghost"], tmp_path / "results")
    found = Measured.read(tmp_path / "results" / "ghost-demo-seed3.jsonl")
    assert (found.label, found.key) == ("ghost", ("demo", 0, 3))
    sums = {each.placement: (each.words, each.errors["student"]) for each in found.speakers}
    assert sums == {"DP1": (12, 3), "DP2": (18, 6)}
