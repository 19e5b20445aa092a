"""Verify a run: sizes, digests and counts of all that its manifests name, to the utterance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.conservation import chain_findings
from pipeline.audit.run_listing import list_run
from pipeline.audit.step_records import (
    Finding,
    StepRecords,
    input_findings,
    read_step,
    record_findings,
)
from pipeline.audit.stored_objects import Holding, read_objects

Progress = Callable[[int, int], None]
"""Receives the bytes just read, and the bytes to be read in all."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Verification holds what was read, the findings and the orphans, by keys below the run.

    An orphan was stored by a task that never committed it, or by a writer that was killed.
    """

    steps: tuple[str, ...]
    num_objects: int
    num_bytes: int
    findings: tuple[Finding, ...]
    orphans: tuple[str, ...]
    unfinished: tuple[str, ...]


def verify_run(
    store: ObjectStore, run_uri: str, corpus_uri: str, progress: Progress
) -> Verification:
    """Read all objects that the run's manifests name, and compare them with the manifests.

    Of each utterance and step 8 bytes are kept; shards are read 8 at a time.
    """
    # Listed before commits are read: what a task commits meanwhile is then no orphan.
    folders = list_run(store, run_uri, corpus_uri)
    findings: list[Finding] = []
    steps: dict[str, StepRecords] = {}
    for folder in folders:
        steps[folder.step], unreadable = read_step(store, run_uri, folder)
        findings += unreadable
    finished = {name: records for name, records in steps.items() if records.manifest}
    for records in finished.values():
        findings += [*record_findings(records), *input_findings(records, steps)]
    findings += _contents_findings(store, run_uri, corpus_uri, finished, progress)
    orphans, strays = _unnamed(steps)
    objects = [output for records in finished.values() for output in records.objects]
    return Verification(
        steps=tuple(steps),
        num_objects=len(objects),
        num_bytes=sum(output.num_bytes for output in objects),
        findings=(*findings, *strays),
        orphans=orphans,
        unfinished=tuple(folder.step for folder in folders if not folder.is_finished),
    )


def _contents_findings(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    finished: Mapping[str, StepRecords],
    progress: Progress,
) -> list[Finding]:
    findings: list[Finding] = []
    holdings: dict[str, Holding] = {}
    total = sum(each.num_bytes for records in finished.values() for each in records.objects)
    for name, records in finished.items():
        holding, damaged = read_objects(
            store, run_uri, corpus_uri, records, lambda num_bytes: progress(num_bytes, total)
        )
        findings += damaged
        if holding is not None:
            holdings[name] = holding
    return [*findings, *chain_findings(store, run_uri, finished, holdings)]


def _unnamed(steps: Mapping[str, StepRecords]) -> tuple[tuple[str, ...], list[Finding]]:
    """Orphans, and strays: objects in a step's folder that none of its tasks stored."""
    orphans, strays = [], []
    for records in steps.values():
        named = {output.key for output in (*records.objects, *records.committed)}
        for key in records.folder.unnamed(frozenset(named)):
            if records.folder.is_a_tasks(key):
                orphans.append(key)
            elif records.is_planned:
                remedy = "find its writer, and move it out of the step's folder"
                strays.append(
                    Finding(
                        key, "only objects of the step", "an object that no task stored", remedy
                    )
                )
    return tuple(orphans), strays


def sweep(store: ObjectStore, run_uri: str, verification: Verification) -> None:
    """Delete the orphans; a ValueError, and nothing deleted, while a step might still need one.

    A step at work stores objects before it names them, and a damaged record may name some.
    """
    if verification.unfinished:
        raise ValueError(
            f"nothing swept: {', '.join(verification.unfinished)} unfinished, and what its tasks "
            "store looks like orphans until they commit: finish the step, or remove its folder"
        )
    if verification.findings:
        raise ValueError(
            f"nothing swept: {len(verification.findings)} findings; fix them first, as a damaged "
            "record may name what looks like an orphan"
        )
    for key in verification.orphans:
        store.delete(join_uri(run_uri, key))
