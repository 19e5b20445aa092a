"""The quarantine ledger, and the end of a step once its losses exceed its loss budget."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.records import Quarantined, Tally
from pipeline.runs.commit import Commit, StepContext, once, read_commits
from pipeline.runs.engine import Loss, LossBudgetExceededError, LossWatch, TaskPlan
from pipeline.runs.manifest import manifest_uri, read_manifest
from pipeline.settings import ExtractionConfig, SelectionConfig
from pipeline.steps import features
from pipeline.steps.features import extract_features
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.faults.bad_input.small_runs import ledger, lines_of
from tests.four_steps import selected_corpus
from tests.pipeline.runs.small_commits import run_plan
from tests.small_corpus import local_store, serially, write_corpus


@dataclass(frozen=True)
class LossyTask:
    """A task of 25 utterances that loses some, or ends early."""

    context: StepContext
    name: str
    num_lost: int
    is_over_budget: bool = False


@once
def lose(task: LossyTask) -> Commit | Loss:
    rows = [Quarantined(f"u{each}", "", "truncated", "", 9, 7) for each in range(task.num_lost)]
    if task.is_over_budget:
        return Loss.over_budget(task.name, rows)
    tally = Tally(25 - task.num_lost, 30)
    output = task.context.put_output(task.name, ".parquet", task.name.encode(), tally)
    ledger, lost = task.context.put_ledger(task.name, rows), Tally.of(rows)
    fingerprint = task.context.fingerprint
    return task.context.commit(
        Commit(task.name, fingerprint, (output,), ledger, tally + lost, quarantined=lost)
    )


def run(
    context: StepContext, losses: Sequence[int], budget: float, **over_budget: bool
) -> list[str]:
    """Run four tasks of 25 utterances; return those that ran."""
    ran: list[str] = []

    def counting(task: LossyTask) -> Commit | Loss:
        ran.append(task.name)
        return lose(task)

    def plan_of(own: StepContext) -> TaskPlan:
        tasks = {
            str(number): LossyTask(own, str(number), lost, over_budget.get(f"task_{number}", False))
            for number, lost in enumerate(losses)
        }
        return TaskPlan(tasks, counting, serially, budget, num_utterances=100)

    try:
        run_plan(context, plan_of)
    except LossBudgetExceededError as error:
        return [*ran, str(error)]
    return ran


def test_a_step_ends_at_the_task_that_exceeds_its_budget(context: StepContext) -> None:
    """Five of 100 may be lost: the sixth, in the second of four tasks, ends the step."""
    assert run(replace(context, step="features/y"), [3, 2, 0, 0], 0.05) == ["0", "1", "2", "3"]
    *ran, message = run(context, [3, 3, 0, 0], 0.05)
    assert ran == ["0", "1"]
    assert message.startswith(
        "6 of 100 utterances quarantined, the loss budget is 5.00%; reasons: {'truncated': 6}. "
        "See the ledgers, such as features/x/"
    )
    assert message.endswith("or raise loss_budget")
    assert not context.store.exists(manifest_uri(context.run_uri, "features/x"))
    commits = read_commits(context.store, context.run_uri, "features/x")
    assert [commit.task for commit in commits] == ["0", "1"]
    assert run(context, [3, 3, 0, 0], 0.06) == ["2", "3"]


def test_a_task_over_budget_is_not_committed(context: StepContext) -> None:
    """The rows of a task that ended early count with the ledgers of the others."""
    *ran, message = run(context, [1, 6, 0, 0], 0.05, task_1=True)
    assert ran == ["0", "1"]
    assert message.startswith("7 of 100 utterances quarantined, the loss budget is 5.00%")
    commits = read_commits(context.store, context.run_uri, "features/x")
    assert [commit.task for commit in commits] == ["0"]
    (alone,) = run(replace(context, step="features/y"), [6, 0, 0, 0], 0.05, task_0=True)[1:]
    assert "See the ledgers, such as u5 ()" in alone


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """Select forty utterances into one file."""
    return selected_corpus(tmp_path, 4, 10)


def extract(corpus: tuple[ObjectStore, str, str], remedy: str, num_lost: int = 5) -> int:
    """Extract the file until too many are lost, where 4 may be; return the GETs that this took."""
    store, run_uri, corpus_uri = corpus
    before, config = REQUESTS.total(), ExtractionConfig(gets_in_flight=2, seed=3)
    arguments = (store, run_uri, "unlabelled", corpus_uri, config, 0.1, serially)
    with pytest.raises(LossBudgetExceededError, match=rf"{num_lost} of 40 .*10\.00%.*; {remedy}"):
        extract_features(*arguments)
    return (REQUESTS.total() - before).get


def test_a_long_task_ends_at_its_fifth_bad_file(
    corpus: tuple[ObjectStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty files that are no audio, four may be lost; few more than five are read."""
    monkeypatch.setattr(features, "LOSS_INTERVAL", 1)
    store, run_uri, corpus_uri = corpus
    for found in store.list(join_uri(corpus_uri, "audio")):
        store.put(found.uri, b"no audio")
    assert extract(corpus, "fix the data, or raise") < 15
    assert read_commits(store, run_uri, "features/unlabelled") == []
    assert [each.uri for each in store.list(join_uri(run_uri, "features"))] == []


