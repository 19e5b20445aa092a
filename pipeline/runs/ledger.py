"""The quarantine ledger: its lines and reasons, and how rows are taken back.

`take_back` removes the commits of the rows' tasks, and what was made from them. It deletes later
steps before earlier ones, and a manifest before its commits, so that a kill at any moment leaves a
run which its steps can resume and which can be retried again.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.settings import printable
from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.commit import commit_uris, each_commit
from pipeline.runs.manifest import Output, manifest_uri
from pipeline.runs.names import COMMITS_FOLDER, SCRATCH_FOLDER
from pipeline.runs.sealed_json import typed_value

SELECTED = {"utterance_id": str, "speaker_id": str, "duration_s": float}
"""Fields of a selection file's lines, and their types."""

QUARANTINED = {"utterance_id": str, "reason": str, "duration_ms": int}
"""Fields of a ledger's lines, and their types."""

IDENTIFIED = {"utterance_id": str}
"""The field that the lines of both have."""


def read_lines(data: bytes, needs: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines; ValueError names the line without the fields of `needs`."""
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            fields = json.loads(line)
            values = [typed_value(fields, name, kind) for name, kind in needs.items()]
            is_whole = all(isinstance(value, str) or value >= 0 for value in values)
        except (ValueError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            need = ", ".join(f"{name} ({kind.__name__})" for name, kind in needs.items())
            said = printable(str(line[:80]))
            raise ValueError(f"line {number} is {said}: need a JSON object with {need}")
        yield fields


def ledger_reasons(ledgers: Iterable[Output]) -> Counter[str]:
    """Add up the reasons of `ledgers`; none of them is read."""
    reasons: Counter[str] = Counter()
    for ledger in ledgers:
        reasons.update(ledger.reasons)
    return reasons


@dataclass(frozen=True, slots=True)
class LostRows:
    """LostRows counts, by reason, those ledger rows of one task that are to be taken back."""

    step: str
    task: str
    reasons: Mapping[str, int]


def find_lost_rows(
    store: ObjectStore, run_uri: str, step: str, reasons: Collection[str]
) -> list[LostRows]:
    """Find the tasks of `step`, finished or not, with ledger rows of these reasons."""
    found = []
    for commit in each_commit(store, commit_uris(store, run_uri, step)):
        if commit.ledger is None:
            continue
        counts = commit.ledger.reasons
        wanted = {reason: counts[reason] for reason in sorted(reasons) if reason in counts}
        if wanted:
            found.append(LostRows(step, commit.task, wanted))
    return found


def take_back(store: ObjectStore, run_uri: str, rows: Sequence[LostRows]) -> None:
    """Remove the manifests of the rows' steps, then the commits of their tasks.

    The steps, run again, do these tasks alone, and merge what all tasks have kept for increments.
    Shards and ledgers stay, as orphans where the tasks make other ones.
    """
    for step in sorted({each.step for each in rows}):
        store.delete(manifest_uri(run_uri, step))
        scratch = store.list(join_uri(run_uri, step, SCRATCH_FOLDER, COMMITS_FOLDER))
        store.delete_many([found.uri for found in scratch])
    tasks = [(each.step, COMMITS_FOLDER, f"{each.task}.json") for each in rows]
    store.delete_many([join_uri(run_uri, *place) for place in tasks])


def has_begun(store: ObjectStore, run_uri: str, step: str) -> bool:
    """Return whether anything of `step` is stored."""
    return bool(store.list(join_uri(run_uri, step)))


def remove_step(store: ObjectStore, run_uri: str, step: str) -> None:
    """Remove all that is stored of `step`: its manifest, its records, then their objects."""
    folder = join_uri(run_uri, step)
    store.delete(manifest_uri(run_uri, step))
    uris = [found.uri for found in store.list(folder)]
    # A record that names what is gone would be damage; an object that no record names is none.
    for are_records in (True, False):
        store.delete_many([uri for uri in uris if uri.endswith(".json") == are_records])
