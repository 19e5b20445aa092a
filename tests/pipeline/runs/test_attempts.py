"""Attempts at one task: a later one returns the commit, and versions are those of the first."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.cluster import load_cluster
from infra.spark.packaging import closure
from pipeline.kbest import KBest
from pipeline.records import Tally
from pipeline.runs import manifest
from pipeline.runs.commit import Commit, Repetition, StepContext, once, step_context
from pipeline.runs.engine import StepResult, TaskPlan
from pipeline.runs.manifest import ENGINES, MEGAHOUR, manifest_uri, read_manifest, step_versions
from pipeline.runs.names import TARGETS_STEP
from pipeline.steps.features import extract_file
from pipeline.steps.repartition import write_group
from pipeline.steps.selection.deduplicate import index_bucket
from pipeline.steps.selection.select import pack_files, select_bucket
from pipeline.steps.targets import TeacherInput, label_shard
from tests.four_steps import four_steps, label, put_teacher
from tests.pipeline.runs.small_commits import CONFIG, INPUTS, record, run_plan
from tests.small_corpus import local_store, serially, write_corpus


@dataclass(frozen=True)
class NamedTask:
    """A task that commits four utterances, and counts how often it worked."""

    context: StepContext
    name: str
    worked: list[str]


@once
def work(task: NamedTask) -> Commit:
    task.worked.append(task.name)
    return task.context.commit(record(task.context, task.name))


def test_a_task_looks_for_its_commit_before_it_works(context: StepContext) -> None:
    """A second attempt returns the first one's record, and works at nothing."""
    task = NamedTask(context, "0", [])
    assert work(task) == work(task) == context.committed("0")
    assert task.worked == ["0"]
    assert context.committed("1") is None


@pytest.mark.parametrize(
    "run_task", [extract_file, label_shard, write_group, index_bucket, select_bucket, pack_files]
)
def test_every_task_of_a_step_looks_first(context: StepContext, run_task: Any) -> None:
    """Nothing of a task but its name is looked at when its commit is there."""
    earlier = context.commit(record(context, "0"))
    assert run_task(NamedTask(context, "0", [])) == earlier


def test_the_first_commit_is_taken_where_last_bits_differ(context: StepContext) -> None:
    """Of two attempts with other digests the first one counts; another tally is still a fault."""
    free = replace(context, repetition=Repetition.OTHER_LAST_BITS)
    first = free.commit(record(free))
    other = free.put_output("0", ".parquet", b"other last bits", Tally(2, 30))
    second = replace(first, outputs=(other,), statistics={"sum": 0.5000001})
    assert free.commit(second) == first
    with pytest.raises(ValueError, match="holds other digests than this attempt made"):
        context.commit(second)
    with pytest.raises(ValueError, match="holds other digests than this attempt made"):
        free.commit(replace(second, tally_in=Tally(5, 42)))


class DriftingTeacher:
    """DriftingTeacher returns other last bits at every call, as another GPU would."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[KBest]:
        self.calls += 1
        drift = np.float16(self.calls)
        for each in inputs:
            found = label(each.frames)
            yield replace(found, log_z=found.log_z + drift)


def test_two_gpus_make_one_step_of_targets(tmp_path: Path) -> None:
    """Each task runs twice at the same time, with other bits; the first of each is the step's."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_corpus(store, corpus_uri, "unlabelled", 4, 4)
    put_teacher(store, run_uri)
    firsts: list[Commit] = []

    def twice(tasks: Sequence[Any], function: Any, description: str) -> list[Any]:
        if "targets" not in description:
            return serially(tasks, function, description)
        drifting = [replace(task, teacher=DriftingTeacher()) for task in tasks]
        # Beneath `once`: both looked for a commit before either made one.
        firsts.extend(label_shard.__wrapped__(task) for task in drifting)  # type: ignore[attr-defined]
        return [label_shard.__wrapped__(task) for task in drifting]  # type: ignore[attr-defined]

    for step in four_steps(store, run_uri, corpus_uri, twice).values():
        step()
    outputs = read_manifest(store, run_uri, TARGETS_STEP).outputs
    assert outputs == tuple(output for first in firsts for output in first.outputs)


