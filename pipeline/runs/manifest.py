"""Manifests: what a finished step wrote, from what, and what it left out, to the utterance.

A manifest also names the versions that the step's bytes depend on: of megahour, and of the engines
that computed them. It lists its outputs with size, digest and counts; long lists are stored in
parts, since a million outputs take 240 MB, and 500 MB of memory in each reader.
"""

import hashlib
import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, overload

from infra.settings import printable
from infra.spark.task_resources import local_folder
from infra.store.host_files import host_file
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.records import Tally
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    ALL_SUBSETS,
    CERTIFICATE_STEP,
    DEV,
    EVALUATION_STEP,
    FEATURES_FOLDER,
    GRAPHS_FOLDER,
    KBEST_COSTS_STEP,
    LATTICES_FOLDER,
    MANIFEST_FILE,
    MODELS_FOLDER,
    PARTITIONS_FOLDER,
    SELECTION_FOLDER,
    SUBSETS,
    TARGETS_FOLDER,
    TUNING_STEP,
    features_step,
    folder_of,
)
from pipeline.runs.sealed_json import read_sealed, seal, typed_record, typed_value

MAX_LISTED = 4_000
"""A manifest lists so many outputs itself. A longer list is stored in parts of so many, 1 MB."""


@dataclass(frozen=True, slots=True)
class Output:
    """One stored object: its key below the run, its size and digest, and what it holds.

    Of a ledger `reasons` counts the utterances by the reason why they are there. `run` is the URI
    of the earlier run that wrote the object, where an increment names it; else it is empty.
    """

    key: str
    num_bytes: int
    sha256: str
    utterances: int
    duration_ms: int
    reasons: Mapping[str, int] = field(default_factory=dict, hash=False)
    run: str = ""

    def uri(self, run_uri: str) -> str:
        """Return where the object lies, as a manifest of the run at `run_uri` names it."""
        return join_uri(self.run or run_uri, self.key)

    def seen_from(self, run_uri: str) -> "Output":
        """Return this output of the run at `run_uri`, as another run's manifest names it."""
        return self if self.run else replace(self, run=run_uri)

    @property
    def tally(self) -> Tally:
        """Utterances and declared duration in this object."""
        return Tally(self.utterances, self.duration_ms)

    def to_line(self) -> bytes:
        """Write a line of JSON, as a part holds it."""
        return json.dumps(_without_defaults(self), sort_keys=True).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Output":
        """Read what `to_line` wrote; ValueError for another line."""
        try:
            return typed_record(cls, json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            said = f"{printable(str(line[:80]))} ({printable(str(error))})"
            raise ValueError(f"{said}: need an output, as a part of a manifest lists it") from error


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One object that lists consecutive outputs, a line each."""

    key: str
    num_bytes: int
    sha256: str
    num_outputs: int


ReadPart = Callable[[OutputPart], bytes]


def no_parts(part: OutputPart) -> bytes:
    """Refuse to read a part, where a manifest is read without its store."""
    raise AssertionError(f"{part.key}: only a manifest that was read from a store has its parts")


if TYPE_CHECKING:
    _OutputSequence = Sequence[Output]
else:
    _OutputSequence = Sequence  # beartype would check an item, and so read a part


class OutputsInParts(_OutputSequence):
    """OutputsInParts reads a long list of outputs from its parts; one of them is in memory.

    ValueError from any access that meets a missing or damaged part.
    """

    def __init__(self, parts: Iterable[OutputPart], read: ReadPart) -> None:
        self.parts = tuple(parts)
        self._read = read
        self._firsts = [*accumulate((part.num_outputs for part in self.parts), initial=0)]
        self._held: tuple[int, tuple[Output, ...]] = (-1, ())

    def __len__(self) -> int:
        return self._firsts[-1]

    @overload
    def __getitem__(self, place: int) -> Output: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Output, ...]: ...
    def __getitem__(self, place: int | slice) -> Output | tuple[Output, ...]:
        """Return an output, or a tuple of some; neighbours are read together."""
        if isinstance(place, slice):
            return tuple(self[number] for number in range(*place.indices(len(self))))
        number = range(len(self))[place]
        part = bisect_right(self._firsts, number) - 1
        return self._outputs_of(part)[number - self._firsts[part]]

    def __iter__(self) -> Iterator[Output]:
        for part in range(len(self.parts)):
            yield from self._outputs_of(part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputsInParts) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __reduce__(self) -> tuple[type, tuple[tuple[OutputPart, ...], ReadPart]]:
        """Pickle without the part in memory."""
        return OutputsInParts, (self.parts, self._read)

    def by_part(self) -> list["OutputsInParts"]:
        """Return each part as a list of its own, which a task can read."""
        return [OutputsInParts([part], self._read) for part in self.parts]

    def find(self, keys: Collection[str]) -> Iterator[tuple[int, Output]]:
        """Yield the outputs with these keys, each with its place; read no part behind the last."""
        wanted = set(keys)
        # The part in memory comes first: an index has often just led to it.
        for number in sorted(range(len(self.parts)), key=lambda each: each != self._held[0]):
            if not wanted:
                return
            for place, output in enumerate(self._some_of(number, wanted), self._firsts[number]):
                if output.key in wanted:
                    wanted.remove(output.key)
                    yield place, output

    def _some_of(self, number: int, wanted: Collection[str]) -> tuple[Output, ...]:
        """Return a part's outputs; none, and nothing is parsed, where no wanted key is in it."""
        if self._held[0] == number:
            return self._held[1]
        data = self._read(self.parts[number])
        # 4,000 lines take 0.1 s to parse, and a search of their bytes a thousandth of that.
        if not any(json.dumps(key).encode() in data for key in wanted):
            return ()
        return self._hold(number, data)

    def _outputs_of(self, number: int) -> tuple[Output, ...]:
        if self._held[0] != number:
            self._hold(number, self._read(self.parts[number]))
        return self._held[1]

    def _hold(self, number: int, data: bytes) -> tuple[Output, ...]:
        outputs = tuple(map(Output.from_line, data.splitlines()))
        self._held = number, outputs
        return outputs


Outputs = tuple[Output, ...] | OutputsInParts
"""The outputs of a step, as its manifest lists them."""


class LinesOnDisk:
    """LinesOnDisk holds lines by group, in an unnamed file on local disk.

    The file ends with the process.
    """

    def __init__(self) -> None:
        self._file = TemporaryFile(dir=local_folder())  # noqa: SIM115 - closed when we are collected
        self._places: dict[int, array[int]] = {}
        self._lengths: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, group: int, data: bytes) -> None:
        """Add the lines of a group, whose number decides their place."""
        lengths = array("i", (len(line) + 1 for line in data.splitlines()))
        *places, _ = accumulate(lengths, initial=self._file.tell())
        self._places[group] = array("q", places)
        self._lengths[group] = lengths
        self._file.write(data)
        self._file.flush()

    def in_order(self, order: Callable[[Sequence[int]], Sequence[int]]) -> Iterator[bytes]:
        """Yield the lines of all groups, permuted."""
        groups = sorted(self._places)
        if not groups:
            return
        places, lengths = array("q"), array("i")
        for group in groups:
            places += self._places[group]
            lengths += self._lengths[group]
        for number in order(range(len(places))):
            yield os.pread(self._file.fileno(), lengths[number], places[number])


