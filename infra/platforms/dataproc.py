"""Google Dataproc: a Spark step is a workflow whose cluster lives for this one job.

The code lies in Google's storage, and the run in S3, whose credentials hosts take from a secret
when they start (`dataproc_credentials.sh`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from infra.platforms.platform import CodeUri, Environment, StepLaunch, spark_package
from infra.settings import Text, check_ranges
from infra.spark.packaging import DEPENDENCIES

_CREDENTIALS = "/etc/megahour/s3_credentials"


@dataclass(frozen=True)
class Dataproc:
    """Dataproc names image, network, the hosts' account, and the secret with S3's credentials."""

    image_version: Annotated[str, Text(3, 60, r"\d+\.\d+(\.\d+)?(-\w+)*", "2.3-debian12")]
    subnetwork: Annotated[str, Text(1, 400)]
    service_account: Annotated[str, Text(6, 200, r"\S+@\S+", "megahour@p.iam.gserviceaccount.com")]
    code_uri: CodeUri
    secret: Annotated[str, Text(1, 255, r"[\w-]+", "megahour-s3")]
    driver_instance_type: Annotated[str, Text(1, 100)] = "n2-standard-8"
    environment: Environment = field(default_factory=dict)

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return a workflow template as `gcloud` instantiates it; only Spark steps have one."""
        launch.require_spark("dataproc")
        launch.require_cpus("dataproc")
        cluster, package = launch.cluster, spark_package(self.code_uri, launch)
        variables = {**self.environment, "AWS_SHARED_CREDENTIALS_FILE": _CREDENTIALS}
        job = {
            "mainPythonFileUri": package.program,
            "args": list(launch.arguments),
            "pythonFileUris": [package.code],
            "properties": {
                **package.settings,
                "spark.submit.deployMode": "cluster",  # the driver unpacks the archive, too
                "spark.archives": package.dependencies,
                "spark.yarn.appMasterEnv.PYTHONPATH": DEPENDENCIES,
                **_variables("spark.yarn.appMasterEnv", variables),
                **_variables("spark.executorEnv", variables),
            },
        }
        config = {
            "gceClusterConfig": {
                "subnetworkUri": self.subnetwork,
                "serviceAccount": self.service_account,
                "metadata": {"megahour-s3-secret": self.secret},
                "serviceAccountScopes": ["https://www.googleapis.com/auth/cloud-platform"],
            },
            # The driver runs on a worker: one more than the cluster file has.
            "masterConfig": _hosts(1, self.driver_instance_type, cluster.disk_gibibytes),
            "workerConfig": _hosts(
                max(cluster.num_instances + 1, 2), cluster.instance_type, cluster.disk_gibibytes
            ),
            "softwareConfig": {"imageVersion": self.image_version},
            "initializationActions": [
                {"executableFile": f"{self.code_uri}/dataproc_credentials.sh"}
            ],
        }
        template = {
            "placement": {"managedCluster": {"clusterName": launch.name, "config": config}},
            "jobs": [{"stepId": launch.name, "pysparkJob": job}],
        }
        return json.dumps(template, indent=2)


def _hosts(count: int, kind: str, gibibytes: int) -> dict[str, Any]:
    disk = {"bootDiskType": "pd-balanced", "bootDiskSizeGb": max(gibibytes, 30)}
    return {"numInstances": count, "machineTypeUri": kind, "diskConfig": disk}


def _variables(prefix: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": value for name, value in environment.items()}
