"""Simulate the tasks of many hosts that read from a store which throttles each prefix.

python -m tests.benchmarks.throttling [--hosts 40] [--tasks 16] [--in-flight 64]

A discrete-event simulation on virtual time of the store's own code: `infra/store/s3_limits.py`
and `Attempts` of `infra/store/retry.py`, with their constants. The peer is backoff alone, where a
throttled answer is one of ten attempts. Each prefix has a token bucket and answers 503 beyond it.
"""

import argparse
import heapq
import random
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from infra.store.retry import LIMIT_S, MAX_ATTEMPTS, Attempts
from infra.store.s3_limits import UNLIMITED, RequestRate, after_answer, take_turn

PREFIX_PER_S = 5500.0
BURST_S = 0.01
LATENCY_S = (0.02, 0.06)
START_S = 0.5  # tasks do not begin at the same moment
PEERS_PREFIXES, PEERS_OBJECTS = 16, 4000  # a file of five hours holds 2,000 to 6,000 utterances


@dataclass(frozen=True)
class Setting:
    """Setting holds the sizes of one simulation."""

    num_hosts: int
    tasks_per_host: int
    in_flight: int
    objects_per_task: int
    num_prefixes: int
    is_adaptive: bool
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    """Outcome holds what became of the tasks, and the shares of the store's rate that they got.

    `share` is until the first task has sent its last request, `overall_share` until the last ends.
    """

    num_tasks: int
    num_failed: int
    share: float
    overall_share: float
    throttled_share: float
    seconds: float


@dataclass(slots=True)
class Task:
    """Task reads its objects, some at a time; `lines` are of requests that wait for a turn."""

    host: int
    remaining: int
    in_flight: int = 0
    failed: bool = False
    lines: dict[int, deque["Operation"]] = field(default_factory=dict)


@dataclass(slots=True)
class Operation:
    """Operation is the reading of one object."""

    task: Task
    prefix: int
    begun_s: float
    attempts: Attempts = field(default_factory=lambda: Attempts(MAX_ATTEMPTS, LIMIT_S))
    sent_s: float = 0.0


