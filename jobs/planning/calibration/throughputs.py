"""Throughputs that a plan rests on: of one core, of devices by instance type, of the store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path

from infra.configuration import ConfigurationError, read_record, read_toml

PUBLISHED = files("jobs") / "calibrations" / "published.toml"
HERE = "here"
"""The device that was measured, in `Calibration.devices`; the others are instance types."""


@dataclass(frozen=True, slots=True)
class CoreRates:
    """One core, as measured on the pipeline's own steps, without waiting for a store.

    `metadata_records_per_s` is through all of selection; `x_real_time` are seconds of audio a
    second through a whole step, for targets without the teacher; logits are frames x senones.
    """

    metadata_records_per_s: float
    extraction_x_real_time: float
    targets_x_real_time: float
    repartition_x_real_time: float
    kbest_logits_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, slots=True)
class ModelRate:
    """Low-rate frames a second of a model of `num_parameters`; time goes as the parameters."""

    frames_per_s: float
    num_parameters: int

    def __post_init__(self) -> None:
        _require_positive(self)

    def of(self, num_parameters: int) -> float:
        """Frames a second of a model of another size."""
        return self.frames_per_s * self.num_parameters / num_parameters


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """One device; `trainer_efficiency` is the share of its speed kept among a cluster's ranks."""

    source: str
    student_training: ModelRate
    teacher_training: ModelRate
    teacher_forward: ModelRate
    trainer_efficiency: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, share in self.trainer_efficiency.items():
            if not 0 < share <= 1:
                raise ValueError(
                    f"trainer_efficiency {name} = {share}: need more than 0, at most 1"
                )


@dataclass(frozen=True, slots=True)
class StoreRates:
    """The object store and the way to it; instance types without an entry are not bounded.

    `request_seconds` are waited for, `request_core_seconds` are our own client's work.
    """

    source: str
    request_seconds: float
    request_core_seconds: float
    bytes_per_s: float
    instance_gbit_per_s: dict[str, float]

    def __post_init__(self) -> None:
        if min(self.request_seconds, self.request_core_seconds) < 0:
            raise ValueError("request_seconds, request_core_seconds: need 0 or more")
        if self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s = {self.bytes_per_s}: need more than 0")


@dataclass(frozen=True, slots=True)
class Published:
    """What no measurement here can tell: other devices, and S3."""

    store: StoreRates
    devices: dict[str, DeviceRates]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All throughputs of a plan; `machine` says what was measured, and where."""

    machine: str
    core: CoreRates
    store: StoreRates
    devices: dict[str, DeviceRates]

    def device(self, instance_type: str) -> DeviceRates:
        """The rates of an instance type's devices, or else of the device that was measured."""
        found = self.devices.get(instance_type) or self.devices.get(HERE)
        if found is None:
            raise ConfigurationError(
                f"no calibration of {instance_type}'s devices: calibrate on one of them "
                f"(--calibrate-to), or add a table devices.{instance_type!r} to the file; "
                f"there are {', '.join(self.devices) or 'none'}"
            )
        return found


def read_published() -> Published:
    """The figures that come with the package, each with its source."""
    return read_record(Published, read_toml(PUBLISHED), str(PUBLISHED))


def read_calibration(path: str) -> Calibration:
    """Read a calibration from JSON, as --calibrate-to writes it, or from TOML."""
    table = read_toml(path) if path.endswith(".toml") else parse_json(Path(path), path)
    return read_record(Calibration, table, path)


def parse_json(file: Path, where: str) -> Mapping[str, object]:
    """A JSON object; ConfigurationError if it is absent or malformed."""
    try:
        return json_object(file.read_bytes(), where)
    except OSError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error}") from error


def json_object(data: bytes, where: str) -> Mapping[str, object]:
    """The JSON object in `data`; ConfigurationError if it holds anything else."""
    try:
        table = json.loads(data)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: need a JSON object of tables")
    return table


def _require_positive(record: CoreRates | ModelRate) -> None:
    for each in fields(record):
        if not getattr(record, each.name) > 0:
            raise ValueError(f"{each.name} = {getattr(record, each.name)}: need more than 0")
