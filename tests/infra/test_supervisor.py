"""A supervised command leaves no process behind; its code or signal is passed on."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator

import pytest

from infra import supervisor
from infra.supervisor import command_of, describe_end, shell_code, signal_of
from tests.whole_path.processes import left_behind

LIMIT_S = 30

# A child in a session of its own, whose parent has ended, which ignores SIGTERM.
STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
    os._exit(0)
print("ready", flush=True)
"""
ASKING = """
import subprocess, sys
from infra.supervisor import command_of
process = subprocess.Popen(command_of(sys.argv[1:]))
process.wait()
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes of a test by their environment."""
    mark = f"mark-{uuid.uuid4().hex}"
    monkeypatch.setenv("MEGAHOUR_TEST_MARK", mark)
    yield mark
    assert _is_gone(mark)


def _is_gone(mark: str) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while left_behind(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -15 $$", -15), ("exit 137", 137)],
)
def test_the_code_is_the_command_s(script: str, code: int) -> None:
    """Exit codes and signals pass through; so does the absence of the program."""
    assert subprocess.run(command_of(["sh", "-c", script]), check=False).returncode == code


def test_a_command_that_is_none_has_the_shell_s_code() -> None:
    """It is named on standard error."""
    done = subprocess.run(command_of(["no-such"]), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "no-such: No such file or directory\n")


def test_arguments_and_streams_pass_through() -> None:
    """Arguments with spaces and dashes are the command's; standard input is empty."""
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:], repr(sys.stdin.read()))"]
    done = subprocess.run(
        command_of([*command, "--run", "a b", "--"]),
        input="typed",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['--run', 'a b', '--'] ''\n"


def test_nothing_outlives_the_command(mark: str) -> None:
    """An orphan in a session of its own is ended with the command, gently, and then by SIGKILL."""
    child = "import time; time.sleep(100)"
    gentle = "import subprocess, sys, time; "
    gentle += f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
    gentle += "print(time.monotonic())"  # the clock of all processes
    done = subprocess.run(
        command_of([sys.executable, "-c", gentle]), stdout=subprocess.PIPE, text=True, check=True
    )
    ended_s = time.monotonic()
    assert left_behind(mark) == []
    assert ended_s - float(done.stdout) < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_asking_process(mark: str, number: signal.Signals) -> None:
    """Killed by either signal it takes all its descendants with it, stubborn ones too."""
    script = STUBBORN + "time.sleep(100)"
    if number == signal.SIGTERM:
        script = script.replace("SIG_IGN", "SIG_DFL")
    command = [sys.executable, "-c", ASKING, sys.executable, "-c", script]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "ready\n"
    asking.send_signal(number)
    asking.stdout.read()  # until nobody holds it
    asking.wait()
    assert _is_gone(mark)


def test_a_killed_supervisor_takes_the_command_with_it(mark: str) -> None:
    """The kernel kills what it started."""
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(100)"]
    process = subprocess.Popen(command_of(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    assert _is_gone(mark)


@pytest.mark.parametrize(
    ("code", "said", "of_shell"),
    [
        (-9, "was killed by signal 9 (SIGKILL), perhaps out of memory", 137),
        (137, "was killed by signal 9 (SIGKILL), perhaps out of memory", 137),
        (-15, "was killed by signal 15 (SIGTERM)", 143),
        (139, "was killed by signal 11 (SIGSEGV)", 139),
        (1, "failed with exit code 1", 1),
        (127, "failed with exit code 127", 127),
        (255, "failed with exit code 255", 255),
    ],
)
def test_an_end_is_described(code: int, said: str, of_shell: int) -> None:
    """A signal has its number and name, and SIGKILL its likely cause."""
    assert (describe_end(code), shell_code(code)) == (said, of_shell)
    assert (signal_of(code) is None) == ("signal" not in said)


def test_progress_bars_see_the_terminal() -> None:
    """The command's standard error is a terminal of the same width as ours."""
    program = "import os, sys; print(sys.stderr.isatty(), os.get_terminal_size(2), file=sys.stderr)"
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 7, 93, 0, 0))
    subprocess.run(command_of([sys.executable, "-c", program]), stderr=writer, check=True)
    os.close(writer)
    with os.fdopen(reader, "rb") as terminal:
        assert terminal.readline() == b"True os.terminal_size(columns=93, lines=7)\r\n"


def test_a_reader_that_leaves_does_not_stop_the_command() -> None:
    """The command's writes fail at once when our standard error has no reader."""
    program = "import sys\nfor _ in range(9999): sys.stderr.write('x' * 999)\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command_of([sys.executable, "-c", program]), stderr=writer, check=False, timeout=LIMIT_S
    )
    os.close(writer)
    assert done.returncode != 0


def test_the_command_has_the_usual_signals() -> None:
    """A command that writes where nothing reads ends by SIGPIPE, as it would by itself."""
    script = "sh -c 'kill -PIPE $$; echo survived'; echo $?"
    done = subprocess.run(
        command_of(["sh", "-c", script]), capture_output=True, text=True, check=True
    )
    assert done.stdout == "141\n"


def test_a_command_that_cannot_be_ended_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a call to a device that does not return: its status is that of a killed one."""
    child = 2**22 + 1  # no process has this number
    monkeypatch.setattr(supervisor, "_descendants", lambda _: {child})
    monkeypatch.setattr(supervisor, "UNKILLABLE_S", 0.1)
    assert os.waitstatus_to_exitcode(supervisor._end_all(child)) == -signal.SIGKILL