class Simulation:
    """Simulation keeps the virtual clock, the store's token buckets and each host's rates."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = random.Random(setting.seed)
        self.events: list[tuple[float, int, str, Operation, bool]] = []
        self.num_events = 0
        self.now_s = 0.0
        self.tokens = [PREFIX_PER_S * BURST_S] * setting.num_prefixes
        self.filled_s = [0.0] * setting.num_prefixes
        self.rates: dict[tuple[int, int], RequestRate] = {}
        self.num_served = self.num_throttled = 0
        self.first_ended: tuple[float, int] | None = None
        self.tasks = [
            Task(host, setting.objects_per_task)
            for host in range(setting.num_hosts)
            for _ in range(setting.tasks_per_host)
        ]

    def run(self) -> Outcome:
        """Run until every task has ended."""
        for task in self.tasks:
            starts_s = self.random.uniform(0.0, START_S)
            for _ in range(self.setting.in_flight):
                self.schedule(starts_s, "begin", Operation(task, 0, starts_s))
        while self.events:
            self.now_s, _, kind, operation, is_throttled = heapq.heappop(self.events)
            if kind == "answer":
                self.answer(operation, is_throttled)
            elif kind == "turn":
                self.send(operation)
                self.leave_line(operation)
            elif kind == "begin":
                self.begin(operation.task)
            else:
                self.ask(operation)
        full = PREFIX_PER_S * self.setting.num_prefixes
        first_s, first_served = self.first_ended or (self.now_s, self.num_served)
        return Outcome(
            num_tasks=len(self.tasks),
            num_failed=sum(task.failed for task in self.tasks),
            share=first_served / (first_s * full),
            overall_share=self.num_served / (self.now_s * full),
            throttled_share=self.num_throttled / (self.num_throttled + self.num_served),
            seconds=self.now_s,
        )

    def begin(self, task: Task) -> None:
        """Let a task begin with its next object."""
        if task.failed:
            return
        if task.remaining == 0:
            self.first_ended = self.first_ended or (self.now_s, self.num_served)
            return
        task.remaining -= 1
        prefix = self.random.randrange(self.setting.num_prefixes)
        self.ask(Operation(task, prefix, self.now_s))

    def ask(self, operation: Operation) -> None:
        """Send the request, or put it into its process's line for the prefix."""
        task, prefix = operation.task, operation.prefix
        if task.failed:
            return
        if not self.rates.get((task.host, prefix), UNLIMITED).is_limited:
            self.send(operation)
            return
        line = task.lines.setdefault(prefix, deque())
        line.append(operation)
        if len(line) == 1:
            self.take_turn(operation)

    def take_turn(self, operation: Operation) -> None:
        """Take the host's next turn for the first in line."""
        key = (operation.task.host, operation.prefix)
        self.rates[key], turn_s = take_turn(self.rates[key], self.now_s)
        self.schedule(turn_s, "turn", operation)

    def leave_line(self, operation: Operation) -> None:
        """Let the next in line take its turn."""
        line = operation.task.lines[operation.prefix]
        line.popleft()
        if operation.task.failed:
            line.clear()
        elif line:
            self.take_turn(line[0])

    def send(self, operation: Operation) -> None:
        """Let the store serve or throttle the request."""
        prefix, operation.sent_s = operation.prefix, self.now_s
        elapsed_s = self.now_s - self.filled_s[prefix]
        tokens = self.tokens[prefix] + elapsed_s * PREFIX_PER_S
        tokens = min(tokens, PREFIX_PER_S * BURST_S)
        is_throttled = tokens < 1.0
        self.tokens[prefix] = tokens if is_throttled else tokens - 1.0
        self.filled_s[prefix] = self.now_s
        latency_s = self.random.uniform(*LATENCY_S)
        self.schedule(self.now_s + latency_s, "answer", operation, is_throttled)

    def answer(self, operation: Operation, is_throttled: bool) -> None:
        """Take in an answer: begin with the next object, ask again, or fail the task."""
        task, key = operation.task, (operation.task.host, operation.prefix)
        self.num_throttled += is_throttled
        self.num_served += not is_throttled
        if self.setting.is_adaptive:
            rate = self.rates.get(key, UNLIMITED)
            if rate.is_limited or is_throttled:
                self.rates[key] = after_answer(rate, self.now_s, operation.sent_s, is_throttled)
        if not is_throttled:
            self.begin(task)
            return
        attempts, chance = operation.attempts, self.random.random()
        if self.setting.is_adaptive:
            elapsed_s = self.now_s - operation.begun_s
            unserved_s = min(elapsed_s, self.now_s - self.rates[key].served_s)
            wait_s = attempts.after_throttling(elapsed_s, unserved_s, chance)
        else:
            wait_s = attempts.after_failure(self.now_s - operation.sent_s, chance)
        if wait_s is None:
            task.failed = True
            self.first_ended = self.first_ended or (self.now_s, self.num_served)
        else:
            self.schedule(self.now_s + wait_s, "ask", operation)

    def schedule(
        self, time_s: float, kind: str, operation: Operation, is_throttled: bool = False
    ) -> None:
        """Let an event happen at a time; events of one time in the order of this call."""
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, kind, operation, is_throttled))


def main() -> None:
    """Simulate backoff alone and the shared rate, for each number of prefixes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=16, help="of each host")
    parser.add_argument("--in-flight", type=int, default=64, help="GETs of each task")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = parser.parse_args()
    sizes = arguments.hosts, arguments.tasks, arguments.in_flight
    settings = [
        Setting(*sizes, 400 + 25 * prefixes, prefixes, is_adaptive=True)
        for prefixes in arguments.prefixes
    ]
    if PEERS_PREFIXES in arguments.prefixes:
        settings.append(Setting(*sizes, PEERS_OBJECTS, PEERS_PREFIXES, is_adaptive=False))
    with ProcessPoolExecutor() as pool:
        # The longest begins: each simulation is one process's.
        outcomes = list(pool.map(simulate, reversed(settings)))[::-1]
    for setting, outcome in zip(settings, outcomes, strict=True):
        print(show(setting, outcome))


def simulate(setting: Setting) -> Outcome:
    """Run one simulation."""
    return Simulation(setting).run()


def show(setting: Setting, outcome: Outcome) -> str:
    """Lay out what became of the tasks."""
    name = "shared rate" if setting.is_adaptive else "backoff alone"
    return (
        f"{setting.num_prefixes:3} prefixes, {name:13}: {outcome.num_failed:3} of "
        f"{outcome.num_tasks} tasks failed, {outcome.share:6.1%} of the store's rate "
        f"({outcome.overall_share:.1%} to the end, {outcome.seconds:.1f} s), "
        f"{outcome.throttled_share:.1%} of the answers throttled"
    )


if __name__ == "__main__":
    main()
