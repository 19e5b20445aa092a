"""Compare methods of distributed training on a slow link: seconds and bytes to one loss.

python -m tests.benchmarks.slow_link [--json] [--hosts 2] [--ranks 4] [--between 20 5] [--seeds 3]

Needs root: hosts are network namespaces of this machine, whose cards are limited to each of
--between Mbit/s. Within a host each rank has 12 times that. Each method first tries its grid of
settings, on an unlimited link and another seed, and takes those of the least time on each slow one.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from tests.benchmarks.slow_link.contestants import CONTESTANTS
from tests.benchmarks.slow_link.hosts import NoHostsError, Rates, running_hosts
from tests.benchmarks.slow_link.method import Settings
from tests.benchmarks.slow_link.race import RaceError, run_race
from tests.benchmarks.slow_link.rank import Heat, Point
from tests.benchmarks.slow_link.report import Standing, expected_s, table

TARGET_LOSS = 1.2
NUM_FRAMES = 16  # a rank's minibatch
MAX_STEPS = 500
EVALUATE_EVERY = 10  # steps; methods with blocks are evaluated at their ends
CHOOSING_SEED = 0
WITHIN_TO_BETWEEN = 12  # the paper's 300 to 25 Gbit/s
RACE_LIMIT_S = 3600


def heat(method: str, settings: Settings, seed: int) -> Heat:
    """Describe one training to the target."""
    evaluate_every = settings.block_size if settings.block_size > 1 else EVALUATE_EVERY
    return Heat(method, settings, seed, TARGET_LOSS, NUM_FRAMES, evaluate_every, MAX_STEPS)


def limits(between_mbit: float, num_ranks: int) -> Rates:
    """Return the hosts' rates; a host's ranks share its card, but not their local links."""
    return Rates(between_mbit, WITHIN_TO_BETWEEN * between_mbit * num_ranks)


def try_grid(method: str, arguments: argparse.Namespace) -> list[Point]:
    """Return where each of the method's settings ends on an unlimited link."""
    grid = CONTESTANTS[method].grid
    heats = [heat(method, settings, CHOOSING_SEED) for settings in grid]
    with running_hosts(arguments.hosts, None) as hosts:
        ends = [points[-1] for points in run_race(hosts, arguments.ranks, heats, RACE_LIMIT_S)]
    for settings, end in zip(grid, ends, strict=True):
        print(f"{method}: {settings}: {end}", file=sys.stderr)
    return ends


def choose(method: str, ends: Sequence[Point], rates: Rates, num_hosts: int) -> Settings:
    """Return the settings whose trial would have ended first at these rates."""
    order = [expected_s(end, TARGET_LOSS, num_hosts, rates) for end in ends]
    return CONTESTANTS[method].grid[order.index(min(order))]


def measure(
    chosen: Mapping[str, Settings], rates: Rates, arguments: argparse.Namespace
) -> list[Standing]:
    """Train on the slow link, each method with each seed, the methods in turn."""
    ends: dict[str, list[Point]] = {method: [] for method in chosen}
    for seed in range(CHOOSING_SEED + 1, CHOOSING_SEED + 1 + arguments.seeds):
        for method, settings in chosen.items():
            heats = [heat(method, settings, seed)]
            with running_hosts(arguments.hosts, rates) as hosts:
                [points] = run_race(hosts, arguments.ranks, heats, RACE_LIMIT_S)
            ends[method].append(points[-1])
            rate = f"{rates.between_mbit:g} Mbit/s"
            print(f"{rate}: {method}: seed {seed}: {points[-1]}", file=sys.stderr)
    return [Standing(method, chosen[method], ends[method], TARGET_LOSS) for method in chosen]


def methods_here() -> list[str]:
    """List all methods but those whose package is not installed."""
    with_torchft = find_spec("torchft") is not None
    return [method for method in CONTESTANTS if with_torchft or "torchft" not in method]


def show(standings: Sequence[Standing], rates: Rates, arguments: argparse.Namespace) -> None:
    """Print the table of one rate, or a JSON object in a line."""
    title = (
        f"{arguments.hosts} hosts of {arguments.ranks} ranks, {rates.between_mbit:g} Mbit/s "
        f"between, {rates.within_mbit:g} within: to a validation loss of {TARGET_LOSS}"
    )
    if arguments.json:
        print(json.dumps({"title": title, "standings": [asdict(each) for each in standings]}))
        return
    print(f"{title}\n\n{table(standings)}", flush=True)
    missing = set(CONTESTANTS) - {each.method for each in standings}
    if missing:
        print(f"\nNot run: {'; '.join(sorted(missing))}")


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.slow_link", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument(
        "--between", type=float, nargs="+", default=[20], help="Mbit/s of a host's card, in turn"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=CONTESTANTS, default=methods_here(), metavar="METHOD"
    )
    return parser.parse_args()


def main() -> int:
    """Choose, measure and report; return 2 where this machine cannot make hosts."""
    arguments = read_arguments()
    try:
        ends = {method: try_grid(method, arguments) for method in arguments.only}
        for between_mbit in arguments.between:
            rates = limits(between_mbit, arguments.ranks)
            chosen = {
                method: choose(method, ends[method], rates, arguments.hosts)
                for method in arguments.only
            }
            show(measure(chosen, rates, arguments), rates, arguments)
    except NoHostsError as error:
        print(error, file=sys.stderr)
        return 2
    except RaceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
