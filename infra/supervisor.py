"""Run a command so that no process of it outlives it, or the process that asked for it.

`command_of` makes the command line; this file is the program. It ends as the command does, by the
same exit code or signal. SIGTERM, also from the kernel when the asking process ends, ends all
processes of the command: it terminates the first of them, after ORDERLY_S the others, and kills
after GRACE_S what is left.
"""

import ctypes
import fcntl
import os
import resource
import signal
import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ORDERLY_S, GRACE_S, UNKILLABLE_S = 2.0, 5.0, 30.0
_ROUND_S = 0.05
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}
# By this program, and by Python as it starts.
_CHANGED = {signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ}
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


CALLER = 0
"""Whichever process starts the command line, where another one has made it."""


def command_of(command: Sequence[str], asking: int | None = None) -> list[str]:
    """Return the command line that runs `command` as long as the asking process, or this, lives."""
    process = os.getpid() if asking is None else asking
    # Isolated: nothing but the standard library is imported, in 20 ms.
    return [sys.executable, "-I", "-S", __file__, str(process), *command]


def signal_of(code: int) -> signal.Signals | None:
    """Return the signal of an exit code: -n as Python has it, or 128 + n as shells have it."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number) if number in {each.value for each in signal.Signals} else None


def shell_code(code: int) -> int:
    """Return an exit code as a shell has it: 128 + n where signal n killed the process."""
    return 128 - code if code < 0 else code


def describe_end(code: int) -> str:
    """Say how a process ended that failed with this code."""
    killer = signal_of(code)
    if killer is None:
        return f"failed with exit code {code}"
    cause = ", perhaps out of memory" if killer == signal.SIGKILL else ""
    return f"was killed by signal {killer.value} ({killer.name}){cause}"


def _supervise(asking: int, command: list[str]) -> int:
    """Run the command; return its wait status."""
    _on_linux(_PR_SET_CHILD_SUBREAPER, 1)
    _on_linux(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # A terminal sends both to all processes; the asking one decides what ends.
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGHUP)}
    ignored = {each for each, action in before.items() if action == signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    error = _StandardError()
    child = _start(command, error.writer, ignored)
    error.start()
    status = None
    # The asking process may have ended before the kernel was asked to say so.
    while (status := _reaped(child)) is None and os.getppid() == asking:
        arrived = signal.sigtimedwait(_AWAITED, 1.0)
        if arrived is not None and arrived.si_signo == signal.SIGTERM:
            break
    error.is_muted = status is None
    ended = _end_all(child)
    error.drain()
    return ended if status is None else status


class _StandardError:
    """_StandardError passes the command's on, until the command is to end.

    Spark and torchrun then report each process that they lose, which the user asked for.
    """

    def __init__(self) -> None:
        self.is_muted = False
        if os.isatty(2):  # progress bars look whether they write to a terminal, and how wide it is
            self._reader, self.writer = os.openpty()
            size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.writer, termios.TIOCSWINSZ, size)
            settings = termios.tcgetattr(self.writer)
            settings[1] &= ~termios.OPOST  # the real terminal ends the lines
            termios.tcsetattr(self.writer, termios.TCSANOW, settings)
        else:
            self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Begin, when the command has its copy of the writer."""
        os.close(self.writer)
        self._thread.start()

    def drain(self) -> None:
        """Pass on what is left, when all processes of the command have ended."""
        self._thread.join(GRACE_S)

    def _pass_on(self) -> None:
        try:
            while data := os.read(self._reader, 1 << 16):
                if not self.is_muted:
                    _write(data)
        except OSError:  # a terminal without a writer cannot be read
            pass
        finally:
            os.close(self._reader)  # where ours has no reader, the command shall notice


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(2, rest) :]


def _start(command: list[str], writer: int, ignored: set[signal.Signals]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the asking process
        for number in _CHANGED - ignored:  # ignored as under nohup
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        _on_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 2)
        os.execvp(command[0], command)  # noqa: S606 - the step to run
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _end_all(child: int) -> int:
    """End all descendants and return the status of the child, or 0 if it was reaped before.

    A child that does not end, though killed, has the status of a killed one.

    The child first, which ends its own in order: a JVM that loses its workers reports them.
    """
    status, begun = 0, time.monotonic()
    asked = {os.getpid()}
    while left := _descendants(os.getpid()):
        waited = time.monotonic() - begun
        if waited > UNKILLABLE_S:  # in a call to a device or file system that does not return
            return signal.SIGKILL if child in left else status
        is_late = waited > GRACE_S
        due = left if waited > ORDERLY_S or child not in left else {child}
        for process in left if is_late else due - asked:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= due
        time.sleep(_ROUND_S)
        found = _reaped(child)
        status = status if found is None else found
    return status


def _reaped(child: int) -> int | None:
    """Reap all processes that have ended; return the status of the child if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == child:
                found = status
    return found


def _descendants(process: int) -> set[int]:
    """Return all living descendants; orphans belong to their nearest subreaper, this process."""
    children: dict[int, set[int]] = defaultdict(set)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            _, parent = stat.read_text().rpartition(")")[2].split()[:2]
            children[int(parent)].add(int(stat.parent.name))
    found: set[int] = set()
    pending = [process]
    while pending:
        new = children[pending.pop()] - found
        found |= new
        pending += new
    return found


def _on_linux(option: int, value: int) -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def main() -> None:
    """Run the command and end as it did."""
    status = _supervise(int(sys.argv[1]) or os.getppid(), sys.argv[2:])
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL has no other action
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