def to_document(outputs: Outputs) -> list[dict[str, Any]]:
    """Return the outputs, or the parts that list them, as a manifest names them."""
    if isinstance(outputs, OutputsInParts):
        return [asdict(part) for part in outputs.parts]
    return [_without_defaults(output) for output in outputs]


def find_outputs(outputs: Outputs, keys: Collection[str]) -> Iterator[tuple[int, Output]]:
    """Yield the outputs with these keys, each with its place in the list."""
    if isinstance(outputs, OutputsInParts):
        return outputs.find(keys)
    return ((place, output) for place, output in enumerate(outputs) if output.key in keys)


def own_outputs(outputs: Iterable[Output]) -> tuple[Output, ...]:
    """Return those that a manifest's own run wrote, not an earlier one which it extends."""
    return tuple(output for output in outputs if not output.run)


def first_own(outputs: Outputs) -> int:
    """Find the first output that a manifest's own run wrote, where those of its base come first.

    Of a list in parts, a part is read for each halving.
    """
    return bisect_left(range(len(outputs)), True, key=lambda place: not outputs[place].run)


_FIELDS = tuple(each.name for each in fields(Output))


def _without_defaults(output: Output) -> dict[str, Any]:
    # A large manifest has a line an output, and most have neither reasons nor another run.
    document = {name: getattr(output, name) for name in _FIELDS}  # asdict takes six times as long
    for name in ("reasons", "run"):
        if not document[name]:
            del document[name]
    return document


