"""EMR Serverless: a Spark step is a job run of an application that the account has.

Its workers have no GPU, and come in fixed sizes, to which drivers and executors are rounded up.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from infra.aws.step_roles import role_name
from infra.cluster import container_mebibytes
from infra.platforms.emr import LaunchRequest, validate
from infra.platforms.platform import CodeUri, RolePrefix, StepLaunch, spark_package
from infra.settings import ConfigurationError, Text, check_ranges
from infra.spark.packaging import DEPENDENCIES
from infra.spark.session import conf_options

WORKERS: Mapping[int, range] = {
    1: range(2, 9),
    2: range(4, 17),
    4: range(8, 31),
    8: range(16, 61, 4),
    16: range(32, 121, 8),
}
"""The gibibytes that a worker of so many vCPUs may have."""

_DISKS = range(20, 201)


@dataclass(frozen=True)
class EmrServerless:
    """EmrServerless names an application, the account of its roles, and places in S3."""

    application_id: Annotated[str, Text(1, 64, r"[0-9a-z]+", "00f1abcd2efgh309")]
    account_id: Annotated[str, Text(12, 12, r"\d{12}", "123456789012")]
    role_prefix: RolePrefix
    code_uri: CodeUri
    logs_uri: CodeUri

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return the parameters of StartJobRun; ConfigurationError for steps that need a GPU."""
        launch.require_spark("emr_serverless")
        launch.require_cpus("emr_serverless")
        package = spark_package(self.code_uri, launch)
        settings = {
            **package.settings,
            "spark.archives": package.dependencies,
            "spark.emr-serverless.driverEnv.PYTHONPATH": DEPENDENCIES,
            **_worker_settings(launch),
        }
        submit = {
            "entryPoint": package.program,
            "entryPointArguments": list(launch.arguments),
            "sparkSubmitParameters": " ".join(
                ["--py-files", package.code, *map(_one_word, conf_options(settings))]
            ),
        }
        role = role_name(self.role_prefix, launch.step)
        parameters: dict[str, Any] = {
            "applicationId": self.application_id,
            "executionRoleArn": f"arn:aws:iam::{self.account_id}:role/{role}",
            "name": launch.title,
            "jobDriver": {"sparkSubmit": submit},
            "configurationOverrides": {
                "monitoringConfiguration": {
                    "s3MonitoringConfiguration": {"logUri": f"{self.logs_uri}/"}
                }
            },
            "executionTimeoutMinutes": 10_080,  # the most; without it 12 hours
        }
        # The command line draws a token of its own.
        whole = {**parameters, "clientToken": "drawn"}
        validate(LaunchRequest("emr-serverless", "StartJobRun", launch.name, whole))
        return json.dumps(parameters, indent=2)


def worker(num_cores: int, num_mebibytes: int) -> tuple[int, int]:
    """Return the cores and gibibytes of the smallest worker with these cores and this memory."""
    for cores, sizes in WORKERS.items():
        fitting = [size for size in sizes if size << 10 >= num_mebibytes]
        if cores >= num_cores and fitting:
            return cores, fitting[0]
    raise ConfigurationError(
        f"emr_serverless: {num_cores} cores with {num_mebibytes} MB: need at most 16 with 122880: "
        "give --cluster with smaller executors"
    )


def _worker_settings(launch: StepLaunch) -> dict[str, str]:
    """Return the sizes of workers, and as memory beside the JVM what the worker has left."""
    cluster, found = launch.cluster, {}
    for role, heap, cores, settings in (
        ("driver", cluster.driver_memory, 1, {}),
        ("executor", cluster.executor_memory, cluster.cores_per_executor, cluster.spark),
    ):
        num_cores, gibibytes = worker(cores, container_mebibytes(heap, settings))
        # Spark counts the memory of Python beside the overhead.
        taken = container_mebibytes(heap, {**settings, "spark.executor.memoryOverhead": "0"})
        found[f"spark.{role}.cores"] = str(num_cores)
        found[f"spark.{role}.memoryOverhead"] = f"{(gibibytes << 10) - taken}m"
        disk = min(max(cluster.disk_gibibytes, _DISKS[0]), _DISKS[-1])
        found[f"spark.emr-serverless.{role}.disk"] = f"{disk}G"
    return found


def _one_word(word: str) -> str:
    """Require a word without spaces: the service splits the parameters at them."""
    if any(map(str.isspace, word)):
        need = "need a value without spaces"
        raise ConfigurationError(f"emr_serverless: {word}: {need}")
    return word
