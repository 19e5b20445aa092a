"""Read the options of ranks, links and calibration into the records of the cost model."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from infra.settings import read_file, read_record, read_toml
from jobs.cli.parser import recipe_path
from jobs.planning.calibration.throughputs import json_object
from training.cost_model.step_time import Calibration, Workload
from training.settings.recipe import read_recipe

CALIBRATIONS = files("jobs") / "calibrations"
MAX_RANKS = 1 << 16
NETWORK_OPTIONS = (
    "ranks_per_host",
    "within_gbps",
    "between_gbps",
    "connection_gbps",
    "all_gather",
    "all_reduce",
)


def choose_calibration(arguments: argparse.Namespace, workload: Workload) -> Calibration:
    """Read a calibration, or measure and store one, and replace what the options give."""
    calibration = read_scaling(arguments.calibration)
    if arguments.calibrate:
        from jobs.planning.calibration.device_throughput import (  # noqa: PLC0415 - torch
            measure_rank,
        )

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


def read_scaling(calibration: str) -> Calibration:
    """Read a calibration: a file, or one of jobs/calibrations by name."""
    ours = CALIBRATIONS / f"{calibration}.toml"
    path: str | Traversable = ours if ours.is_file() else calibration
    is_json = calibration.endswith(".json")
    table = json_object(read_file(calibration), calibration) if is_json else read_toml(path)
    return read_record(Calibration, table, calibration)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks, ascending: "1..128" doubles from 1 to 128, "16,24" is a list."""
    first, dots, last = text.partition("..")
    try:
        found = _doubled(int(first), int(last)) if dots else [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"ranks = {text}: need FIRST..LAST, or numbers with commas") from error
    if not found or not 1 <= min(found) <= max(found) <= MAX_RANKS:
        raise ValueError(f"ranks = {text}: need numbers from 1 to {MAX_RANKS}, ascending")
    return tuple(sorted(set(found)))


def _doubled(first: int, last: int) -> list[int]:
    if not 1 <= first <= last <= MAX_RANKS:
        return []
    numbers = []
    while first < last:
        numbers.append(first)
        first *= 2
    return [*numbers, last]
