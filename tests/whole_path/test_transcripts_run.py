"""A whole run whose targets are of damaged transcripts: JSON lines in, word error rates out.

The jobs run in this process, and their Spark tasks in a plain loop; the teacher's server is real.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.records import Hypothesis
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.shards import read_features
from tests.job_programs import RunJob
from tests.small_corpus import plain_loop
from tests.whole_path.processes import TINY
from tests.whole_path.test_own_teacher_run import write_kaldi_dir

pytestmark = pytest.mark.chaos

OPTIONS = (
    *("--set", "student.trainer={name = 'synchronous'}"),
    *("--set", "teacher.trainer={name = 'synchronous'}"),
    *("--set", "alignment.rounds=1"),
    *("--set", "targets.source='transcripts'"),
    *("--set", "targets.transcripts.max_garbage=0.9"),
)


@pytest.fixture
def jobs_of(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Return a function that runs one job of the run, and returns what it says."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)

    def run(name: str, *more: str) -> dict[str, Any]:
        options = ("--recipe", str(TINY), "--run", str(tmp_path / "run"), *OPTIONS)
        said = run_job(name, *options, "--json", *more)
        assert said.code == 0, f"{name}: {said.err}"
        return dict(json.loads(said.out))

    return run


def write_transcripts(kaldi_dir: Path) -> dict[str, str]:
    """One of eight is not heard, one is noise, one is another language, five have a wrong word."""
    lines = (kaldi_dir / "text").read_text().splitlines()
    spoken = dict(line.split(" ", 1) for line in lines if line.startswith("unlabelled"))
    heard = {
        name: " ".join([*text.split()[:-1], "sake"]).capitalize() + "."
        for name, text in spoken.items()
    }
    names = sorted(heard)
    del heard[names[0]]
    heard[names[1]] = "[Music]"
    heard[names[2]] = "Een twee drie"
    rows = ({"utterance_id": n, "pred_text": t, "score": -0.1} for n, t in heard.items())
    (kaldi_dir / "whisper.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return heard


def test_a_run_learns_from_damaged_transcripts(
    tmp_path: Path, jobs_of: Callable[..., dict[str, Any]]
) -> None:
    """What was heard reaches the features as it came; what cannot be aligned is counted."""
    run_uri, kaldi_dir = str(tmp_path / "run"), write_kaldi_dir(tmp_path / "kaldi")
    heard = write_transcripts(kaldi_dir)
    given = ("--kaldi-dir", str(kaldi_dir), "--transcripts", f"whisper={kaldi_dir}/whisper.jsonl")
    jobs_of("check", *given, "--supervised-ranks=1", "--student-ranks=1")
    jobs_of("ingest", *given)
    for name in ("select_utterances", "extract_features", "bootstrap", "train_aligner", "realign"):
        jobs_of(name)
    store = ObjectStore((run_uri,))
    features = read_manifest(store, run_uri, "features/unlabelled").outputs
    rows = [row for each in features for row in read_features(read_output(store, run_uri, each))]
    expected = {name: (Hypothesis("whisper", text, -0.1),) for name, text in heard.items()}
    assert {row.utterance_id: row.hypotheses for row in rows if row.hypotheses} == expected
    assert {row.text for row in rows} == {None}
    for name in ("train_baseline", "train_teacher", "generate_targets", "repartition"):
        jobs_of(name)
    made = read_manifest(store, run_uri, "targets/unlabelled")
    assert made.tally_in == made.tally_out
    counts = made.statistics["without_transcript"]
    assert counts["no_transcript"] == counts["empty_transcript"] == counts["unknown_words"] == 1
    assert 0 < made.statistics["mean_transcript_share"] < 1
    assert "lexicon.txt" in made.inputs
    for name in ("train_student", "evaluate", "report"):
        jobs_of(name)
    page = " ".join((tmp_path / "run" / "report" / "report.html").read_text().split())
    assert "of recognizers' transcripts" in page
    verified = jobs_of("verify")
    assert (verified["findings"], verified["unfinished"]) == ([], [])
