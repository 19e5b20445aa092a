"""Choose processes to kill and the moments: seeded, fair over the kinds, sooner in short steps."""

import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

EVERYWHERE = ("driver", "executor", "python", "worker")
"""The kinds that every step has."""

DEVICE_SERVER = "device server"
KINDS = (*EVERYWHERE, DEVICE_SERVER)
# A driver's death costs most time and hits every task, so it is half as frequent.
_TURN = (*EVERYWHERE, "executor", "python")
_SPREAD_S = 1.2
_MAX_PAUSE_S = 2.5
_SIGNS = {
    "executor": ("CoarseGrainedExecutorBackend",),
    "python": ("pyspark.daemon", "pyspark.worker"),  # the daemon, or a worker that it forked
    "worker": ("deploy.worker.Worker",),
    DEVICE_SERVER: ("infra.devices.device_server",),
}

Processes = Mapping[int, str]


class Killer:
    """Killer draws victims and moments.

    It also pauses Python workers, so that Spark starts a second attempt. The first attempt then
    resumes after the second has committed.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # The first kills are of all kinds, however few a step has.
        self._turn = self._random.sample(EVERYWHERE, len(EVERYWHERE))
        self._spread_s: dict[str, float] = {}
        self._paused: dict[int, float] = {}

    def kinds(self, step: str, number: int) -> list[str]:
        """Draw the kinds of the next `number` kills: all in turn, in random order.

        generate_targets begins with a device server, which lives for a few seconds alone.
        """
        has_server = step == "generate_targets"
        turn = [*_TURN, DEVICE_SERVER] if has_server else _TURN
        drawn: list[str] = [DEVICE_SERVER] if has_server else []
        while len(drawn) < number:
            if not self._turn:
                self._turn = self._random.sample(turn, len(turn))
            drawn.append(self._turn.pop())
        return drawn

    def delay_s(self, step: str) -> float:
        """Draw the wait before the next kill."""
        return self._random.uniform(0, self._spread_s.get(step, _SPREAD_S))

    def hasten(self, step: str) -> None:
        """Shorten the later waits in this step."""
        self._spread_s[step] = 0.7 * self._spread_s.get(step, _SPREAD_S)

    def kill(self, kind: str, processes: Processes, program: str) -> bool:
        """Send SIGKILL to one process of `kind`; return whether there was one."""
        if kind == "driver":
            victims = [each for each, command in processes.items() if is_driver(command, program)]
        else:
            victims = _of_kind(kind, processes)
        return bool(victims) and _send(self._random.choice(victims), signal.SIGKILL)

    def pause(self, processes: Processes) -> bool:
        """Stop a Python worker for up to 2.5 s at every second call; return whether we did."""
        victims = [each for each in _of_kind("python", processes) if each not in self._paused]
        if not victims or self._random.random() < 0.5:
            return False
        victim = self._random.choice(victims)
        self._paused[victim] = time.monotonic() + self._random.uniform(0.5, _MAX_PAUSE_S)
        return _send(victim, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the workers whose pause is over."""
        for each in [each for each, until in self._paused.items() if until < time.monotonic()]:
            _send(each, signal.SIGCONT)
            del self._paused[each]


def is_driver(command: str, program: str) -> bool:
    """Return whether this is the JVM of spark-submit, or the Python program that it runs."""
    if "launcher.Main" in command or program not in command:
        return False
    return "deploy.SparkSubmit" in command or command.partition(" ")[0].endswith("python")


def _of_kind(kind: str, processes: Processes) -> list[int]:
    return [
        each for each, command in processes.items() if any(sign in command for sign in _SIGNS[kind])
    ]


def _send(process_id: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process_id, number)
        return True
    return False
