"""Say how much faster many ranks train than one, and recommend a group size and a block size.

python -m jobs.scaling --ranks 1..128 --between-gbps 25 --parameters 24e6
"""

import argparse
import json
import sys
from dataclasses import asdict

from infra.configuration import ConfigurationError
from jobs.planning.scaling_options import choose_calibration, parse_ranks
from jobs.planning.scaling_table import format_scaling, scale
from training.cost_model.link import measure_link
from training.cost_model.step_time import CostModel, Workload
from training.distributed import process_group

EPILOG = """\
synchronous sums all gradients; gtc sends those that reach a threshold; bmuf averages the ranks'
models at a block's end; htm is gtc within groups, bmuf between them. Links and speeds that you do
not give are those of the calibration: scaling_v100 (8 V100s a host, paper 000) or scaling_k80 (16
K80s a host, paper 003), both in jobs/calibrations, or a file of yours.

The papers' messages went directly, their models round a ring; megahour's, over gloo or NCCL, are
--all-gather ring --all-reduce ring.

To calibrate for your machines: on one of them, --calibrate FILE times a training step and the work
on GTC's messages; on two, this times the link between them:
  torchrun --nnodes 2 --nproc-per-node 1 ... -m jobs.scaling --measure-link
What ranks wait for each other, and what many connections cost, stay the papers' until you correct
[fitted] in the file.

Exit codes: 0 done, 1 failed, 2 bad usage.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of the cost model."""
    found = argparse.ArgumentParser(
        prog="jobs/scaling.py",
        description="Print the speed-up of each trainer against the number of ranks, for your\n"
        "link, model and block size, and recommend HTM's group size and block size.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--ranks", default="1..128", help="1..128 doubles from 1 to 128; or a list: 16,32,128")
    add("--ranks-per-host", type=int, metavar="N", help="ranks that share a host and its link")
    add("--within-gbps", type=float, metavar="GBPS", help="link within a host, a rank's own")
    add("--between-gbps", type=float, metavar="GBPS", help="a host's link to other hosts")
    add("--connection-gbps", type=float, metavar="GBPS", help="most that one connection gets of it")
    add("--parameters", type=float, default=24e6, metavar="N", help="the model's size (24e6)")
    add("--minibatch-frames", type=int, default=2048, metavar="N", help="of one rank (2048)")
    add("--frames-per-second", type=float, metavar="N", help="one rank alone, on this model")
    add("--density", type=float, default=1e-3, help="share of elements GTC sends a step (0.001)")
    add("--block-size", type=int, metavar="N", help="of the table; default: as recommended")
    add("--group-size", type=int, metavar="N", help="of the table; default: as recommended")
    for exchange, what in (("all-gather", "GTC's messages"), ("all-reduce", "models, gradients")):
        add(f"--{exchange}", choices=("ring", "direct"), help=f"how ranks exchange {what}")
    add(
        "--calibration",
        default="scaling_v100",
        metavar="FILE",
        help="TOML or JSON, or ours by name",
    )
    add("--calibrate", metavar="FILE", help="measure this machine's rank, and keep all as JSON")
    add("--recipe", default="hours_1m", help="whose student --calibrate times (hours_1m)")
    add("--measure-link", action="store_true", help="time the link between two ranks of torchrun")
    add("--json", action="store_true", help="print one JSON object")
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
        sys.exit(fail(error, 2))
    except (OSError, process_group.CollectiveError) as error:
        sys.exit(fail(error, 1))


def fail(error: Exception, code: int) -> int:
    """Say on standard error what went wrong."""
    print(f"scaling: {error}", file=sys.stderr)
    return code


def link_and_print(as_json: bool) -> None:
    """Time the link between the two ranks that torchrun started; the first one prints."""
    with process_group.open_world(time_limit_s=120.0) as group:
        rates = measure_link(group)
        if not process_group.is_leader():
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
