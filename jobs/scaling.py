"""Predict the speed-up of many ranks; recommend HTM's settings (000 4).

megahour scaling --ranks 1..128 --between-gbps 25 --parameters 24e6
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from typing import Any

from infra.settings import ConfigurationError, read_file, read_record, read_toml
from jobs.cli.arguments import Parser, recipe_path
from jobs.cli.command_line import fail
from jobs.plan import LINE_WIDTH, aligned, count, size
from jobs.planning.calibration import CALIBRATIONS, json_object
from training.cost_model.step_time import CostModel, ScalingCalibration, ScalingWorkload
from training.cost_model.trainer_choice import (
    ANY_RANKS,
    HTM_GROUP_SIZE,
    MEASURED_BLOCKS,
    UNMEASURED,
    Choice,
    Recommendation,
    TrainerChoice,
    choose_trainer,
    recommend,
)
from training.settings.recipe import read_recipe

EPILOG = """\
synchronous sums all gradients; gtc sends the elements that reach a threshold; bmuf averages the
models of the ranks at the end of a block; htm is gtc within groups and bmuf between them. one_bit
sends a bit for each element of the gradients. d_psgd, rand_psgd, d1d_psgd and ad_psgd average
models beside each step: on a ring, on a drawn ring, of all ranks, of pairs. sparse_loco sends the
largest changes of a block, and so does bmuf by host with block_exchange = top_k. Links and speeds
that you do not give come from the calibration: scaling_v100 (8 V100s a host, paper 000),
scaling_k80 (16 K80s a host, paper 003), both in jobs/calibrations, or your own file.

The papers sent messages directly and models round a ring. megahour, over gloo or NCCL, sends both
round a ring: --all-gather ring --all-reduce ring.

To calibrate for your machines, run --calibrate FILE on one of them: it times a training step and
the work on GTC's messages. On two of them, time the link between them with
  torchrun --nnodes 2 --nproc-per-node 1 ... -m jobs.scaling --measure-link
The time that ranks wait for each other and the cost of many connections remain those of the papers
until you correct [fitted] in the file.

