"""The build_graph job: a graph and the grammars of all orders, once."""

import json
from pathlib import Path

from pipeline.runs.names import GRAPH_STEP
from tests.job_programs import RunJob
from tests.training.targets.unlabelled_toy_run import write_unlabelled_toy_run
from tests.whole_path.processes import TINY
from training.evaluate.stored_graphs import BuiltGraphs


def test_the_job_builds_what_evaluation_and_tuning_may_ask_for(
    run_job: RunJob, tmp_path: Path
) -> None:
    """The grammars are of the evaluation's order, tuning's, and the lattice targets'."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    settings = (
        f'corpus.uri="{corpus_uri}"',
        "evaluation.ngram_order=2",
        "tuning.ngram_orders=[1]",
        "targets.lattices.ngram_order=3",
    )
    arguments = ["--recipe", str(TINY), "--run", run_uri, "--json"]
    for setting in settings:
        arguments += ["--set", setting]
    first, second = (run_job("build_graph", *arguments) for _ in range(2))
    assert first.code == 0, first.err
    said = json.loads(first.out)
    assert (said["status"], list(said["manifests"])) == ("done", [GRAPH_STEP])
    assert json.loads(second.out)["status"] == "nothing to do"
    assert list(BuiltGraphs.of(store, run_uri).rescoring) == [1, 2, 3]
