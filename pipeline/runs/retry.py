"""Take rows back from ledgers: remove the commits of their tasks, and what was made from them.

Deletions are in an order that a kill at any moment leaves a run which its steps can resume and
which can be retried again: later steps before earlier ones, a manifest before its commits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.commit import commit_uris, each_commit
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import COMMITS_FOLDER, SCRATCH_FOLDER


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
        counts = ledger_reasons(store, run_uri, [commit.ledger])
        wanted = {reason: counts[reason] for reason in sorted(reasons) if counts[reason]}
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
