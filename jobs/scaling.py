"""Predict the speed-up of many ranks; recommend a trainer.

megahour scaling --ranks 1..128 --between-gbps 25 --parameters 24e6
"""

import argparse
import json
import sys
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from math import gcd, isfinite
from pathlib import Path
from typing import Any

from infra.settings import Range, read_record
from infra.torchrun import launched_rank
from jobs.cli.arguments import Parser, number_in, recipe_path
from jobs.cli.command_line import ending
from jobs.plan import LINE_WIDTH, aligned, count, size
from jobs.planning.calibration import read_tables
from training.cost_model.step_time import CostModel, Network, ScalingCalibration, ScalingWorkload
from training.cost_model.trainer_choice import (
    KEPT_ACCURACY,
    SIMULATED,
    Accuracy,
    Candidate,
    Recommendation,
    recommend,
)
from training.settings.recipe import read_recipe

MAX_RANKS = 1 << 16

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
        "link, model and block size, and recommend a trainer for the most ranks.",
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
    some = number_in(Range(1, MAX_RANKS), int)
    add("--block-size", type=some, default=50, metavar="N", help="steps a block, default 50")
    text = "ranks a group of HTM; default: 8, or fewer that divide a host's"
    add("--group-size", type=some, metavar="N", help=text)
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
    with ending("scaling"):
        if arguments.measure_link:
            link_and_print(arguments.json)
        else:
            scale_and_print(arguments)


def link_and_print(as_json: bool) -> None:
    """Time the link between the two ranks that torchrun started; rank 0 prints."""
    # Predictions need no torch.
    from training.cost_model.measured_rates import measure_link  # noqa: PLC0415
    from training.distributed import process_group  # noqa: PLC0415

    with process_group.open_world(time_limit_s=120.0) as group:
        rates = measure_link(group)
        if launched_rank() != 0:
            return
    print(
        json.dumps(asdict(rates))
        if as_json
        else f"{rates.gbps:.3g} Gbps a connection, {rates.latency_us:.3g} us an exchange: give "
        "them as --connection-gbps, and in a calibration's [network] as latency"
    )


def scale_and_print(arguments: argparse.Namespace) -> None:
    """Read or measure the calibration, predict, print."""
    ranks = parse_ranks(arguments.ranks)
    workload = ScalingWorkload(
        num_parameters=round(arguments.parameters),
        minibatch_frames=arguments.minibatch_frames,
        density=arguments.density,
    )
    model = CostModel(workload, choose_calibration(arguments, workload))
    groups = arguments.group_size or gcd(8, model.calibration.network.ranks_per_host)
    scaling = Scaling(
        model,
        groups,
        arguments.block_size,
        {each: _speed_ups(model, each, groups, arguments.block_size) for each in ranks},
        {each: recommend(model, each) for each in ranks},
    )
    print(json.dumps(scaling.to_json()) if arguments.json else format_scaling(scaling))


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
    given = {each.name: getattr(arguments, each.name, None) for each in fields(Network)}
    links = {name: value for name, value in given.items() if value is not None}
    calibration = replace(calibration, network=replace(calibration.network, **links))
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
    return read_record(ScalingCalibration, read_tables(calibration), calibration)


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