def test_a_short_task_has_a_whole_ledger(corpus: tuple[ObjectStore, str, str]) -> None:
    """Of fewer than a hundred utterances all are read, so that the ledger names every loss."""
    store, run_uri, corpus_uri = corpus
    for found in store.list(join_uri(corpus_uri, "audio"))[:7]:
        store.put(found.uri, b"no audio")
    assert extract(corpus, "fix the data, or raise", 7) > 40
    (commit,) = read_commits(store, run_uri, "features/unlabelled")
    assert commit.quarantined.utterances == 7


@pytest.mark.usefixtures("quick_decisions")
def test_a_long_task_ends_at_its_fifth_missing_file(
    corpus: tuple[ObjectStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first are missing: five are asked for again, and the other 34 never are."""
    monkeypatch.setattr(features, "LOSS_INTERVAL", 1)
    store, run_uri, corpus_uri = corpus
    (selected,) = read_manifest(store, run_uri, "selection/unlabelled").outputs
    for record in ledger(store, run_uri, [selected])[1:]:
        store.delete(join_uri(corpus_uri, record["audio_uri"]))
    assert extract(corpus, "once audio is back, megahour retry") < 45


def test_bad_metadata_ends_a_selection_at_its_worst_bucket(tmp_path: Path) -> None:
    """The last of four buckets is read first, as its records are bad; the others are not."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    source = metadata_uri(corpus_uri, "unlabelled")
    good = write_corpus(store, corpus_uri, "unlabelled", 4, 2)
    store.delete(store.list(source)[0].uri)
    for number in range(4):
        lines = [
            {**each, "duration_s": 0 if number == 3 else 1.0} for each in good[2 * number :][:2]
        ]
        store.put(join_uri(source, f"speaker_bucket={number}/part.jsonl"), lines_of(lines))
    with pytest.raises(LossBudgetExceededError, match=r"2 of 8 .*bad_duration.*fix the data, or r"):
        select_utterances(
            store, run_uri, "unlabelled", source, SelectionConfig(0.0, 1.0, 3), 0.2, serially
        )
    commits = read_commits(store, run_uri, "selection/unlabelled/scratch")
    tasks = [commit.task for commit in commits if commit.task.startswith("selected-")]
    assert tasks == ["selected-bucket-3"]


@given(st.integers(0, 1000), st.integers(0, 10**6))
def test_a_budget_is_the_number_that_is_written(thousandths: int, num_utterances: int) -> None:
    """0.29 of 100 are 29, although as floats they are a little less."""
    watch = LossWatch(thousandths / 1000, num_utterances)
    assert watch.max_lost == thousandths * num_utterances // 1000


def test_both_kinds_of_loss_are_named() -> None:
    """Of utterances without lattice and of ledger rows, each has its count, place and remedy."""
    both = Loss("0", Counter(teacher_failed=3), "a ledger", Counter(no_path=2), "u1")
    with pytest.raises(LossBudgetExceededError) as caught:
        LossWatch(0.01, 100).check(both)
    assert str(caught.value) == (
        "5 of 100 utterances quarantined or without a lattice, the loss budget is 1.00%; reasons: "
        "{'teacher_failed': 3, 'no_path': 2}, such as u1: see the ledgers, such as a ledger; raise "
        "loss_budget, or begin a fresh --run with other beams or search_seconds in targets.lattices"
    )


def test_audio_outside_the_prefixes_has_its_remedy() -> None:
    """The message names the key that allows its folder; of other reasons it does not."""
    for reason, is_named in (("outside_prefixes", True), ("truncated", False)):
        with pytest.raises(LossBudgetExceededError) as caught:
            LossWatch(0.0, 1).check(Loss("0", Counter({reason: 1}), "x"))
        said = str(caught.value)
        assert ("in corpus.audio_prefixes and use another --run; " in said) == is_named
