"""Define the throughputs of a plan: one core, devices by instance type, the store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files

from infra.configuration import ConfigurationError, read_file, read_record, read_toml

PUBLISHED = files("jobs") / "calibrations" / "published.toml"
HERE = "here"
"""Key of the measured device in `Calibration.devices`; the other keys are instance types."""


@dataclass(frozen=True, slots=True)
class CoreRates:
    """CoreRates holds the rates of one core, measured on the pipeline's steps, on local disk.

    `metadata_records_per_s` is the rate of all of selection. `x_real_time` are seconds of audio a
    second through a whole step, without the teacher. Logits are frames x senones.
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
    """ModelRate holds low-rate frames a second of a model; time is proportional to parameters."""

    frames_per_s: float
    num_parameters: int

    def __post_init__(self) -> None:
        _require_positive(self)

    def of(self, num_parameters: int) -> float:
        """Return the frames a second of a model of another size."""
        return self.frames_per_s * self.num_parameters / num_parameters


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """DeviceRates holds the rates of one device.

    `trainer_efficiency` is the share of its speed that a rank keeps, by trainer.
    """

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
    """StoreRates holds the rates of the store and of the network; types not listed are unbounded.

    A task waits `request_seconds` for an answer; the client computes `request_core_seconds`.
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
    """Published holds the figures that cannot be measured here: other devices, and S3."""

    store: StoreRates
    devices: dict[str, DeviceRates]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration holds all throughputs of a plan; `machine` names the measured one and the day."""

    machine: str
    core: CoreRates
    store: StoreRates
    devices: dict[str, DeviceRates]

    def device(self, instance_type: str) -> DeviceRates:
        """Return the rates of an instance type's devices, or else of the measured device."""
        found = self.devices.get(instance_type) or self.devices.get(HERE)
        if found is None:
            raise ConfigurationError(
                f"no calibration of {instance_type}'s devices: calibrate on one of them "
                f"(--calibrate-to), or add a table devices.{instance_type!r} to the file; "
                f"it has {', '.join(self.devices) or 'none'}"
            )
        return found


def read_published() -> Published:
    """Read the figures that come with the package, each with its source."""
    return read_record(Published, read_toml(PUBLISHED), str(PUBLISHED))


def read_calibration(path: str) -> Calibration:
    """Read a calibration from JSON, as --calibrate-to writes it, or from TOML."""
    table = read_toml(path) if path.endswith(".toml") else json_object(read_file(path), path)
    return read_record(Calibration, table, path)


def json_object(data: bytes, where: str) -> Mapping[str, object]:
    """Parse the JSON object in `data`; ConfigurationError if it holds anything else."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: need a JSON object of tables")
    return table


def _require_positive(record: CoreRates | ModelRate) -> None:
    for each in fields(record):
        if not getattr(record, each.name) > 0:
            raise ValueError(f"{each.name} = {getattr(record, each.name)}: need more than 0")
