"""A corpus of one subset alone is selected, extracted and verified by the jobs."""

import json
import shutil
from pathlib import Path

import pytest

from infra.cluster import Cluster
from pipeline.runs.manifest import OutputsInParts, read_manifest
from pipeline.runs.names import ALL_SUBSETS, features_step, selection_step
from tests.job_programs import RunJob
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.small_corpus import local_store, write_corpus
from tests.whole_path.processes import TINY

pytestmark = pytest.mark.chaos

NUM_UTTERANCES = 6


def arguments_of(run_uri: str, corpus_uri: str, file_hours: float) -> list[str]:
    """Return the jobs' arguments."""
    settings = ("selection.hours=0", f"selection.file_hours={file_hours}")
    sets = [part for each in (*settings, f'corpus.uri="{corpus_uri}"') for part in ("--set", each)]
    return ["--recipe", str(TINY), "--run", run_uri, *sets]


@pytest.mark.parametrize("subset", ["unlabelled", "heldout"])
def test_one_subset_is_enough_for_features(tmp_path: Path, run_job: RunJob, subset: str) -> None:
    """The jobs end well, write that subset alone, and `verify` finds no fault."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_corpus(store, corpus_uri, subset, 2, NUM_UTTERANCES // 2)
    arguments = arguments_of(run_uri, corpus_uri, 0.001)
    for job in ("select_utterances", "extract_features"):
        said = run_job(job, *arguments)
        assert said.code == 0, said.err
    assert read_manifest(store, run_uri, features_step(subset)).tally_out.utterances == 6
    for other in set(ALL_SUBSETS) - {subset}:
        for step in (selection_step(other), features_step(other)):
            assert not store.list(f"{run_uri}/{step}")
    found = run_job("verify", *arguments, "--json")
    assert (found.code, json.loads(found.out)["findings"]) == (0, [])
    said = run_job("bootstrap", *arguments)
    assert said.code == 1
    assert "metadata/labelled has no metadata: need transcribed speech to align" in said.err


def test_what_was_selected_is_extracted_without_its_metadata(
    tmp_path: Path, run_job: RunJob
) -> None:
    """Metadata of one of two subsets is removed between the steps; neither is left out."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    for subset in ("unlabelled", "heldout"):
        write_corpus(store, corpus_uri, subset, 2, NUM_UTTERANCES // 2)
    arguments = arguments_of(run_uri, corpus_uri, 0.001)
    assert run_job("select_utterances", *arguments).code == 0
    shutil.rmtree(Path(corpus_uri) / "metadata" / "heldout")
    assert run_job("extract_features", *arguments).code == 0
    for subset in ("unlabelled", "heldout"):
        assert read_manifest(store, run_uri, features_step(subset)).tally_out.utterances == 6


def test_spark_folds_commits_and_reads_for_verify(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks count as many, and the cluster as one of several hosts: real Spark runs them."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_corpus(store, corpus_uri, "unlabelled", 2, NUM_UTTERANCES // 2)
    arguments = arguments_of(run_uri, corpus_uri, 0.0005)
    assert run_job("select_utterances", *arguments).code == 0
    set_small_bounds(monkeypatch, max_listed=1)
    said = run_job("extract_features", *arguments)
    assert said.code == 0, said.err
    features = read_manifest(store, run_uri, features_step("unlabelled"))
    assert isinstance(features.outputs, OutputsInParts)
    assert features.tally_out.utterances == NUM_UTTERANCES
    monkeypatch.setattr(Cluster, "is_local", property(lambda _: False))
    found = run_job("verify", *arguments, "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["num_objects"] > len(features.outputs) == 2