def run(context: StepContext, names: str, ran: list[str]) -> StepResult:
    def plan_of(own: StepContext) -> TaskPlan:
        return TaskPlan({name: NamedTask(own, name, ran) for name in names}, work, serially, 1.0)

    return run_plan(context, plan_of)


def install_other_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install another NumPy, to the eyes of a process that begins."""
    installed = metadata.version
    monkeypatch.setattr(
        manifest, "installed_version", lambda name: "99.1" if name == "numpy" else installed(name)
    )


def test_half_a_step_of_other_versions_is_refused(
    context: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has both versions and the remedies; nothing is written; the former resume."""
    context.commit(record(context, "1"))
    was, ran = metadata.version("numpy"), list[str]()
    install_other_numpy(monkeypatch)
    now = step_context(context.store, context.run_uri, context.step, CONFIG, INPUTS)
    assert now.fingerprint != context.fingerprint
    message = (
        rf"features/x: task 1 was committed by other versions \(.*numpy {was}, now 99\.1.*\): "
        "finish the step with the former, or remove features/x"
    )
    with pytest.raises(ValueError, match=message):
        run(context, "012", ran)
    assert ran == []
    assert not context.store.exists(manifest_uri(context.run_uri, "features/x"))
    monkeypatch.undo()
    assert run(context, "012", ran).manifest.versions == context.versions
    assert ran == ["0", "2"]


def test_a_finished_step_stays_finished_under_other_versions(
    context: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its bytes are of one version, which its manifest names."""
    first = run(context, "01", [])
    monkeypatch.setattr(manifest, "installed_version", lambda _: "99.1")
    ran: list[str] = []
    again = run(context, "01", ran)
    assert (again.was_finished, again.manifest, ran) == (True, first.manifest, [])


def test_a_worker_has_the_drivers_versions(
    context: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster with another NumPy would make other bytes: refused, with both versions.

    So is one with another version of what the step names besides the engines of its kind.
    """
    install_other_numpy(monkeypatch)
    task = NamedTask(context, "0", [])
    with pytest.raises(ValueError, match=r"driver and this worker differ.*numpy .*, now 99\.1"):
        work(task)
    monkeypatch.undo()
    own = replace(context, versions={**context.versions, "kaldifst": "0.0"})
    with pytest.raises(ValueError, match=r"driver and this worker differ.*kaldifst 0\.0, now"):
        work(NamedTask(own, "0", []))
    assert work(task).task == "0"


def test_a_worker_may_lack_an_engine(context: StepContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that chooses the other filter bank needs no kaldi-native-fbank on its cluster."""
    installed = metadata.version

    def without_kaldi(name: str) -> str:
        if name == "kaldi-native-fbank":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(manifest, "installed_version", without_kaldi)
    assert work(NamedTask(context, "0", [])).task == "0"


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        ("select_utterances", "selection"),
        ("extract_features", "features"),
        ("generate_targets", "targets"),
        ("repartition", "partitions"),
    ],
)
def test_our_clusters_have_the_engines_of_their_step(cluster: str, kind: str) -> None:
    """So a packaged executor can compare all of them with the driver's."""
    assert {*ENGINES[kind]} <= closure(load_cluster(cluster).python_dependencies).keys()


def test_manifest_and_commit_name_the_versions(context: StepContext) -> None:
    """Those of megahour and of the engines of such a step, which are all installed."""
    run(context, "0", [])
    for name in ("manifest.json", "commits/0.json"):
        document = json.loads(context.store.get(f"{context.run_uri}/features/x/{name}"))
        assert document["versions"] == {
            name: metadata.version(name) for name in (MEGAHOUR, *ENGINES["features"])
        }
    for step in ENGINES:
        assert step_versions(step)[MEGAHOUR] == metadata.version(MEGAHOUR)
