"""Describe a step's cluster: its machines, and the prefixes it may read and write (003 IV-C)."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement

from infra.settings import (
    AUTO,
    ConfigurationError,
    Devices,
    Items,
    MemorySize,
    Range,
    Readable,
    Text,
    check_ranges,
    mebibytes,
    read_record,
    read_toml,
    shown,
)

_CLUSTERS = files("infra") / "clusters"  # the code may lie in a zip
_PLACEHOLDER = re.compile(r"\{(.*?)\}")

Prefixes = Annotated[tuple[Annotated[str, Text(1, 4096)], ...], Items(0, 1000)]
# Spark refuses a JVM of less than 450 MB; the largest instances have 32 TB.
Memory = Annotated[str, MemorySize(450, 32 << 20)]
Master = Annotated[
    str, Text(1, 1000, r"local(-cluster)?(\[[\d*, ]+\])?|yarn|(spark|k8s|mesos)://\S+", "local[2]")
]
SparkKey = Annotated[str, Text(7, 1000, r"spark\.\S+", "spark.task.maxFailures")]


@dataclass(frozen=True, slots=True)
class InstanceType:
    """InstanceType holds an instance's cores, memory and GPUs, and if these multiply bfloat16."""

    num_cores: int
    gibibytes: int
    num_gpus: int = 0
    has_bfloat16: bool = False

    @property
    def container_mebibytes(self) -> int:
        """Return the memory that YARN on EMR gives to containers, unless a site sets another."""
        # All but 8 GiB, or three quarters of small hosts: 23,040 MB of a c4.4xlarge.
        return max(self.gibibytes - 8 << 10, self.gibibytes * 768)


APPLICATION_MASTER_MEBIBYTES = 512 + 384
"""Spark's application master takes so much of YARN's memory on one of the instances, by default.

Containers that leave no room for it cost that instance's executors.
"""

SPARK_MAX_FAILURES = "4"
"""Spark tries a task so often, where the cluster file does not say."""

INSTANCE_TYPES: Mapping[str, InstanceType] = {
    "c4.2xlarge": InstanceType(8, 15),
    "c4.4xlarge": InstanceType(16, 30),
    "c4.8xlarge": InstanceType(36, 60),
    "c5n.4xlarge": InstanceType(16, 42),
    "p2.xlarge": InstanceType(4, 61, 1),
    "p2.8xlarge": InstanceType(32, 488, 8),
    "p2.16xlarge": InstanceType(64, 732, 16),
    "p3.2xlarge": InstanceType(8, 61, 1),
    "p3.8xlarge": InstanceType(32, 244, 4),
    "p3.16xlarge": InstanceType(64, 488, 8),
    "g5.48xlarge": InstanceType(192, 768, 8, has_bfloat16=True),
    "p5.48xlarge": InstanceType(192, 2048, 8, has_bfloat16=True),
    "x1.16xlarge": InstanceType(64, 976),
    "x1.32xlarge": InstanceType(128, 1952),
}
"""The papers' instances and their families, hosts of A10Gs and H100s; no others are known."""