Exit codes: 0 done, 1 failed, 2 bad usage.
"""


def parser() -> Parser:
    """Return a parser of the arguments of the cost model, grouped by what they describe."""
    found = Parser(
        prog="megahour scaling",
        description="Print the speed-up of each trainer against the number of ranks, for your\n"
        "link, model and block size, and recommend HTM's group size and block size.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--ranks", default="1..128", help="1..128 (default) doubles; or a list: 16,32,128")
    add("--json", action="store_true", help="print one JSON object")
    add = found.add_argument_group("training").add_argument
    text = "size of the model, default 24e6"
    add("--parameters", type=float, default=24e6, metavar="N", help=text)
    text = "minibatch of one rank, default 2048"
    add("--minibatch-frames", type=int, default=2048, metavar="N", help=text)
    add("--frames-per-second", type=float, metavar="N", help="speed of one rank alone")
    text = "share of elements that GTC sends a step, default 0.001"
    add("--density", type=float, default=1e-3, help=text)
    add("--block-size", type=int, metavar="N", help="steps a block; default: as recommended")
    add("--group-size", type=int, metavar="N", help="ranks a group; default: as recommended")
    add = found.add_argument_group("network").add_argument
    add("--ranks-per-host", type=int, metavar="N", help="ranks that share a host and its link")
    add("--within-gbps", type=float, metavar="GBPS", help="link within a host, a rank's own")
    add("--between-gbps", type=float, metavar="GBPS", help="a host's link to other hosts")
    add("--connection-gbps", type=float, metavar="GBPS", help="most that one connection gets of it")
    for exchange, what in (("all-gather", "GTC's messages"), ("all-reduce", "models, gradients")):
        add(f"--{exchange}", choices=("ring", "direct"), help=f"how ranks exchange {what}")
    add = found.add_argument_group("calibration").add_argument
    text = "TOML or JSON, or a name in jobs/calibrations; default scaling_v100"
    add("--calibration", default="scaling_v100", metavar="FILE", help=text)
    add("--calibrate", metavar="FILE", help="measure a rank of this machine, and store all as JSON")
    text = "recipe of the student that --calibrate times, default hours_1m"
    add("--recipe", default="hours_1m", help=text)
    text = "time the link between the two ranks of torchrun"
    add("--measure-link", action="store_true", help=text)
    return found


def main() -> None:
    """Parse the command line, predict, print; exit with 0, 1 or 2."""
    arguments = parser().parse_args()
    try:
        if arguments.measure_link:
            link_and_print(arguments.json)
        else:
            scale_and_print(arguments)
    except (ConfigurationError, ValueError, OverflowError) as error:
        sys.exit(fail("scaling", error, 2))
    except OSError as error:
        sys.exit(fail("scaling", error, 1))


def link_and_print(as_json: bool) -> None:
    """Time the link between the two ranks that torchrun started; rank 0 prints."""
    # Predictions need no torch.
    from training.cost_model.measured_rates import measure_link  # noqa: PLC0415
    from training.distributed import process_group  # noqa: PLC0415

    try:
        with process_group.open_world(time_limit_s=120.0) as group:
            rates = measure_link(group)
            if not process_group.is_leader():
                return
    except process_group.CollectiveError as error:
        sys.exit(fail("scaling", error, 1))
    print(
        json.dumps(asdict(rates))
        if as_json
        else f"{rates.gbps:.3g} Gbps a connection, {rates.latency_us:.3g} us an exchange: give "
        "them as --connection-gbps, and in a calibration's [network] as latency"
    )


def scale_and_print(arguments: argparse.Namespace) -> None:
    """Read or measure the calibration, predict, print."""
    ranks = parse_ranks(arguments.ranks)
    for name in ("group_size", "block_size"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ValueError(f"{name} = {given}: need at least 1")
    workload = ScalingWorkload(
        num_parameters=round(arguments.parameters),
        minibatch_frames=arguments.minibatch_frames,
        density=arguments.density,
    )
    model = CostModel(workload, choose_calibration(arguments, workload))
    scaling = scale(model, ranks, arguments.group_size, arguments.block_size)
    print(json.dumps(scaling.to_json()) if arguments.json else format_scaling(scaling))


MAX_RANKS = 1 << 16
NETWORK_OPTIONS = (
    "ranks_per_host",
    "within_gbps",
    "between_gbps",
    "connection_gbps",
    "all_gather",
    "all_reduce",
)


def choose_calibration(
    arguments: argparse.Namespace, workload: ScalingWorkload
) -> ScalingCalibration:
    """Read a calibration, or measure and store one, and replace what the options give."""
    calibration = read_scaling(arguments.calibration)
    if arguments.calibrate:
        from jobs.planning.measurement import measure_rank  # noqa: PLC0415 - torch

        print("scaling: calibrating on this machine", file=sys.stderr)
        recipe = read_recipe(recipe_path(arguments.recipe))
        calibration = measure_rank(calibration, recipe, workload.density)
    given = {name: getattr(arguments, name) for name in NETWORK_OPTIONS}
    network = replace(
        calibration.network, **{name: each for name, each in given.items() if each is not None}
    )
    calibration = replace(calibration, network=network)
    if arguments.frames_per_second is not None:
        rank = replace(
            calibration.rank,
            frames_per_s=arguments.frames_per_second,
            num_parameters=workload.num_parameters,
        )
        calibration = replace(calibration, rank=rank)
    if arguments.calibrate:
        text = json.dumps(asdict(calibration), indent=1) + "\n"
        Path(arguments.calibrate).write_text(text, encoding="utf-8")
    return calibration


def read_scaling(calibration: str) -> ScalingCalibration:
    """Read a calibration: a file, or one of jobs/calibrations by name."""
    ours = CALIBRATIONS / f"{calibration}.toml"
    path: str | Traversable = ours if ours.is_file() else calibration
    is_json = calibration.endswith(".json")
    table = json_object(read_file(calibration), calibration) if is_json else read_toml(path)
    return read_record(ScalingCalibration, table, calibration)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks, ascending: "1..128" doubles from 1 to 128, "16,24" is a list."""
    first, dots, last = text.partition("..")
    try:
        found = [int(each) for each in ((first, last) if dots else text.split(","))]
    except ValueError as error:
        raise ValueError(f"ranks = {text}: need FIRST..LAST, or numbers with commas") from error
    if not 1 <= min(found) <= max(found) <= MAX_RANKS or (dots and found[0] > found[1]):
        raise ValueError(f"ranks = {text}: need numbers from 1 to {MAX_RANKS}, ascending")
    if dots:
        doubled = (found[0] << power for power in range(MAX_RANKS.bit_length()))
        found = [*(each for each in doubled if each < found[1]), found[1]]
    return tuple(sorted(set(found)))


TRAINERS = ("synchronous", "gtc", "bmuf", "htm")

