"""A step as any platform starts it, and what the platforms share.

A platform is a record of its account file, and returns what its own command line takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Literal, Protocol, runtime_checkable

from infra.cluster import Cluster
from infra.settings import ConfigurationError, Items, Text
from infra.spark.packaging import DEPENDENCIES, dependencies_name, extra_requirements, with_drivers
from infra.spark.session import submitted_settings

CodeUri = Annotated[str, Text(8, 1024, r"(s3|gs)://[a-z0-9._-]{3,63}(/[\w.-]+)*", "s3://b/code")]
"""The folder to which `make dist` was copied."""

Region = Annotated[str, Text(9, 30, r"[a-z]{2}(-[a-z]+)+-\d", "us-east-1")]
RolePrefix = Annotated[str, Text(1, 40, r"[\w+=,.@-]+", "megahour-roles")]
"""The name of the stack of roles."""

Image = Annotated[
    str, Text(3, 400, r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+|@sha256:[0-9a-f]{64})", "megahour:1")
]
Environment = Annotated[
    dict[Annotated[str, Text(1, 100, r"[A-Za-z_]\w*", "AWS_ENDPOINT_URL")], str], Items(0, 100)
]
"""Variables of every process, such as AWS_ENDPOINT_URL; secrets have places of their own."""

RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class StepLaunch:
    """StepLaunch holds a step of a run, its cluster file, and its own arguments as words.

    `needs_rooms` says that its driver simulates rooms, which takes the extra `demo`.
    """

    step: str
    run: str
    starter: Literal["Spark", "python", "torchrun"]
    cluster: Cluster
    arguments: tuple[str, ...]
    needs_rooms: bool = False

    @property
    def name(self) -> str:
        """Return the step's name as hosts and jobs may be called: train-student."""
        return self.step.replace("_", "-")

    @property
    def title(self) -> str:
        """Return step and run as a platform shows them; EMR's clusters are found again by it."""
        return f"megahour {self.step} {self.run}"[:256]

    @property
    def requirements(self) -> tuple[str, ...]:
        """Return the distributions that its driver and its tasks import."""
        rooms = extra_requirements("demo") if self.needs_rooms else ()
        return with_drivers((*self.cluster.python_dependencies, *rooms))

    @property
    def ranks_per_host(self) -> int:
        """Count the ranks that each host starts: its GPUs, or else its executors."""
        return self.cluster.gpus_per_instance or self.cluster.executors_per_instance

    def host_command(self, leader: str, rendezvous_id: str) -> list[str]:
        """Return what each host runs of a step that is not Spark's.

        Hosts of a training meet at RENDEZVOUS_PORT of the leader.
        """
        module = f"jobs.{self.step}"
        if self.starter == "python":
            return ["python", "-m", module, *self.arguments]
        endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{leader}:{RENDEZVOUS_PORT}")
        hosts = ("--nnodes", str(self.cluster.num_instances), *endpoint, "--rdzv-id", rendezvous_id)
        return [
            *("python", "-m", "training.distributed.rank_launcher"),
            *(hosts if self.cluster.num_instances > 1 else ("--standalone",)),
            *("--nproc-per-node", str(self.ranks_per_host), "--max-restarts", "1"),
            *("--module", "--", module, *self.arguments),
        ]

    def require_spark(self, platform: str) -> None:
        """Raise ConfigurationError unless it is a Spark step."""
        if self.starter != "Spark":
            remedy = "take emr, kubernetes or slurm, or run it on one host"
            raise ConfigurationError(f"{platform}: {self.step} is no Spark step: {remedy}")

    def require_cpus(self, platform: str) -> None:
        """Raise ConfigurationError for a cluster file with GPUs."""
        if self.cluster.has_gpus:
            remedy = "give --cluster with CPUs, or take emr, databricks or kubernetes"
            raise ConfigurationError(f"{platform}: {self.step}: its hosts have no GPU: {remedy}")


@runtime_checkable
class Platform(Protocol):
    """A Platform is the record of an account file."""

    def request(self, launch: StepLaunch) -> str:
        """Return what the platform's command line takes; ConfigurationError for what it cannot."""


@dataclass(frozen=True)
class SparkPackage:
    """SparkPackage holds where `make dist` lies, and what a driver and executors need of it."""

    program: str
    code: str
    dependencies: str
    settings: Mapping[str, str]


def spark_package(code_uri: str, launch: StepLaunch) -> SparkPackage:
    """Return the package of a Spark step; its driver unpacks the dependencies as executors do.

    The dependencies are those of the environment that calls this, which has to be the one that
    called `make dist`. Raises ConfigurationError where it lacks one, and for rooms, whose
    distributions are in no package.
    """
    if launch.needs_rooms:
        raise ConfigurationError(
            "--placements: simulate rooms on emr or kubernetes, or on one host"
        )
    return SparkPackage(
        f"{code_uri}/{launch.step}.py",
        f"{code_uri}/megahour-{version('megahour')}.zip",
        f"{code_uri}/{dependencies_name(launch.requirements)}#{DEPENDENCIES}",
        {**submitted_settings(launch.cluster), "spark.executorEnv.PYTHONPATH": DEPENDENCIES},
    )
