"""Increments: a run that extends an earlier one, and takes over what that one has made.

An increment's manifests are of the union. They name each object of an earlier run with that run.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    join_uri,
    normalize_uri,
    read_checked,
)
from pipeline.records import Tally
from pipeline.runs.manifest import (
    Extended,
    Manifest,
    Output,
    changes,
    is_finished,
    listed,
    manifest_uri,
    read_with_digest,
)
from pipeline.runs.names import (
    BASE_INPUT,
    INCREMENT_RECORD,
    STEP_RECORDS_FOLDER,
    STORE_CHECK_FOLDER,
)
from pipeline.runs.sealed_json import read_sealed, seal, texts_of

_RECORD_REMEDY = "put the record back, or use another --run"
_BASES = "bases"


def read_bases(store: ObjectStore, run_uri: str) -> tuple[str, ...]:
    """Read which runs a run extends: its own base first, the first run last; () if none.

    ValueError if the record is damaged, or names a run outside the folder of this one.
    """
    uri, parse = join_uri(run_uri, INCREMENT_RECORD), partial(texts_of, _BASES)
    try:
        bases = read_checked(store, uri, partial(read_sealed, remedy=_RECORD_REMEDY, parse=parse))
    except ObjectNotFound:
        return ()
    if not bases:
        raise ValueError(f"{uri}: it names no base: {_RECORD_REMEDY}")
    for base in bases:
        require_beside(run_uri, base)
    return tuple(bases)


def store_of_chain(run_uri: str) -> ObjectStore:
    """Return a store that is confined to a run and the runs that it extends."""
    return ObjectStore((run_uri, *read_bases(ObjectStore((run_uri,)), run_uri)))


def require_beside(run_uri: str, base_uri: str) -> None:
    """Raise ValueError unless a base lies in the same folder as the run that extends it.

    So no record can lead a step to read elsewhere, and one prefix of a role admits all bases.
    """
    run_uri, base_uri = normalize_uri(run_uri), normalize_uri(base_uri)
    if run_uri == base_uri:
        raise ValueError(f"extends = {base_uri}: a run cannot extend itself: name an earlier run")
    folder = run_uri.rpartition("/")[0]
    if base_uri.rpartition("/")[0] != folder:
        raise ValueError(
            f"extends = {base_uri}: need a run in {folder}/, beside {run_uri}: put the runs of a "
            "chain into one folder"
        )


def chain_of(store: ObjectStore, run_uri: str, base_uri: str) -> tuple[str, ...]:
    """Return the runs that a run extends if it extends a base; nothing is written.

    ValueError for a chain with a cycle, and for a run that extends another one already.
    """
    run_uri, base_uri = normalize_uri(run_uri), normalize_uri(base_uri)
    require_beside(run_uri, base_uri)
    bases = (base_uri, *read_bases(store, base_uri))
    if run_uri in bases or len(set(bases)) < len(bases):
        chain = " extends ".join((run_uri, *bases))
        raise ValueError(f"{chain}: a cycle: use another --run, or name another run to extend")
    there = read_bases(store, run_uri)
    if there and there != bases:
        raise ValueError(
            f"{run_uri} extends {there[0]} already, and cannot extend {base_uri}: use another --run"
        )
    return bases


def begin_increment(store: ObjectStore, run_uri: str, base_uri: str) -> tuple[str, ...]:
    """Record that a run extends another, once, and return all that it extends, as `chain_of` does.

    ValueError as `chain_of` raises it, and for a run that has begun without a base.
    """
    chain, run_uri = chain_of(store, run_uri, base_uri), normalize_uri(run_uri)
    if not read_bases(store, run_uri):
        # Any job has left a record there, which each job may read; check leaves none.
        records = store.list(join_uri(run_uri, STEP_RECORDS_FOLDER))
        of_checks = f"{join_uri(run_uri, STORE_CHECK_FOLDER)}/"
        if any(not each.uri.startswith(of_checks) for each in records):
            raise ValueError(
                f"{run_uri} has begun without --extends, and cannot extend {base_uri} now: use "
                "another --run"
            )
        data = seal({_BASES: chain}, indent=1)
        if not store.put_if_absent(join_uri(run_uri, INCREMENT_RECORD), data):
            return chain_of(store, run_uri, base_uri)  # another process was first
    return chain


@dataclass(frozen=True, slots=True)
class BaseStep:
    """BaseStep is a step of the run that an increment extends: its manifest and SHA-256."""

    run_uri: str
    manifest: Manifest
    sha256: str

    @property
    def digests(self) -> dict[str, str]:
        """The input by which the increment's step depends on it."""
        return {f"{BASE_INPUT}{self.manifest.step}": self.sha256}

    def require_same(self, config: Mapping[str, Any], may_differ: Collection[str] = ()) -> None:
        """Raise ValueError naming the settings that differ; those that `may_differ` do not count.

        A name stands for all settings below it.
        """
        found = [
            each
            for each in changes(self.manifest.config, config)
            if not any(each.startswith((f"{name}:", f"{name}.")) for name in may_differ)
        ]
        if found:
            raise ValueError(
                f"{self.run_uri}: {self.manifest.step} was made with other settings"
                f"{listed(found)}: an increment needs those of its base; set them so, or begin a "
                "run without --extends"
            )

    def extended(self, *, is_whole: bool = False, all_again: bool = False) -> Extended:
        """Say what the increment takes over; of a step that judges `all_again`, outputs alone."""
        found = self.manifest
        if all_again:
            tallies = found.tally_out, found.tally_out, Tally(), Tally()
        else:
            tallies = found.tally_in, found.tally_out, found.quarantined, found.unselected
        return Extended(self.run_uri, self.sha256, *tallies, is_whole)

    def seen(self, outputs: Iterable[Output]) -> Iterator[Output]:
        """Yield outputs of its manifest as the increment's manifest names them."""
        return (output.seen_from(self.run_uri) for output in outputs)


def read_base(
    store: ObjectStore,
    run_uri: str,
    step: str,
    config: Mapping[str, Any],
    may_differ: Collection[str] = (),
) -> BaseStep | None:
    """Read a step of the run that this one extends; None if it extends none.

    ValueError if the base has not finished the step, or has other settings that may not differ.
    """
    bases = read_bases(store, run_uri)
    if not bases:
        return None
    base = BaseStep(bases[0], *read_with_digest(store, bases[0], step))
    base.require_same(config, may_differ)
    return base


def inherit(store: ObjectStore, run_uri: str, base_uri: str, steps: Sequence[str]) -> list[str]:
    """Store the base's manifests of steps that increments do not make; return the steps it has."""
    there = [step for step in steps if is_finished(store, base_uri, step)]
    for step in there:
        base = BaseStep(base_uri, *read_with_digest(store, base_uri, step))
        found = base.manifest
        inherited = replace(
            found,
            # Their objects stay where they are; of a few hundred, so without parts.
            outputs=tuple(base.seen(found.outputs)),
            ledgers=tuple(base.seen(found.ledgers)),
            id_index=tuple(base.seen(found.id_index)),
            stream_means=tuple(base.seen(found.stream_means)),
            extends=base.extended(is_whole=True),
        )
        uri, data = manifest_uri(run_uri, step), inherited.to_bytes()
        if not store.put_if_absent(uri, data) and store.get(uri) != data:
            raise ValueError(f"{uri} is there and is not the one of {base_uri}: use another --run")
    return there
