"""Runs that take over what an earlier run has made: increments, and those of other speech.

An increment extends its base: its manifests are of the union. Another run takes over its base's
labelled speech and supervised models alone. Both name each object of an earlier run with that run.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

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
    listed,
    manifest_uri,
    read_with_digest,
)
from pipeline.runs.names import (
    BASE_INPUT,
    EXTENDS,
    INCREMENT_RECORD,
    LABELLED_FROM,
    STEP_RECORDS_FOLDER,
    STORE_CHECK_FOLDER,
)
from pipeline.runs.sealed_json import read_sealed, seal, typed_value

_RECORD_REMEDY = "put the record back, or use another --run"
_BASES, _LABELLED_FROM = "bases", "labelled_from"

Taken: TypeAlias = Literal["all", "labelled"]
"""What a run takes over from its base: all, so that it extends it, or what labelled speech made."""

OPTIONS: Mapping[Taken, str] = {"all": EXTENDS, "labelled": LABELLED_FROM}
"""The options that name the base."""


@dataclass(frozen=True, slots=True)
class Bases:
    """Bases are the earlier runs whose objects a run's manifests may name: its own base first.

    The run is the union with those that it `extends`. Of those after them, from `labelled_from` on,
    labelled speech and supervised models alone are in it.
    """

    extends: tuple[str, ...] = ()
    labelled_from: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        """Return all of them."""
        return (*self.extends, *self.labelled_from)

    @property
    def option(self) -> str:
        """Return the option that named the run's own base."""
        return OPTIONS["all" if self.extends else "labelled"]


def read_bases(store: ObjectStore, run_uri: str) -> Bases:
    """Read which runs a run takes over from; ValueError if the record is damaged.

    Also if it names a run outside the folder of this one.
    """
    uri = join_uri(run_uri, INCREMENT_RECORD)
    try:
        read = partial(read_sealed, remedy=_RECORD_REMEDY, parse=_parse_bases)
        bases = read_checked(store, uri, read)
    except ObjectNotFound:
        return Bases()
    if not bases.runs:
        raise ValueError(f"{uri}: it names no base: {_RECORD_REMEDY}")
    for base in bases.runs:
        require_beside(run_uri, base, bases.option)
    return bases


def _parse_bases(document: dict[str, Any]) -> Bases:
    labelled_from = typed_value({_LABELLED_FROM: [], **document}, _LABELLED_FROM, list[str])
    return Bases(tuple(typed_value(document, _BASES, list[str])), tuple(labelled_from))


def store_of_chain(run_uri: str) -> ObjectStore:
    """Return a store that is confined to a run and the runs from which it takes over."""
    return ObjectStore((run_uri, *read_bases(ObjectStore((run_uri,)), run_uri).runs))


def require_beside(run_uri: str, base_uri: str, option: str) -> None:
    """Raise ValueError unless a base, which an `option` names, lies in the same folder as the run.

    So no record can lead a step to read elsewhere, and one prefix of a role admits all bases.
    """
    run_uri, base_uri = normalize_uri(run_uri), normalize_uri(base_uri)
    if run_uri == base_uri:
        raise ValueError(f"{option} {base_uri}: a run cannot be its own base: name an earlier run")
    folder = run_uri.rpartition("/")[0]
    if base_uri.rpartition("/")[0] != folder:
        raise ValueError(
            f"{option} {base_uri}: need a run in {folder}/, beside {run_uri}: put the runs of a "
            "chain into one folder"
        )


