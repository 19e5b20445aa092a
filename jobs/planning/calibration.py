"""Define the throughputs behind a plan: of a core, of devices by instance type, of the store.

Published ones are in jobs/calibrations; jobs.planning.measurement measures this machine's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

from infra.settings import (
    ConfigurationError,
    Items,
    Range,
    Text,
    check_ranges,
    read_file,
    read_record,
    read_toml,
)

CALIBRATIONS = files("jobs") / "calibrations"
TWO_CORES = "two_cores"
"""The calibration that comes with the package: two x86-64 cores, which had other work too."""

HERE = "here"
"""Key of the measured device in `Calibration.devices`; the other keys are instance types."""

Rate = Annotated[float, Range(1e-9, 1e18)]
Source = Annotated[str, Text(1, 1000)]
Name = Annotated[str, Text(1, 100)]


@dataclass(frozen=True, slots=True)
class CoreRates:
    """CoreRates holds the rates of one core, measured on the pipeline's steps, on local disk.

    `metadata_records_per_s` is the rate of all of selection. `x_real_time` are seconds of audio a
    second through a whole step, without the teacher. Logits are frames x senones.
    """

    metadata_records_per_s: Rate
    extraction_x_real_time: Rate
    targets_x_real_time: Rate
    repartition_x_real_time: Rate
    kbest_logits_per_s: Rate

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class ModelRate:
    """ModelRate holds low-rate frames a second of a model; time is proportional to parameters."""

    frames_per_s: Rate
    num_parameters: Annotated[int, Range(1, 10**15)]

    __post_init__ = check_ranges

    def of(self, num_parameters: int) -> float:
        """Return the frames a second of a model of another size."""
        return self.frames_per_s * self.num_parameters / num_parameters


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """DeviceRates holds the rates of one device.

    `trainer_efficiency` is the share of its speed that a rank keeps, by trainer.
    """

    source: Source
    student_training: ModelRate
    teacher_training: ModelRate
    teacher_forward: ModelRate
    trainer_efficiency: Annotated[dict[Name, Annotated[float, Range(1e-6, 1)]], Items(0, 100)] = (
        field(default_factory=dict)
    )

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class StoreRates:
    """StoreRates holds the rates of the store and of the network; types not listed are unbounded.

    A task waits `request_seconds` for an answer; the client computes `request_core_seconds`.
    """

    source: Source
    request_seconds: Annotated[float, Range(0, 1e6)]
    request_core_seconds: Annotated[float, Range(0, 1e6)]
    bytes_per_s: Rate
    instance_gbit_per_s: Annotated[dict[Name, Rate], Items(0, 1000)]

    __post_init__ = check_ranges


Devices = Annotated[dict[Name, DeviceRates], Items(0, 1000)]


@dataclass(frozen=True, slots=True)
class SearchRates:
    """SearchRates holds the rates of one core on speech and a language that plans cannot make up.

    `x_real_time` are seconds of speech a second through a search, without the network; sequence
    frames are low-rate frames through sMBR's forward-backward.
    """

    source: Source
    bootstrap_x_real_time: Rate
    phones_x_real_time: Rate
    alignment_x_real_time: Rate
    lattices_x_real_time: Rate
    decoding_x_real_time: Rate
    sequence_frames_per_s: Rate

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class PoolRates:
    """PoolRates holds the share of a bare loop's speed that device servers give their tasks."""

    source: Source
    efficiency: Annotated[float, Range(1e-6, 2)]

    __post_init__ = check_ranges


@dataclass(frozen=True, slots=True)
class Published:
    """Published holds the figures that cannot be measured here: other devices, S3, real speech."""

    store: StoreRates
    search: SearchRates
    pool: PoolRates
    devices: Devices

    __post_init__ = check_ranges


def read_published() -> Published:
    """Read the figures that come with the package, each with its source."""
    return read_record(Published, read_tables("published"), "published")


@dataclass(frozen=True, slots=True)
class Calibration(Published):
    """Calibration holds all throughputs of a plan; `machine` names the measured one and the day."""

    machine: Source
    core: CoreRates

    def core_seconds(self, work: Mapping[str, float]) -> float:
        """Return the seconds that a core needs for work that is given by the names of its rates."""
        rates = {**asdict(self.core), **asdict(self.search)}
        return float(sum(amount / rates[name] for name, amount in work.items()))

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


def read_calibration(calibration: str) -> Calibration:
    """Read a calibration: JSON, as --calibrate-to writes it, TOML, or a name in jobs/calibrations.

    Published figures stand for the tables and the devices that it lacks. Raises ConfigurationError
    for a file that holds no calibration.
    """
    table = read_tables(calibration)
    published = asdict(read_published())
    devices = table.get("devices", {})
    if isinstance(devices, Mapping):  # what is no table is refused below, with the key's name
        devices = {**published["devices"], **devices}
    return read_record(Calibration, {**published, **table, "devices": devices}, calibration)


def read_tables(calibration: str) -> Mapping[str, object]:
    """Read the tables of a calibration: a file of TOML, or else JSON, or a name of ours."""
    ours = {each.name.partition(".")[0]: each for each in CALIBRATIONS.iterdir()}
    file: str | Traversable = ours.get(calibration, calibration)
    name = file if isinstance(file, str) else file.name
    if name.endswith(".toml"):
        return read_toml(file)
    return json_object(read_file(file) if isinstance(file, str) else file.read_bytes(), calibration)


def json_object(data: bytes, where: str) -> Mapping[str, object]:
    """Parse the JSON object in `data`; ConfigurationError if it holds anything else."""
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: need a JSON object of tables")
    return table
