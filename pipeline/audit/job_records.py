"""Read what jobs stored as they began and ended; records of other fields are refused."""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from infra.settings import shown
from infra.task_metrics import REQUEST_KINDS
from pipeline.runs.sealed_json import read_sealed

_COUNTS = ("utterances_in", "utterances_out", "quarantined")


def parse_job_record(data: bytes, remedy: str) -> dict[str, Any]:
    """Read the record of a job that has ended; ValueError for one of other fields."""
    return read_sealed(data, remedy, _ended)


def parse_begun_record(data: bytes, remedy: str) -> dict[str, Any]:
    """Read what a job stored as it began; ValueError for other fields."""
    return read_sealed(data, remedy, _begun)


def _begun(record: dict[str, Any]) -> dict[str, Any]:
    _require_table(record, "recipe")
    _require_time(record, "started_at")
    if "hours_before" in record:  # starts of earlier versions did not say it
        hours = _require_table(record, "hours_before")
        _require_numbers(hours, tuple(hours))
    return record


def _ended(record: dict[str, Any]) -> dict[str, Any]:
    for name in ("step", "machine", "commit"):
        if not isinstance(record[name], str):
            raise TypeError(f"{name} = {shown(record[name])}: need text")
    _require_time(record, "finished_at")
    _require_numbers(record, ("seconds",))
    for name in ("recipe", "pace", "trainers"):
        _require_table(record, name)
    tallies = _require_table(record, "manifests")
    for name in tallies:
        _require_numbers(_require_table(tallies, name), _COUNTS)
    # The dollars of a step are computed from these.
    _require_numbers(_require_table(record, "requests"), REQUEST_KINDS)
    cluster = _require_table(record, "cluster")
    _require_numbers(cluster, ("num_instances", "price_per_instance_hour"))
    faults = record["device_faults"]
    if not isinstance(faults, list) or not all(isinstance(each, dict) for each in faults):
        raise TypeError(f"device_faults = {shown(faults)}: need a list of tables")
    return record


def _require_table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = record[name]
    if not isinstance(table, dict):
        raise TypeError(f"{name} = {shown(table)}: need a table")
    return table


def _require_time(record: Mapping[str, Any], name: str) -> None:
    text = record[name]
    try:
        has_offset = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        has_offset = False
    if not has_offset:
        raise TypeError(f"{name} = {shown(text)}: need ISO 8601 with an offset")


def _require_numbers(table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = table[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 2**63 or not math.isfinite(value):
            raise TypeError(f"{name} = {shown(value)}: need a number from 0")