def sha256(data: bytes) -> str:
    """Compute the hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def read_output(store: ObjectStore, run_uri: str, output: Output) -> bytes:
    """Read an object that a manifest names, and check its digest."""
    remedy = "the object was altered or damaged: run its step again into a new --run"
    return _read_whole(store, output.uri(run_uri), output.sha256, remedy)


def output_on_host(store: ObjectStore, run_uri: str, output: Output) -> Path:
    """Return this host's copy of an object that a manifest names, for all processes to map."""
    return host_file(store, output.uri(run_uri), output.sha256)


def read_part(store: ObjectStore, run_uri: str, part: OutputPart) -> bytes:
    """Read a part of a manifest's list, and check its digest; ValueError if it is missing."""
    remedy = (
        "remove the step's manifest.json and run the step again, which writes both from the "
        "step's commits"
    )
    uri = join_uri(run_uri, part.key)
    try:
        return _read_whole(store, uri, part.sha256, remedy)
    except ObjectNotFound as error:
        raise ValueError(f"{uri} is missing, a part of a manifest: {remedy}") from error


def _read_whole(store: ObjectStore, uri: str, digest: str, remedy: str) -> bytes:
    def require_whole(data: bytes) -> bytes:
        if sha256(data) != digest:
            raise ValueError(f"SHA-256 is {sha256(data)}, its manifest says {digest}; {remedy}")
        return data

    return read_checked(store, uri, require_whole)


MEGAHOUR = "megahour"

ENGINES: Mapping[str, tuple[str, ...]] = {
    SELECTION_FOLDER: ("numpy",),
    FEATURES_FOLDER: (
        *("kaldi-native-fbank", "miniaudio", "numpy"),
        *("pyarrow", "scipy", "soundfile"),
    ),
    ALIGNMENTS_FOLDER: ("kaldifst", "numpy", "pyarrow", "scipy", "torch"),
    LATTICES_FOLDER: ("kaldifst", "numpy", "pyarrow", "torch"),
    MODELS_FOLDER: ("numpy", "torch"),
    TARGETS_FOLDER: ("numpy", "pyarrow", "torch"),
    PARTITIONS_FOLDER: ("numpy", "pyarrow"),
    CERTIFICATE_STEP: ("numpy",),
    KBEST_COSTS_STEP: ("numpy", "pyarrow", "scipy", "torch"),
    **dict.fromkeys(
        (TUNING_STEP, GRAPHS_FOLDER, EVALUATION_STEP), ("kaldialign", "kaldifst", "numpy", "torch")
    ),
}
"""The distributions that compute or write the objects of each kind of step."""


@cache
def installed_version(name: str) -> str:
    """Return a distribution's version. Reading it takes 0.7 ms, and a task asks for seven.

    Raises PackageNotFoundError if it is not installed.
    """
    return metadata.version(name)


