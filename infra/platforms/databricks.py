"""Databricks: a Spark step is a one-time run on a job cluster of its own, with dedicated access.

Serverless compute and standard access refuse RDDs, by which steps hand out their tasks.
"""

import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

from packaging.requirements import Requirement

from infra.blas_threads import ONE_THREAD
from infra.platforms.platform import CodeUri, Region, StepLaunch
from infra.settings import ConfigurationError, Text, check_ranges

PROGRAM = "databricks_step.py"
"""The program of a task, which `megahour package` copies from beside this file."""


@dataclass(frozen=True)
class Databricks:
    """Databricks names a runtime, whose Python the wheel is for, and an instance profile."""

    runtime: Annotated[
        str, Text(5, 60, r"\d+\.(\d+\.)?x-(gpu-ml-)?scala2\.1[23]", "17.3.x-scala2.13")
    ]
    wheel: Annotated[
        str,
        Text(
            8, 1024, r"(s3://|/Volumes/|/Workspace/)\S+\.whl", "s3://b/code/megahour-…-cp312-….whl"
        ),
    ]
    instance_profile: Annotated[
        str,
        Text(
            20,
            200,
            r"arn:aws:iam::\d{12}:instance-profile/\S+",
            "arn:aws:iam::…:instance-profile/x",
        ),
    ]
    code_uri: CodeUri
    region: Region

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return the JSON of `databricks jobs submit`; ConfigurationError for other steps."""
        launch.require_spark("databricks")
        cluster = launch.cluster
        release = version("megahour")
        if f"/megahour-{release}-" not in self.wheel:
            raise ConfigurationError(f"wheel = {self.wheel}: need that of megahour {release}")
        task = {
            "task_key": launch.step,
            "new_cluster": {
                "spark_version": self.runtime,
                "node_type_id": cluster.instance_type,
                "num_workers": cluster.num_instances,
                "data_security_mode": "SINGLE_USER",  # dedicated, by the API's older name
                "aws_attributes": {"instance_profile_arn": self.instance_profile},
                "spark_conf": {"spark.executor.memory": cluster.executor_memory, **cluster.spark},
                "spark_env_vars": {"AWS_DEFAULT_REGION": self.region, **ONE_THREAD},
                "custom_tags": {"megahour:step": launch.step, "megahour:run": launch.run[:255]},
            },
            "libraries": [
                {"whl": self.wheel},
                *({"pypi": {"package": _pinned(each)}} for each in launch.requirements),
            ],
            "spark_python_task": {
                "python_file": f"{self.code_uri}/{PROGRAM}",
                "parameters": [launch.step, *launch.arguments],
            },
        }
        return json.dumps({"run_name": launch.title, "tasks": [task]}, indent=2)


def _pinned(text: str) -> str:
    """Return a requirement in the version that is installed here, as constraints.txt pins it."""
    name = Requirement(text).name
    return f"{name}=={version(name)}"
