"""Call functions in a process of their own, each within a bound on its CPU time.

For native code that holds the GIL, may not end, crashes or takes all memory: the other threads of
the calling process remain at work, and it outlives the call.
"""

import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from infra.supervisor import describe_end

C = TypeVar("C")
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SERVE = "from infra.bounded_process import serve; serve()"


class CallError(RuntimeError):
    """CallError reports a call that took too much CPU time, or whose process ended."""


class BoundedProcess(Generic[C]):
    """BoundedProcess calls functions of a context, which its process makes once by `make`.

    The process starts at the first call, and again after a call that ended it. It ends with the
    context manager, and with the thread of its first call. It has the open `files` of this one.
    """

    def __init__(self, make: Callable[[], C], files: tuple[int, ...] = ()) -> None:
        self._make = make
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def call(self, function: Callable[[C], T], cpu_limit_s: float) -> T:
        """Return what `function` returns for the context, or raise what it raises.

        CallError if it takes more CPU time than the limit, or if its process ends twice.
        """
        # The first process may have ended by the lack of memory that others caused.
        for is_last in (False, True):
            connection = self._connection or self._start()
            try:
                connection.send((function, cpu_limit_s))
                answer = connection.recv()
            except (EOFError, OSError):
                code = self._end()
                if code == -signal.SIGXCPU:
                    raise CallError(f"took more than {cpu_limit_s:g} s of CPU time") from None
                if is_last:
                    raise CallError(f"{describe_end(code)}, twice") from None
            else:
                is_error, value = answer
                if is_error:
                    raise value
                return cast(T, value)
        raise AssertionError("the second attempt returns or raises")

    def _start(self) -> "Connection[Any, Any]":
        ours, theirs = Pipe()
        import_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._files),
                # A call has one core: BLAS and OpenMP would start threads for each.
                env={**os.environ, "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"},
            )
        self._connection = ours
        try:
            ours.send(self._make)
            is_error, error = ours.recv()
        except (EOFError, OSError) as lost:
            ended = describe_end(self._end())
            raise RuntimeError(f"a process for calls {ended} before the first call") from lost
        if is_error:
            self._end()
            raise error
        return ours

    def _end(self) -> int:
        """End the process, if there is one; return the code by which it ended."""
        if self._process is None or self._connection is None:
            return 0
        # It ends by itself once it has no caller, unless it is at work.
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        self._process.kill()
        code = self._process.wait()
        self._process = self._connection = None
        return code


def serve() -> None:
    """Answer the calls of the process that started this one, until it closes the connection."""
    caller, descriptor = map(int, sys.argv[1:])
    with suppress(AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:  # it ended before the kernel was asked to say so
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the caller
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # out of memory, the kernel shall kill this process, not its caller
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with Connection(descriptor) as connection, suppress(EOFError):
        make = connection.recv()
        is_error, context = _answer(lambda _: make(), None)
        connection.send((is_error, context if is_error else None))
        while True:
            function, cpu_limit_s = connection.recv()
            with _cpu_limit(cpu_limit_s):
                answer = _answer(function, context)
            connection.send(answer)


def _answer(function: Callable[[C], T], context: C) -> tuple[bool, Any]:
    try:
        return False, function(context)
    except Exception as error:  # the caller raises it
        return True, error


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """Let the kernel end this process by SIGXCPU after so much more CPU time, to the second."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    before, most = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(used.ru_utime + used.ru_stime + limit_s)
    until = until if most == resource.RLIM_INFINITY else min(until, most)
    resource.setrlimit(resource.RLIMIT_CPU, (until, most))
    yield
    resource.setrlimit(resource.RLIMIT_CPU, (before, most))
