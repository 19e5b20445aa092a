"""Predict the speed-up of many ranks; recommend HTM's settings (000 4).

megahour scaling --ranks 1..128 --between-gbps 25 --parameters 24e6
"""

import argparse
import json
import sys
from dataclasses import asdict

from infra.settings import ConfigurationError
from jobs.cli.arguments import Parser
from jobs.cli.command_line import fail
from jobs.planning.scaling import choose_calibration, format_scaling, parse_ranks, scale
from training.cost_model.step_time import CostModel, Workload

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
    _add_training(found.add_argument_group("training"))
    _add_network(found.add_argument_group("network"))
    _add_calibration(found.add_argument_group("calibration"))
    add("--json", action="store_true", help="print one JSON object")
    return found


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "size of the model, default 24e6"
    add("--parameters", type=float, default=24e6, metavar="N", help=text)
    text = "minibatch of one rank, default 2048"
    add("--minibatch-frames", type=int, default=2048, metavar="N", help=text)
    add("--frames-per-second", type=float, metavar="N", help="speed of one rank alone")
    text = "share of elements that GTC sends a step, default 0.001"
    add("--density", type=float, default=1e-3, help=text)
    add("--block-size", type=int, metavar="N", help="steps a block; default: as recommended")
    add("--group-size", type=int, metavar="N", help="ranks a group; default: as recommended")


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ranks-per-host", type=int, metavar="N", help="ranks that share a host and its link")
    add("--within-gbps", type=float, metavar="GBPS", help="link within a host, a rank's own")
    add("--between-gbps", type=float, metavar="GBPS", help="a host's link to other hosts")
    add("--connection-gbps", type=float, metavar="GBPS", help="most that one connection gets of it")
    for exchange, what in (("all-gather", "GTC's messages"), ("all-reduce", "models, gradients")):
        add(f"--{exchange}", choices=("ring", "direct"), help=f"how ranks exchange {what}")


def _add_calibration(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "TOML or JSON, or a name in jobs/calibrations; default scaling_v100"
    add("--calibration", default="scaling_v100", metavar="FILE", help=text)
    add("--calibrate", metavar="FILE", help="measure a rank of this machine, and store all as JSON")
    text = "recipe of the student that --calibrate times, default hours_1m"
    add("--recipe", default="hours_1m", help=text)
    text = "time the link between the two ranks of torchrun"
    add("--measure-link", action="store_true", help=text)


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
    workload = Workload(
        num_parameters=round(arguments.parameters),
        minibatch_frames=arguments.minibatch_frames,
        density=arguments.density,
    )
    model = CostModel(workload, choose_calibration(arguments, workload))
    scaling = scale(model, ranks, arguments.group_size, arguments.block_size)
    print(json.dumps(scaling.to_json()) if arguments.json else format_scaling(scaling))


if __name__ == "__main__":
    main()
