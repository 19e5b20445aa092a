"""Describe a step's cluster: its machines, and the prefixes it may read and write (003 IV-C)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files

from infra.configuration import ConfigurationError, read_record, read_toml

_CLUSTERS = files("infra") / "clusters"  # the code may lie in a zip
_PLACEHOLDER = re.compile(r"\{(.*?)\}")
_MEMORY = re.compile(r"[1-9][0-9]*[mgt]")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*([<>=!~].*)?")


@dataclass(frozen=True)
class Cluster:
    """Cluster holds one step's identical instances, software, permissions and Spark settings.

    An executor is a Spark executor, or one rank of a training step. `read_prefixes` and
    `write_prefixes` may contain `{run}` and `{corpus}`. Prices are in US dollars. `devices` are
    those of each host, such as `cuda:0`; `cpu#0` and `cpu#1` are two cores.
    """

    instance_type: str
    num_instances: int
    executors_per_instance: int
    cores_per_executor: int
    executor_memory: str
    driver_memory: str
    price_per_instance_hour: float
    read_prefixes: tuple[str, ...]
    write_prefixes: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    python_dependencies: tuple[str, ...] = ()
    master: str = "yarn"
    spark: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_instances", "executors_per_instance", "cores_per_executor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: need 1 or more")
        for name in ("executor_memory", "driver_memory"):
            if not _MEMORY.fullmatch(getattr(self, name)):
                raise ValueError(f'{name} = {getattr(self, name)!r}: need a size such as "4g"')
        if self.price_per_instance_hour < 0:
            price = self.price_per_instance_hour
            raise ValueError(f"price_per_instance_hour = {price}: need 0 or more, in dollars")
        _require_known_placeholders((*self.read_prefixes, *self.write_prefixes))
        _require_spark_keys(self.spark)

    @property
    def num_executors(self) -> int:
        """Count the executors, or ranks, of the whole cluster."""
        return self.num_instances * self.executors_per_instance

    @property
    def is_local(self) -> bool:
        """Return whether Spark runs inside one process of this host."""
        return self.master.startswith("local")

    def readable(self, run: str, corpus: str) -> tuple[str, ...]:
        """Return the prefixes that the step may read; they include those that it may write."""
        return _fill((*self.read_prefixes, *self.write_prefixes), run, corpus)

    def writable(self, run: str, corpus: str) -> tuple[str, ...]:
        """Return the prefixes that the step may write."""
        return _fill(self.write_prefixes, run, corpus)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster of this package by its name, or your own by the path of its .toml file.

    Raises ConfigurationError for an unknown name, and for a file that `read_record` refuses.
    """
    if name_or_path.endswith(".toml"):
        return read_record(Cluster, read_toml(name_or_path), name_or_path)
    known = sorted(file.name.removesuffix(".toml") for file in _CLUSTERS.iterdir())
    if name_or_path not in known:
        remedy = f"need a path to a .toml file, or one of {', '.join(known)}"
        raise ConfigurationError(f"cluster {name_or_path!r}: {remedy}")
    file = _CLUSTERS / f"{name_or_path}.toml"
    return read_record(Cluster, read_toml(file), str(file))


def require_dependencies(cluster: Cluster) -> None:
    """Raise ConfigurationError unless each of the cluster's Python dependencies is installed."""
    missing = [name for name in cluster.python_dependencies if not _is_installed(name)]
    if missing:
        command = " ".join(f"'{name}'" for name in missing)
        raise ConfigurationError(f"python_dependencies not installed: pip install {command}")


def _is_installed(requirement: str) -> bool:
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        remedy = 'need a distribution and its versions, such as "soundfile>=0.14"'
        raise ConfigurationError(f"python_dependencies: {requirement!r}: {remedy}")
    try:
        distribution(match[1])
    except PackageNotFoundError:
        return False
    return True


def _require_known_placeholders(prefixes: Sequence[str]) -> None:
    for prefix in prefixes:
        for name in _PLACEHOLDER.findall(prefix):
            if name not in ("run", "corpus"):
                raise ValueError(f"prefix {prefix!r}: {{{name}}}: need {{run}} or {{corpus}}")


def _require_spark_keys(settings: Mapping[str, str]) -> None:
    for key in settings:
        if not key.startswith("spark."):
            raise ValueError(f"spark: key {key!r}: need a Spark property, in quotes: 'spark.…'")


def _fill(prefixes: Sequence[str], run: str, corpus: str) -> tuple[str, ...]:
    values = {"{run}": run.rstrip("/"), "{corpus}": corpus.rstrip("/")}
    return tuple(_PLACEHOLDER.sub(lambda found: values[found[0]], prefix) for prefix in prefixes)