@dataclass(frozen=True)
class Cluster:
    """Cluster holds one step's identical instances, software, permissions and Spark settings.

    An executor is a Spark executor, or one rank of a training step. `read_prefixes`,
    `write_prefixes` and `delete_prefixes`, which are some of the others, may contain `{run}` and
    `{corpus}`. Prices are in US dollars. `devices` are those of each host, such as `cuda:0`;
    `cpu#0` and `cpu#1` are two cores. "auto" are the host's GPUs, or else its cores. Where Spark
    assigns GPUs to tasks, these are taken instead. `disk_gibibytes` are each instance's local disk,
    for dependencies and what a task spills.
    """

    instance_type: Annotated[str, Text(1, 100)]
    num_instances: Annotated[int, Range(1, 100_000)]
    executors_per_instance: Annotated[int, Range(1, 1024)]
    cores_per_executor: Annotated[int, Range(1, 1024)]
    executor_memory: Memory
    driver_memory: Memory
    price_per_instance_hour: Annotated[float, Range(0, 1e6)]
    read_prefixes: Prefixes
    write_prefixes: Prefixes
    delete_prefixes: Prefixes = ()
    devices: Devices = ("cpu",)
    python_dependencies: Annotated[tuple[Annotated[str, Text(1, 1000)], ...], Items(0, 1000)] = ()
    master: Master = "yarn"
    disk_gibibytes: Annotated[int, Range(1, 1 << 20)] = 64
    spark: Annotated[dict[SparkKey, Annotated[str, Text(0, 10_000)]], Items(0, 1000)] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.devices != AUTO and len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices = {shown(self.devices)}: need each once")
        for dependency in self.python_dependencies:
            _requirement(dependency)
        others = (*self.read_prefixes, *self.write_prefixes)
        for prefix in (*others, *self.delete_prefixes):
            for name in _PLACEHOLDER.findall(prefix):
                if name not in ("run", "corpus"):
                    place = f"prefix {shown(prefix)}: {{{name}}}"
                    raise ValueError(f"{place}: need {{run}} or {{corpus}}")
        for prefix in self.delete_prefixes:
            if not any(f"{prefix}/".startswith(f"{each}/") for each in others):
                raise ValueError(
                    f"delete_prefixes: {shown(prefix)}: need what the step reads or writes: "
                    + (", ".join(others) or "there are none")
                )
        self._require_cores_and_memory()
        self._require_executors_for_all_attempts()

    @property
    def num_executors(self) -> int:
        """Count the executors, or ranks, of the whole cluster."""
        return self.num_instances * self.executors_per_instance

    @property
    def num_devices(self) -> int:
        """Count the devices of the whole cluster: those of its hosts, or one a rank of torchrun.

        "auto" are as many as the instance's GPUs.
        """
        of_host = self.gpus_per_instance or self._cores_per_instance
        if self.devices != AUTO:
            of_host = len(self.devices)
        return max(self.num_instances * of_host, self.num_executors)

    @property
    def has_gpus(self) -> bool:
        """Return whether its devices are GPUs; "auto" are if the instance is known to have any."""
        if self.devices == AUTO:
            return self.gpus_per_instance > 0
        return any(device.startswith("cuda") for device in self.devices)

    @property
    def is_local(self) -> bool:
        """Return whether Spark runs inside one process of this host."""
        return self.master.startswith("local")

    @property
    def has_one_slot(self) -> bool:
        """Return whether Spark runs inside one process of this host, one task at a time."""
        return re.fullmatch(r"local(\[ *1 *(, *\d+ *)?\])?", self.master) is not None

    def _require_cores_and_memory(self) -> None:
        instance = self._instance
        if instance is None:
            return
        if self._cores_per_instance > instance.num_cores:
            product = f"executors_per_instance x cores_per_executor = {self._cores_per_instance}"
            raise ValueError(
                f"{product}: need at most {instance.num_cores}, the cores of {self.instance_type}"
            )
        of_executor = container_mebibytes(self.executor_memory, self.spark)
        containers = self.executors_per_instance * of_executor
        most = whole = instance.gibibytes << 10
        if self.master == "yarn":
            most = instance.container_mebibytes - APPLICATION_MASTER_MEBIBYTES
        for what, needed, limit in (
            ("executors_per_instance x (executor_memory + overhead)", containers, most),
            ("driver_memory", mebibytes(self.driver_memory), whole),
        ):
            if needed > limit:
                of_yarn = " that YARN gives to containers" if limit < whole else ""
                raise ValueError(
                    f"{what} = {needed} MB: need at most {limit} MB, the memory of "
                    f"{self.instance_type}{of_yarn}"
                )

    def _require_executors_for_all_attempts(self) -> None:
        """Refuse to exclude hosts where too few are left for a task's later attempts.

        An executor has one attempt at a task, a host two; without another one Spark ends the step.
        """
        attempts = self.spark.get("spark.task.maxFailures", SPARK_MAX_FAILURES)
        if self.spark.get("spark.excludeOnFailure.enabled") != "true" or not attempts.isdigit():
            return
        most = min(self.num_executors, 2 * self.num_instances)
        if most < int(attempts):
            raise ValueError(
                f"spark.excludeOnFailure.enabled = true: {most} attempts at a task on "
                f"{self.num_executors} executors of {self.num_instances} instances: need "
                f"spark.task.maxFailures, {attempts}: leave it out, or name more instances"
            )

    @property
    def _cores_per_instance(self) -> int:
        return self.executors_per_instance * self.cores_per_executor

    @property
    def _instance(self) -> InstanceType | None:
        return INSTANCE_TYPES.get(self.instance_type)

    def readable(self, run: str, corpus: str) -> tuple[str, ...]:
        """Return the prefixes that the step may read; they include those that it may write."""
        return _fill((*self.read_prefixes, *self.write_prefixes), run, corpus)

    def writable(self, run: str, corpus: str) -> tuple[str, ...]:
        """Return the prefixes that the step may write."""
        return _fill(self.write_prefixes, run, corpus)

    def deletable(self, run: str, corpus: str) -> tuple[str, ...]:
        """Return the prefixes below which the step may remove objects."""
        return _fill(self.delete_prefixes, run, corpus)

    @property
    def gpus_per_instance(self) -> int:
        """Return the GPUs of an instance; of a type that is not known, those among its devices."""
        if self._instance:
            return self._instance.num_gpus
        return sum(device.startswith("cuda") for device in self.devices)


