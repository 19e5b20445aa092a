"""Outputs of a step: the size, digest and counts of each object; long lists of them in parts.

A manifest of a million outputs would take 240 MB, and 500 MB of memory in each of its readers.
"""

import hashlib
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from jaxtyping import Int32, Int64

from infra.settings import printable
from infra.spark.task_resources import local_folder
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, read_checked
from pipeline.records import Tally
from pipeline.runs.sealed_json import typed_record

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
    _OutputSequence = Sequence  # a check of arguments would read an item, and with it a part


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
        """Return the number of outputs."""
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
        """Iterate over the outputs, part by part."""
        for part in range(len(self.parts)):
            yield from self._outputs_of(part)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same parts."""
        return isinstance(other, OutputsInParts) and self.parts == other.parts

    def __hash__(self) -> int:
        """Hash the parts."""
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
        self._places: dict[int, Int64[np.ndarray, " lines"]] = {}
        self._lengths: dict[int, Int32[np.ndarray, " lines"]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, group: int, data: bytes) -> None:
        """Add the lines of a group, whose number decides their place."""
        lengths = np.array([len(line) + 1 for line in data.splitlines()], np.int32)
        first_byte = self._file.tell()
        self._places[group] = first_byte + np.cumsum(lengths, dtype=np.int64) - lengths
        self._lengths[group] = lengths
        self._file.write(data)
        self._file.flush()

    def in_order(self, order: Callable[[Sequence[int]], Sequence[int]]) -> Iterator[bytes]:
        """Yield the lines of all groups, permuted."""
        groups = sorted(self._places)
        if not groups:
            return
        places = np.concatenate([self._places[group] for group in groups])
        lengths = np.concatenate([self._lengths[group] for group in groups])
        for number in order(range(len(places))):
            yield os.pread(self._file.fileno(), int(lengths[number]), int(places[number]))


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
    # Later versions added reasons and run: what had none is written as it was read.
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