HOLD_OUT = (
    "How far off: fitted on paper 000's speed-ups of 16 to 64 V100s (within 13 %), the model says "
    "for its 128: BMUF 103.6 (published 101.5), HTM 103.3 (97.8), GTC 14.8 (10.9). It finds small "
    "blocks too cheap: at blocks of 25 BMUF 101.8 (91.3), HTM 101.7 (77.9). No paper has figures "
    "of synchronous."
)
ACCURACY = (
    "Not in these figures: accuracy. Paper 000 at 128 ranks, relative WER reduction in %: BMUF "
    "-8.1, -9.6, -13.7, -16.6 and HTM -4.4, -4.7, -6.4, -7.5 at blocks of 25, 50, 100, 200 (Table "
    "2); groups of 1, 2, 4, 8 at blocks of 25 -8.1, -7.9, -5.8, -4.4 (Table 3); GTC -15.6 (Table "
    "1). To convergence, blocks of 25 were the fastest of both."
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling holds speed-ups by number of ranks and trainer, the settings, a recommendation."""

    model: CostModel
    group_size: int
    block_size: int
    rows: dict[int, dict[str, float | None]]
    recommendation: Recommendation
    choice: TrainerChoice
    one_bit_ranks: float

    def to_json(self) -> dict[str, Any]:
        """Convert the rows, the settings and the recommendation to plain values."""
        return {
            "workload": asdict(self.model.workload),
            "calibration": asdict(self.model.calibration),
            "computing_seconds": self.model.computing_seconds,
            "group_size": self.group_size,
            "block_size": self.block_size,
            "speed_ups": [{"ranks": num_ranks, **row} for num_ranks, row in self.rows.items()],
            "recommendation": asdict(self.recommendation),
            "choice": {
                "trainer": self.choice.chosen.trainer,
                "settings": dict(self.choice.chosen.settings),
                "candidates": [
                    {**asdict(each), "reason": self.choice.reason(each)}
                    for each in self.choice.candidates
                ],
                "unmeasured": dict(self.choice.unmeasured),
            },
            "one_bit_ranks": self.one_bit_ranks if isfinite(self.one_bit_ranks) else None,
        }


def scale(
    model: CostModel, ranks: Sequence[int], group_size: int | None, block_size: int | None
) -> Scaling:
    """Predict speed-ups on each number of `ranks`; settings that are None are as recommended."""
    recommendation = recommend(model, max(ranks))
    chosen = recommendation.chosen
    group_size, block_size = group_size or chosen.group_size, block_size or chosen.block_size
    rows = {each: _speed_ups(model, each, group_size, block_size) for each in ranks}
    choice = choose_trainer(model, max(ranks))
    frames = max(ranks) * model.workload.minibatch_frames
    hidden = model.one_bit_costs(max(ranks)).optimal_num_ranks(frames)
    return Scaling(model, group_size, block_size, rows, recommendation, choice, hidden)


def _speed_ups(
    model: CostModel, num_ranks: int, group_size: int, block_size: int
) -> dict[str, float | None]:
    """Return each trainer's speed-up on so many ranks; None if they make no equal groups."""
    group_size = min(group_size, num_ranks)
    seconds = {
        "synchronous": model.synchronous(num_ranks),
        "gtc": model.gtc(num_ranks),
        "bmuf": model.bmuf(num_ranks, block_size),
    }
    if num_ranks % group_size == 0:
        seconds["htm"] = model.htm(num_ranks, group_size, block_size)
    speed_ups = {name: model.speed_up(num_ranks, each) for name, each in seconds.items()}
    return {name: speed_ups.get(name) for name in TRAINERS}


def format_scaling(scaling: Scaling) -> str:
    """Format rows and recommendation in lines of at most 100 columns."""
    ranks_per_host = scaling.model.calibration.network.ranks_per_host
    cells = [
        [str(num_ranks), str(-(-num_ranks // ranks_per_host))]
        + ["-" if found is None else f"{found:.1f}" for found in row.values()]
        for num_ranks, row in scaling.rows.items()
    ]
    table = aligned([["ranks", "hosts", *TRAINERS], *cells], left=())
    calibration, workload = scaling.model.calibration, scaling.model.workload
    rank, network, fitted = calibration.rank, calibration.network, calibration.fitted
    title = (
        f"Frames a second, relative to one rank: {workload.num_parameters:,} parameters, "
        f"{workload.minibatch_frames:,} frames a minibatch, "
        f"{1e3 * scaling.model.computing_seconds:,.0f} ms a step; {network.ranks_per_host} ranks a "
        f"host, {network.within_gbps:g} Gbps within, {network.between_gbps:g} Gbps between; GTC "
        f"messages of {size(workload.message_bytes)}; blocks of {scaling.block_size} steps, HTM in "
        f"groups of {scaling.group_size}"
    )
    grounds = [
        *_recommended(scaling),
        f"Calibration: {calibration.source}. A step's work on messages: "
        f"{count(rank.encoded_elements_per_s)} elements/s encoded, "
        f"{count(rank.decoded_words_per_s)} words/s decoded, density {workload.density:g}. "
        f"Exchange of messages: {network.all_gather}, of models: {network.all_reduce}; "
        f"{network.connection_gbps:g} Gbps a connection.",
        f"Fitted: ranks wait for the slowest of them for {100 * fitted.waiting:.2g} % of a step, "
        "each time their number doubles; each further connection at once makes a host's link "
        f"{100 * fitted.congestion:.2g} % slower.",
        HOLD_OUT,
        ACCURACY,
    ]
    filled = (textwrap.fill(line, LINE_WIDTH, subsequent_indent="  ") for line in grounds)
    shown = textwrap.fill(title, LINE_WIDTH)
    return "\n\n".join([shown, table, _choice(scaling), "\n".join(filled)])


def _choice(scaling: Scaling) -> str:
    """Lay out all trainers on the most ranks, the fastest first, with the reason for each."""
    choice, num_ranks = scaling.choice, max(scaling.rows)
    cells = [
        [
            each.trainer + (f", groups of {each.group_size}" if each.group_size > 1 else ""),
            str(each.settings.get("block_size", "-")),
            f"{each.speed_up:.1f}",
            f"{each.accuracy:+.1f}",
            "any" if each.measured_ranks == ANY_RANKS else f"{each.measured_ranks}",
            choice.reason(each),
        ]
        for each in choice.candidates
    ]
    unmeasured = sorted(choice.unmeasured.items(), key=lambda each: -each[1])
    cells += [[name, "-", f"{each:.1f}", "", "", UNMEASURED[name]] for name, each in unmeasured]
    head = ["trainer", "block", "speed-up", "accuracy", "on ranks", ""]
    title = (
        f"Which trainer, on {num_ranks} ranks: {choice.chosen.name}. Accuracy is percent of one "
        "rank's frame accuracy, measured on simulated ranks with the frames and passes of one rank "
        "(on ranks). Only block sizes, groups and numbers of ranks that were measured are proposed."
    )
    return textwrap.fill(title, LINE_WIDTH) + "\n\n" + aligned([head, *cells], left=(0, 5))


def _recommended(scaling: Scaling) -> list[str]:
    chosen, fastest = scaling.recommendation.chosen, scaling.recommendation.fastest
    num_ranks = max(scaling.rows)
    share = chosen.speed_up / fastest.speed_up
    lines = [
        f"Recommended for {num_ranks} ranks: {_settings(chosen, num_ranks)}: "
        f"{chosen.speed_up:.1f} times one rank, {100 * share:.0f} % of the fastest choice "
        f"({_settings(fastest, num_ranks)}: {fastest.speed_up:.1f}).",
        "Why: of the choices that keep 90 % of the fastest one's speed, the largest group within a "
        "host, as fewer models are averaged; then the smallest block, as they are averaged sooner.",
        *_unmeasured_settings(chosen, num_ranks),
    ]
    best = max(scaling.rows, key=lambda each: scaling.rows[each]["gtc"] or 0.0)
    if best < num_ranks:
        lines.append(f"GTC alone is fastest on {best} of these ranks.")
    hidden, frames = scaling.one_bit_ranks, num_ranks * scaling.model.workload.minibatch_frames
    ranks = f"up to {hidden:,.0f} ranks" if isfinite(hidden) else "any number of ranks"
    lines.append(
        f"1-bit SGD with double buffering hides its exchanges on {ranks} that share a minibatch of "
        f"{frames:,} frames (004 eq. (4))."
    )
    return lines


def _unmeasured_settings(choice: Choice, num_ranks: int) -> list[str]:
    """Say so where the recommendation is of blocks or groups without a measured accuracy."""
    if choice.group_size == num_ranks:
        return []
    trainer = "bmuf" if choice.group_size == 1 else "htm"
    measured = MEASURED_BLOCKS[trainer]
    is_of_groups = choice.group_size in (1, HTM_GROUP_SIZE)
    most = max(measured[choice.block_size]) if choice.block_size in measured else 0
    if is_of_groups and num_ranks <= most:
        return []
    groups = f" in groups of {HTM_GROUP_SIZE}" if trainer == "htm" else ""
    blocks = ", ".join(map(str, measured))
    return [
        f"Its accuracy is not measured: {trainer}'s is known{groups} at blocks of {blocks}, on up "
        f"to {max(max(each) for each in measured.values())} ranks. The choice above is."
    ]


def _settings(choice: Choice, num_ranks: int) -> str:
    if choice.group_size == num_ranks:
        return "gtc on all of them"
    name = "bmuf" if choice.group_size == 1 else f"htm, group_size = {choice.group_size}"
    return f"{name}, block_size = {choice.block_size}"


if __name__ == "__main__":
    main()