def load_cluster(name_or_path: str | Readable) -> Cluster:
    """Read a cluster of this package by its name, or your own by its .toml file.

    Raises ConfigurationError for an unknown name, and for a file that `read_record` refuses.
    """
    if not isinstance(name_or_path, str):
        return read_record(Cluster, read_toml(name_or_path), str(name_or_path))
    is_path, known = name_or_path.endswith(".toml"), shipped_clusters()
    # os.path: False of a name that is longer than a file's may be.
    if not (os.path.isfile(name_or_path) if is_path else name_or_path in known):  # noqa: PTH113
        remedy = f"need a path to a .toml file, or one of {', '.join(known)}"
        raise ConfigurationError(f"cluster {shown(name_or_path)}: {remedy}")
    file = name_or_path if is_path else _CLUSTERS / f"{name_or_path}.toml"
    return read_record(Cluster, read_toml(file), str(file))


def shipped_clusters() -> list[str]:
    """Return the names of the cluster files of this package."""
    return sorted(file.name.removesuffix(".toml") for file in _CLUSTERS.iterdir())


def require_dependencies(cluster: Cluster) -> None:
    """Raise ConfigurationError unless the cluster's Python dependencies are installed as required.

    The message names what is installed, what is needed, and the command that installs it.
    """
    requirements = [_requirement(each) for each in cluster.python_dependencies]
    lacking = {str(each): fact for each in requirements if (fact := lack(each)) is not None}
    if lacking:
        facts = "; ".join(f"{needed}: {fact}" for needed, fact in lacking.items())
        command = " ".join(f"'{needed}'" for needed in lacking)
        raise ConfigurationError(f"python_dependencies: {facts}: pip install {command}")


def _requirement(text: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        remedy = 'need a distribution and its versions, such as "soundfile>=0.14"'
        raise ConfigurationError(f"python_dependencies: {shown(text)}: {remedy}") from error


def lack(requirement: Requirement) -> str | None:
    """Return why the installed environment does not satisfy a requirement; None if it does."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        installed = distribution(requirement.name).version
    except PackageNotFoundError:
        return "not installed"
    # A release candidate that is installed was chosen by someone.
    satisfies = requirement.specifier.contains(installed, prereleases=True)
    return None if satisfies else f"{installed} is installed"


def container_mebibytes(executor_memory: str, settings: Mapping[str, str]) -> int:
    """Return the memory of an executor's container: its JVM's, and what Python has beside it."""
    jvm = mebibytes(executor_memory)
    overhead = _setting_mebibytes(settings, "spark.executor.memoryOverhead")
    python = _setting_mebibytes(settings, "spark.executor.pyspark.memory")
    # Spark's own default of an overhead that is not set.
    return jvm + (python or 0) + (max(384, jvm // 10) if overhead is None else overhead)


def _setting_mebibytes(settings: Mapping[str, str], key: str) -> int | None:
    text = settings.get(key)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < 12:
        return int(text)  # Spark takes a bare number for mebibytes
    try:
        return mebibytes(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _fill(prefixes: Sequence[str], run: str, corpus: str) -> tuple[str, ...]:
    values = {"{run}": run.rstrip("/"), "{corpus}": corpus.rstrip("/")}
    return tuple(_PLACEHOLDER.sub(lambda found: values[found[0]], prefix) for prefix in prefixes)
