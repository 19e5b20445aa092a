"""Utterances that the teacher fails at, even alone: they are counted, and nothing else is lost."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from jobs.run_table import utterance_reads
from pipeline.audit.trace import trace
from pipeline.audit.verify import verify_run
from pipeline.kbest import KBest, TeacherFailure
from pipeline.records import Tally
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.ledger import find_lost_rows, take_back
from pipeline.runs.manifest import read_output
from pipeline.settings import Offsets, RepartitionConfig, TargetsConfig
from pipeline.shards import read_targets
from pipeline.splicing import splice
from pipeline.steps.repartition import repartition
from pipeline.steps.targets import TeacherInput, generate_targets
from tests.faults.bad_input.small_runs import ledger
from tests.four_steps import four_steps, label, put_teacher, rows_of
from tests.small_corpus import local_store, serially, write_corpus
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe


def extracted_run(folder: Path, num_speakers: int, num_each: int) -> tuple[ObjectStore, str, str]:
    """Return store, run and corpus, of which features are extracted."""
    store, run_uri, corpus_uri = local_store(folder)
    write_corpus(store, corpus_uri, "unlabelled", num_speakers, num_each)
    put_teacher(store, run_uri)
    steps = four_steps(store, run_uri, corpus_uri)
    steps["selection"]()
    steps["features"]()
    return store, run_uri, corpus_uri


@pytest.mark.parametrize("offsets", ["one", "all"])
def test_an_utterance_that_the_teacher_fails_at_is_a_ledger_row(
    tmp_path: Path, offsets: Offsets
) -> None:
    """Every other one is labelled and repartitioned, once; the budget bounds how many there are."""
    store, run_uri, corpus_uri = extracted_run(tmp_path, 4, 4)
    rows = rows_of(store, run_uri, "features")
    poison = {rows[0].utterance_id: rows[0], rows[7].utterance_id: rows[7]}
    spoilt = [splice(row.features, offset) for row in poison.values() for offset in range(3)]

    def failing(inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        for each in inputs:
            if any(np.array_equal(each.frames, other) for other in spoilt):
                yield TeacherFailure("ValueError: logits hold NaN")
            else:
                yield label(each.frames)

    config = TargetsConfig(4, 100, 3, offsets)
    place = store, run_uri, config, failing, serially
    with pytest.raises(LossBudgetExceededError, match=r"2 of 16 .*'teacher_failed': [12]"):
        generate_targets(*place, loss_budget=0.1)
    shutil.rmtree(Path(run_uri) / "targets")
    manifest = generate_targets(*place, loss_budget=0.2).manifest
    assert manifest.tally_in == Tally(16, sum(row.duration_ms for row in rows))
    assert manifest.quarantined.utterances == 2
    lost = ledger(store, run_uri, manifest.ledgers)
    assert {each["utterance_id"] for each in lost} == poison.keys()
    assert {each["reason"] for each in lost} == {"teacher_failed"}
    assert {each["detail"] for each in lost} == {"ValueError: logits hold NaN"}
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, 3), serially)
    joined = rows_of(store, run_uri, "partitions")
    kept = {row.utterance_id: row for row in rows if row.utterance_id not in poison}
    assert sorted(row.utterance_id for row in joined) == sorted(kept)
    for row in joined:
        np.testing.assert_array_equal(row.features, kept[row.utterance_id].features)
    reads = utterance_reads(read_recipe(str(TINY)))
    for name in poison:
        steps = trace(store, run_uri, corpus_uri, name, reads).steps
        assert [each.outcome for each in steps[-2:]] == ["written", "quarantined"]
        assert steps[-1].facts["reason"] == "teacher_failed"
    assert verify_run(store, run_uri, corpus_uri, lambda *_: None).findings == ()


def test_a_shard_may_be_empty(tmp_path: Path) -> None:
    """If the teacher fails at all of it and the budget allows that, nothing is written."""
    store, run_uri, _ = extracted_run(tmp_path, 1, 1)

    def fails(inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        return (TeacherFailure("all of them") for _ in inputs)

    config = TargetsConfig(4, 100, 3)
    manifest = generate_targets(store, run_uri, config, fails, serially, loss_budget=1.0).manifest
    assert manifest.tally_out == Tally()
    assert read_targets(read_output(store, run_uri, manifest.outputs[0])) == []


def test_rows_of_the_teacher_are_taken_back(tmp_path: Path) -> None:
    """The tasks that had some are labelled again, and the books balance."""
    store, run_uri, corpus_uri = extracted_run(tmp_path, 4, 4)
    failing = [True]

    def sometimes(inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        for number, each in enumerate(inputs):
            bad = failing[0] and number == 1
            yield TeacherFailure("out of memory") if bad else label(each.frames)

    place = store, run_uri, TargetsConfig(4, 100, 3), sometimes, serially
    first = generate_targets(*place, loss_budget=1.0).manifest
    assert first.quarantined.utterances == len(first.outputs)
    failing[0] = False
    rows = find_lost_rows(store, run_uri, first.step, ["teacher_failed"])
    assert [each.reasons for each in rows] == [{"teacher_failed": 1}] * len(first.outputs)
    take_back(store, run_uri, rows)
    again = generate_targets(*place, loss_budget=0.0).manifest
    assert again.tally_out == again.tally_in == first.tally_in
    assert verify_run(store, run_uri, corpus_uri, lambda *_: None).findings == ()
