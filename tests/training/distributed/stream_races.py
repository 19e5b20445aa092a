"""Find races between CUDA streams on a CPU: every tensor operation is checked as a GPU would race.

Streams and events are vector clocks. An operation of one stream may touch memory that another has
touched only after waiting for an event that was recorded since.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


class Stream:
    """Stream knows of each stream how far its work is done before this one's next operation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = defaultdict(int)


class Event:
    """Event is a moment of one stream."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream) -> None:
        for name, time in self.clock.items():
            stream.clock[name] = max(stream.clock[name], time)


@dataclass
class Memory:
    """Memory was made on a stream; `users` may keep it from being used for other tensors."""

    maker: str
    written: tuple[str, int]
    read: Clock = field(default_factory=dict)
    users: set[str] = field(default_factory=set)


class StreamRaces:
    """StreamRaces watches threads; `found` has a line for each race."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_operations = 0
        self.num_streams = 0
        self.caller = Stream("caller")
        self.generator = torch.Generator()
        self._memories: dict[int, Memory] = {}
        self._kept: list[Any] = []
        self._local = threading.local()

    def current_stream(self, device: torch.device) -> Stream:
        assert device.type == "cpu"
        return getattr(self._local, "stream", self.caller)

    def new_stream(self, device: torch.device) -> Stream:
        assert device.type == "cpu"
        self.num_streams += 1
        return Stream(f"stream {self.num_streams}")

    def watching_caller(self) -> TorchDispatchMode:
        """Watch this thread's operations, too."""
        return _Watch(self.operation, self._kept)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        with _Watch(self.operation, self._kept):
            yield
        del self._local.stream

    def use(self, tensor: Tensor, stream: Stream) -> None:
        memory = self._memories.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            memory.users.add(stream.name)

    def operation(self, name: str, read: set[int], written: set[int], made: set[int]) -> None:
        """Advance the running stream by an operation, and look at what it touches."""
        stream = self.current_stream(torch.device("cpu"))
        stream.clock[stream.name] += 1
        now = (stream.name, stream.clock[stream.name])
        self.num_operations += 1
        for key in read | written:
            memory = self._memories.get(key)
            if memory is None:
                continue
            self._check(stream, memory, f"{name} on {stream.name}", key in written)
            if key in written:
                memory.written, memory.read = now, {}
            else:
                memory.read[stream.name] = now[1]
        for key in made:
            self._memories[key] = Memory(stream.name, now)

    def _check(self, stream: Stream, memory: Memory, where: str, is_written: bool) -> None:
        before = [memory.written, *(memory.read.items() if is_written else ())]
        for other, time in before:
            if other != stream.name and stream.clock[other] < time:
                self.found.append(f"{where}: does not wait for {other}")
        # The caller outlives all ranks: it drops nothing that they use, and they no longer run.
        is_kept = "caller" in {memory.maker, stream.name} or stream.name in memory.users
        if memory.maker != stream.name and not is_kept:
            self.found.append(f"{where}: {memory.maker} may use the memory for another tensor")


class _Watch(TorchDispatchMode):
    """_Watch reports each operation of its thread, with the memory that it reads and writes."""

    def __init__(self, report: Callable[..., None], kept: list[Any]) -> None:
        super().__init__()
        self._report = report
        self._kept = kept  # so that no other tensor gets the same memory, and its history

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _keys([*args, *kwargs.values()])
        places = dict(enumerate(args)) | kwargs
        written = {
            key
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in _keys([places.get(number), places.get(argument.name)])
        }
        self._report(str(func), given - written, written, _keys([result]) - given)
        self._kept.append(result)
        return result


def _keys(values: list[Any]) -> set[int]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    return {each.untyped_storage().data_ptr() for each in tensors} - {0}


def _use(tensor: Tensor, races: StreamRaces, stream: Stream) -> None:
    races.use(tensor, stream)


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> StreamRaces:
    """Let torch.cuda's streams and events be those of a watched CPU."""
    races = StreamRaces()
    monkeypatch.setattr(torch.cuda, "Stream", races.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", races.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", races.current_stream)
    generator = races.generator
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: generator.set_state(state))
    monkeypatch.setattr(Tensor, "record_stream", partialmethod(_use, races))
    return races
