"""Sum up when, where and by which code the steps of a run were made, and their dollars."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jobs.planning.prices import S3_STANDARD
from jobs.planning.volumes.step_volume import Requests

Record = Mapping[str, Any]
_REQUESTS = ("get", "put", "head", "list")


def origin_of(records: Mapping[str, Record], run_uri: str) -> dict[str, Any]:
    """Return dates, seconds, machines, commits and dollars of the steps' records, and their sums.

    A record of an earlier version knows no machine, commit or cluster: its texts are empty, its
    dollars are None.
    """
    steps = {
        name: {
            "finished_at": record["finished_at"],
            "machine": record.get("machine", ""),
            "commit": record.get("commit", ""),
            "dollars": dollars_of(record, is_in_s3=run_uri.startswith("s3://")),
        }
        for name, record in records.items()
    }
    ends = {name: datetime.fromisoformat(step["finished_at"]) for name, step in steps.items()}
    begins = [end.timestamp() - records[name]["seconds"] for name, end in ends.items()]
    return {
        "finished_at": max(steps.values(), key=lambda step: str(step["finished_at"]))[
            "finished_at"
        ],
        "step_seconds": sum(record["seconds"] for record in records.values()),
        "elapsed_seconds": max(end.timestamp() for end in ends.values()) - min(begins),
        "machines": _distinct(steps, "machine"),
        "commits": _distinct(steps, "commit"),
        "dollars": sum(step["dollars"] or 0.0 for step in steps.values()),
        "steps": steps,
    }


def dollars_of(record: Record, is_in_s3: bool) -> float | None:
    """Return the dollars of a step's instances for its seconds, and of its requests to S3."""
    cluster, counts = record.get("cluster"), record.get("requests")
    if cluster is None:
        return None
    hourly = cluster["num_instances"] * cluster["price_per_instance_hour"]
    instances = float(hourly * record["seconds"] / 3600)
    if not (is_in_s3 and counts):
        return instances
    requests = Requests(**{kind: counts[kind] for kind in _REQUESTS})
    return instances + S3_STANDARD.requests(requests)


def _distinct(steps: Mapping[str, Record], key: str) -> list[str]:
    return [value for value in dict.fromkeys(step[key] for step in steps.values()) if value]