def step_versions(step: str, engines: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions that the bytes of `step` depend on, by distribution; installed ones.

    Some steps have `engines` besides those of their kind.
    """
    versions = {}
    for name in (MEGAHOUR, *ENGINES.get(folder_of(step), ()), *engines):
        # A cluster may lack an engine that its recipe does not choose.
        with suppress(metadata.PackageNotFoundError):
            versions[name] = installed_version(name)
    return versions


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name what differs, as in "numpy 2.4.6, now 2.5.0"; "" if nothing does."""
    return "; ".join(
        f"{name} {before.get(name, 'unknown')}, now {now.get(name, 'unknown')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    )


_LISTS = {"outputs": "output_parts", "ledgers": "ledger_parts"}
_SHORT_LISTS = ("id_index", "stream_means")
_TALLIES = ("tally_in", "tally_out", "quarantined", "unselected")

# An error names so many differing settings and inputs, with so many letters of each value.
_MAX_NAMED, _MAX_SHOWN = 5, 24


@dataclass(frozen=True, slots=True)
class Extended:
    """Extended says what the manifest of an increment's step takes over from the run it extends.

    It holds that run's URI, the SHA-256 of its manifest, and the utterances that come from there.
    `is_whole` says that the increment's own tasks did nothing: it inherits the step.
    """

    run: str
    sha256: str
    tally_in: Tally
    tally_out: Tally
    quarantined: Tally
    unselected: Tally
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """The finished step: appears only when all is committed; holds no time and no place of its own.

    A selection's `id_index` holds the ranges in which its utterances are found by their ids, and
    features' `stream_means` the means with which an increment begins. Long lists of outputs and
    ledgers are stored in parts, of which the manifest names the digests. That of an increment's
    step is of the union: what `extends` takes over is among its outputs, each with its run.
    """

    step: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: Outputs
    ledgers: Outputs = ()
    tally_in: Tally = field(default_factory=Tally)
    tally_out: Tally = field(default_factory=Tally)
    quarantined: Tally = field(default_factory=Tally)
    unselected: Tally = field(default_factory=Tally)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = field(default_factory=lambda: installed_version(MEGAHOUR))
    versions: Mapping[str, str] = field(default_factory=dict)
    id_index: tuple[Output, ...] = ()
    stream_means: tuple[Output, ...] = ()
    extends: Extended | None = None

    def __post_init__(self) -> None:
        # The books balance to the utterance and the millisecond, or there is no manifest.
        accounted = self.tally_out + self.quarantined + self.unselected
        if accounted != self.tally_in:
            raise ValueError(
                f"{self.step}: {self.tally_in} in, but {self.tally_out} written + "
                f"{self.quarantined} quarantined + {self.unselected} unselected; "
                "an utterance was lost: do not use this output"
            )

    @property
    def is_inherited(self) -> bool:
        """True if the run that it extends did the whole step."""
        return self.extends is not None and self.extends.is_whole

    def statistic(self, name: str, kind: Any, absent: Any = None) -> Any:  # noqa: ANN401 - as JSON
        """Return a statistic of a `kind` such as list[int], or `absent` for none.

        ValueError for another kind, and for none without `absent`.
        """
        if absent is not None and name not in self.statistics:
            return absent
        try:
            return typed_value(self.statistics, name, kind)
        except TypeError as error:
            remedy = "another version wrote it: run this step and those after it in a new --run"
            raise ValueError(
                f"the manifest of {self.step}: statistics: {error}: {remedy}"
            ) from error

    @property
    def own_outputs(self) -> Outputs:
        """The outputs that the step's own run wrote; the others are of the run that it extends."""
        return self.outputs if self.extends is None else own_outputs(self.outputs)

    @property
    def parts(self) -> list[OutputPart]:
        """The parts of long lists of outputs and ledgers."""
        lists = (self.outputs, self.ledgers)
        return [part for each in lists if isinstance(each, OutputsInParts) for part in each.parts]

    def to_bytes(self) -> bytes:
        """Write canonical JSON, with hours beside each tally for the reader."""
        bare = replace(self, outputs=(), ledgers=(), id_index=(), stream_means=(), extends=None)
        document = asdict(bare)
        document["extends"] = asdict(self.extends) if self.extends else None
        for name in (*_LISTS, *_SHORT_LISTS):
            outputs = getattr(self, name)
            in_parts = isinstance(outputs, OutputsInParts)
            document[name] = [] if in_parts else to_document(outputs)
            if in_parts:
                document[_LISTS[name]] = to_document(outputs)
        document["config_digest"] = sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in _TALLIES:
            document[name]["hours"] = round(getattr(self, name).hours, 6)
        return seal(document, indent=1)

    @classmethod
    def from_bytes(cls, data: bytes, read: ReadPart = no_parts) -> "Manifest":
        """Read what `to_bytes` wrote; ValueError if it is damaged.

        `read` reads a part of the outputs or ledgers, when they are used.
        """
        return read_sealed(
            data,
            "the manifest is damaged, or of an older version: remove it and run its step again, "
            "which makes it from the step's commits",
            partial(cls._from_document, read),
        )

    @classmethod
    def _from_document(cls, read: ReadPart, document: dict[str, Any]) -> "Manifest":
        del document["config_digest"]
        for name in _TALLIES:
            del document[name]["hours"]
            document[name] = typed_record(Tally, document[name])
        if extends := document.pop("extends"):
            tallies = {name: typed_record(Tally, extends[name]) for name in _TALLIES}
            document["extends"] = typed_record(Extended, {**extends, **tallies})
        for name in (*_LISTS, *_SHORT_LISTS):
            document[name] = tuple(typed_record(Output, each) for each in document[name])
        for name, in_parts in _LISTS.items():
            if parts := document.pop(in_parts, ()):
                listed_parts = [typed_record(OutputPart, part) for part in parts]
                document[name] = OutputsInParts(listed_parts, read)
        return typed_record(cls, document)


def manifest_uri(run_uri: str, step: str) -> str:
    """Return the URI of the manifest of `step`, such as "features/labelled"."""
    return join_uri(run_uri, step, MANIFEST_FILE)


def is_finished(store: ObjectStore, run_uri: str, step: str) -> bool:
    """Return whether a step has its manifest."""
    return store.exists(manifest_uri(run_uri, step))


def subsets_of_run(store: ObjectStore, run_uri: str) -> tuple[str, ...]:
    """Return the subsets whose features a run has: the three of each run, and dev if it has some.

    Raises ValueError where dev has begun and is not finished: it would be left out silently.
    """
    if is_finished(store, run_uri, step := features_step(DEV)):
        return ALL_SUBSETS
    if any(True for _ in store.list(join_uri(run_uri, step))):
        raise ValueError(
            f"{join_uri(run_uri, step)} has begun and has no manifest: finish {step} first: run "
            "the step that writes it again"
        )
    return SUBSETS


def read_manifest(store: ObjectStore, run_uri: str, step: str) -> Manifest:
    """Read the manifest of a finished step; ValueError names the step to run if there is none."""
    return read_with_digest(store, run_uri, step)[0]


def input_digests(store: ObjectStore, run_uri: str, steps: Sequence[str]) -> dict[str, str]:
    """Compute the SHA-256 of each input step's manifest, by step name."""
    return {step: read_with_digest(store, run_uri, step)[1] for step in steps}


def parse_manifest(store: ObjectStore, run_uri: str, data: bytes) -> Manifest:
    """Read a manifest of a run, whose parts are in the store; ValueError if it is damaged."""
    return Manifest.from_bytes(data, partial(read_part, store, run_uri))


def read_with_digest(store: ObjectStore, run_uri: str, step: str) -> tuple[Manifest, str]:
    """Read a manifest as `read_manifest` does, and its SHA-256."""
    uri = manifest_uri(run_uri, step)
    try:
        return read_checked(
            store, uri, lambda data: (parse_manifest(store, run_uri, data), sha256(data))
        )
    except ObjectNotFound as error:
        raise ValueError(f"{uri} is missing: run the step that writes {step} first") from error


def differences(manifest: Manifest, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Name the first settings and inputs in which `manifest` differs, as in ": k: 20 -> 21"."""
    return listed(changes({**manifest.config, **manifest.inputs}, {**config, **inputs}))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name all settings that differ, each with both values, as in "engine: fast -> kaldi"."""
    there, here = _flat(before), _flat(now)
    return [
        f"{name}: {_shown(there.get(name))} -> {_shown(here.get(name))}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def listed(named: Sequence[str]) -> str:
    """Write the first changes after a colon; nothing if there is none."""
    more = f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return f": {'; '.join(named[:_MAX_NAMED])}{more}" if named else ""


def _shown(value: str | None) -> str:
    return "absent" if value is None else value.strip('"')[:_MAX_SHOWN]


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Write each value of nested settings as JSON, under its dotted name."""
    values: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = json.dumps(value, sort_keys=True)
    return values


def store_again(store: ObjectStore, uri: str, data: bytes) -> None:
    """Store what each call of a finished step makes again, unless it is there already."""
    try:
        if store.get(uri) == data:
            return
    except ObjectNotFound:
        pass
    store.put(uri, data)