def bases_of(store: ObjectStore, run_uri: str, base_uri: str, taken: Taken) -> Bases:
    """Return the bases of a run that takes over from a base; nothing is written.

    ValueError for a chain with a cycle, and for a run that has another base already.
    """
    run_uri, base_uri = normalize_uri(run_uri), normalize_uri(base_uri)
    require_beside(run_uri, base_uri, OPTIONS[taken])
    earlier = read_bases(store, base_uri)
    if taken == "all":
        bases = Bases((base_uri, *earlier.extends), earlier.labelled_from)
    else:
        bases = Bases((), (base_uri, *earlier.runs))
    if run_uri in bases.runs or len(set(bases.runs)) < len(bases.runs):
        chain = " extends ".join((run_uri, *bases.runs))
        raise ValueError(f"{chain}: a cycle: use another --run, or name another run to extend")
    there = read_bases(store, run_uri)
    if there.runs and there != bases:
        raise ValueError(
            f"{run_uri} has begun with {there.option} {there.runs[0]}, and cannot have "
            f"{bases.option} {base_uri}: use another --run"
        )
    return bases


def record_bases(store: ObjectStore, run_uri: str, base_uri: str, taken: Taken) -> Bases:
    """Record from which run a run takes over, once, and return its bases, as `bases_of` does.

    ValueError as `bases_of` raises it, and for a run that has begun without a base.
    """
    bases, run_uri = bases_of(store, run_uri, base_uri, taken), normalize_uri(run_uri)
    if not read_bases(store, run_uri).runs:
        # Any job has left a record there, which each job may read; check leaves none.
        records = store.list(join_uri(run_uri, STEP_RECORDS_FOLDER))
        of_checks = f"{join_uri(run_uri, STORE_CHECK_FOLDER)}/"
        if any(not each.uri.startswith(of_checks) for each in records):
            raise ValueError(
                f"{run_uri} has begun without {bases.option}, and cannot take over from "
                f"{base_uri} now: use another --run"
            )
        labelled_from = {_LABELLED_FROM: bases.labelled_from} if bases.labelled_from else {}
        data = seal({_BASES: bases.extends, **labelled_from}, indent=1)
        if not store.put_if_absent(join_uri(run_uri, INCREMENT_RECORD), data):
            return bases_of(store, run_uri, base_uri, taken)  # another process was first
    return bases


@dataclass(frozen=True, slots=True)
class BaseStep:
    """BaseStep is a step of a run from which another takes over: its manifest and SHA-256."""

    run_uri: str
    manifest: Manifest
    sha256: str

    @property
    def digests(self) -> dict[str, str]:
        """The input by which the increment's step depends on it."""
        return {f"{BASE_INPUT}{self.manifest.step}": self.sha256}

    def require_same(
        self, config: Mapping[str, Any], may_differ: Collection[str] = (), option: str = EXTENDS
    ) -> None:
        """Raise ValueError naming the settings that differ; those that `may_differ` do not count.

        A name stands for all settings below it. The `option` names the base.
        """
        found = [
            each
            for each in changes(self.manifest.config, config)
            if not any(each.startswith((f"{name}:", f"{name}.")) for name in may_differ)
        ]
        if found:
            raise ValueError(
                f"{self.run_uri}: {self.manifest.step} was made with other settings"
                f"{listed(found)}: need those of the base: set them so, or begin a run without "
                f"{option}"
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

    def inherit(self, store: ObjectStore, run_uri: str) -> None:
        """Store the manifest in a run that takes the step over; ValueError for another one there.

        Its objects stay where they are; of a few hundred, so without parts.
        """
        found = self.manifest
        inherited = replace(
            found,
            outputs=tuple(self.seen(found.outputs)),
            ledgers=tuple(self.seen(found.ledgers)),
            id_index=tuple(self.seen(found.id_index)),
            stream_means=tuple(self.seen(found.stream_means)),
            extends=self.extended(is_whole=True),
        )
        uri, data = manifest_uri(run_uri, found.step), inherited.to_bytes()
        if not store.put_if_absent(uri, data) and store.get(uri) != data:
            raise ValueError(
                f"{uri} is there and is not the one of {self.run_uri}: use another --run"
            )


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
    extends = read_bases(store, run_uri).extends
    if not extends:
        return None
    base = BaseStep(extends[0], *read_with_digest(store, extends[0], step))
    base.require_same(config, may_differ)
    return base