HOLD_OUT = (
    "How far off: fitted on paper 000's speed-ups of 16 to 64 V100s (within 13 %), the model says "
    "for its 128: BMUF 103.6 (published 101.5), HTM 103.3 (97.8), GTC 14.8 (10.9). It finds small "
    "blocks too cheap: at blocks of 25 BMUF 101.8 (91.3), HTM 101.7 (77.9). No paper has figures "
    "of synchronous."
)
ACCURACY = (
    "Accuracy is percent relative to one rank, on so many ranks (in brackets) and fewer, with at "
    "most as many frames a step. Simulated: frame accuracy; 64 frames a rank, but 320 of all ranks "
    "(one_bit) and 1,280 (decentralized). Printed: relative WER reduction (001: the worse of two "
    "test sets; 004: the worst of three networks), or frame accuracy (003); 2,048 frames a rank "
    "(000; assumed of 003), 8,192 (001) and some 1,024 (004) of all ranks."
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling holds speed-ups by number of ranks and trainer, and a recommendation for each."""

    model: CostModel
    group_size: int
    block_size: int
    rows: dict[int, dict[str, float | None]]
    recommendations: dict[int, Recommendation]

    @property
    def num_ranks(self) -> int:
        """Return the most ranks."""
        return max(self.rows)

    @property
    def one_bit_ranks(self) -> float:
        """Return the ranks on which 1-bit SGD hides its exchanges (004 eq. (4))."""
        frames = self.num_ranks * self.model.workload.minibatch_frames
        return self.model.one_bit_costs(self.num_ranks).optimal_num_ranks(frames)

    def to_json(self) -> dict[str, Any]:
        """Convert the rows, the settings and the recommendation for the most ranks."""
        recommendation = self.recommendations[self.num_ranks]
        return {
            "workload": asdict(self.model.workload),
            "calibration": asdict(self.model.calibration),
            "computing_seconds": self.model.computing_seconds,
            "group_size": self.group_size,
            "block_size": self.block_size,
            "speed_ups": [{"ranks": num_ranks, **row} for num_ranks, row in self.rows.items()],
            "recommended": recommendation.chosen and asdict(recommendation.chosen),
            "candidates": [
                {**asdict(each), "verdict": recommendation.verdict(each)}
                for each in recommendation.candidates
            ],
            "one_bit_ranks": self.one_bit_ranks if isfinite(self.one_bit_ranks) else None,
        }


def _speed_ups(
    model: CostModel, num_ranks: int, group_size: int, block_size: int
) -> dict[str, float | None]:
    """Return each trainer's speed-up on so many ranks; None if they make no equal groups."""
    group_size = min(group_size, num_ranks)
    is_even = num_ranks % group_size == 0
    seconds = {
        "synchronous": model.synchronous(num_ranks),
        "gtc": model.gtc(num_ranks),
        "bmuf": model.bmuf(num_ranks, block_size),
        "htm": model.htm(num_ranks, group_size, block_size) if is_even else None,
    }
    return {name: each and model.speed_up(num_ranks, each) for name, each in seconds.items()}


def format_scaling(scaling: Scaling) -> str:
    """Format rows and recommendation in lines of at most 100 columns."""
    ranks_per_host = scaling.model.calibration.network.ranks_per_host
    cells = [
        [str(num_ranks), str(-(-num_ranks // ranks_per_host))]
        + ["-" if found is None else f"{found:.1f}" for found in row.values()]
        for num_ranks, row in scaling.rows.items()
    ]
    table = aligned([["ranks", "hosts", *scaling.rows[scaling.num_ranks]], *cells], left=())
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
    ranks = scaling.one_bit_ranks
    hidden = f"up to {ranks:,.0f} ranks" if isfinite(ranks) else "any number of ranks"
    grounds = [
        f"1-bit SGD with double buffering hides its exchanges on {hidden} that share a minibatch "
        f"of {scaling.num_ranks * workload.minibatch_frames:,} frames (004 eq. (4)).",
        f"Calibration: {calibration.source}. A step's work on messages: "
        f"{count(rank.encoded_elements_per_s)} elements/s encoded, "
        f"{count(rank.decoded_words_per_s)} words/s decoded, density {workload.density:g}. "
        f"Exchange of messages: {network.all_gather}, of models: {network.all_reduce}; "
        f"{network.connection_gbps:g} Gbps a connection.",
        f"Fitted: ranks wait for the slowest of them for {100 * fitted.waiting:.2g} % of a step, "
        "each time their number doubles; each further connection at once makes a host's link "
        f"{100 * fitted.congestion:.2g} % slower.",
        HOLD_OUT,
    ]
    filled = (textwrap.fill(line, LINE_WIDTH, subsequent_indent="  ") for line in grounds)
    shown = textwrap.fill(title, LINE_WIDTH)
    parts = [shown, table, _candidates(scaling), _recommended(scaling), "\n".join(filled)]
    return "\n\n".join(parts)


def _candidates(scaling: Scaling) -> str:
    """Lay out all trainers on the most ranks, the fastest first, with what is known of each."""
    recommendation = scaling.recommendations[scaling.num_ranks]
    cells = [
        [
            _trainer(each),
            str(each.settings.get("block_size", "-")),
            f"{each.speed_up:.1f}",
            _accuracy(each.simulated),
            _accuracy(each.printed),
            each.unknown,
            recommendation.verdict(each),
        ]
        for each in recommendation.candidates
    ]
    head = ["trainer", "block", "speed-up", "simulated", "printed", "unknown", ""]
    title = f"Trainers on {scaling.num_ranks} ranks. {ACCURACY}"
    return textwrap.fill(title, LINE_WIDTH) + "\n\n" + aligned([head, *cells], left=(0, 6))


def _trainer(candidate: Candidate) -> str:
    group_size = candidate.settings.get("group_size")
    return candidate.trainer + (f", groups of {group_size}" if group_size else "")


def _accuracy(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return ""
    source = "" if accuracy.source == SIMULATED else f"{accuracy.source}: "
    return f"{accuracy.percent:+.1f} ({source}{accuracy.num_ranks})"


def _recommended(scaling: Scaling) -> str:
    """Return the recommendation for the most ranks, and on how many the accuracy is kept."""
    num_ranks, minibatch = scaling.num_ranks, scaling.model.workload.minibatch_frames
    found = {n: each.chosen for n, each in scaling.recommendations.items() if each.chosen}
    kept = {n: each for n, each in found.items() if each.is_accurate}
    within = f"known to stay within {-KEPT_ACCURACY:g} % of one rank's accuracy."
    if num_ranks in kept:
        said = f"{_shown(kept[num_ranks])}, the most accurate of the fastest that are {within}"
    elif num_ranks in found:
        said = f"{_shown(found[num_ranks])}, which loses least: none is {within}"
    else:
        said = f"nothing: no accuracy is known of {num_ranks * minibatch:,} frames a step."
    if kept and num_ranks not in kept:
        said += f" On {max(kept)} ranks one is: {_shown(kept[max(kept)])}."
    said = f"Recommended for {num_ranks} ranks of {minibatch:,} frames: {said}"
    return textwrap.fill(said, LINE_WIDTH, subsequent_indent="  ")


def _shown(candidate: Candidate) -> str:
    return f"{candidate.name}: {candidate.speed_up:.1f} times one rank, {candidate.percent:+.1f} %"


if __name__ == "__main__":
    main()
