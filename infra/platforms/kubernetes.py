"""Kubernetes: a Spark step is a line of spark-submit, any other an Indexed Job.

A training has a pod for each host of its cluster file. Pods find the leader, which has index 0, by
its name in a headless service. infra/kubernetes/namespace.yaml makes the namespace and the service
account.
"""

import hashlib
import json
import shlex
from dataclasses import dataclass, field
from typing import Annotated, Any

from infra.platforms.platform import RENDEZVOUS_PORT, Environment, Image, StepLaunch
from infra.settings import Text, check_ranges, mebibytes
from infra.spark.session import conf_options, submitted_settings

_Name = Annotated[str, Text(1, 63, r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "megahour")]

_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True)
class Kubernetes:
    """Kubernetes names the API server, the images, and where pods have their credentials.

    `secret` holds AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; without one the service account has
    a role of the store.
    """

    master: Annotated[str, Text(6, 400, r"k8s://\S+", "k8s://https://10.0.0.1:443")]
    spark_image: Image
    trainer_image: Image
    namespace: _Name = "megahour"
    service_account: _Name = "megahour"
    secret: Annotated[str, Text(0, 63, r"([a-z0-9]([a-z0-9-]*[a-z0-9])?)?", "megahour-s3")] = ""
    environment: Environment = field(default_factory=dict)

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return the line that submits a Spark step, or the manifest that `kubectl apply` takes."""
        if launch.starter == "Spark":
            return shlex.join(self._spark_submit(launch))
        return json.dumps(self._manifest(launch), indent=2)

    def _spark_submit(self, launch: StepLaunch) -> list[str]:
        account = "spark.kubernetes.authenticate.{}.serviceAccountName"
        settings = {
            **submitted_settings(launch.cluster),
            "spark.kubernetes.container.image": self.spark_image,
            "spark.kubernetes.namespace": self.namespace,
        }
        for role, environment in (
            ("driver", "spark.kubernetes.driverEnv"),
            ("executor", "spark.executorEnv"),
        ):
            settings[account.format(role)] = self.service_account
            settings |= {f"{environment}.{key}": text for key, text in self.environment.items()}
            if self.secret:
                reference = f"spark.kubernetes.{role}.secretKeyRef"
                settings |= {f"{reference}.{key}": f"{self.secret}:{key}" for key in _SECRETS}
        if launch.cluster.has_gpus:
            # A pod gets whole GPUs; its tasks share them by the device pool.
            gpu, cluster = "spark.executor.resource.gpu", launch.cluster
            amount = max(cluster.gpus_per_instance // cluster.executors_per_instance, 1)
            settings[f"{gpu}.amount"] = str(amount)
            settings[f"{gpu}.vendor"] = "nvidia.com"
            settings[f"{gpu}.discoveryScript"] = "/opt/megahour/infra/docker/gpu_addresses.sh"
        where = ["--master", self.master, "--deploy-mode", "cluster"]
        program = f"local:///opt/megahour/jobs/{launch.step}.py"
        return ["spark-submit", *where, *conf_options(settings), program, *launch.arguments]

    def _manifest(self, launch: StepLaunch) -> dict[str, Any]:
        # The run's digest: its URI is no name, and two runs may train at once.
        name = f"{launch.name}-{hashlib.sha256(launch.run.encode()).hexdigest()[:8]}"
        labels = {"app.kubernetes.io/name": "megahour", "megahour/job": name}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        count = launch.cluster.num_instances
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "selector": {"megahour/job": name},
                "publishNotReadyAddresses": True,  # the leader is called while it starts
                "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
            },
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                # A lost pod starts again, meets the others, and all resume from the checkpoint.
                "backoffLimit": 3 * count,
                "template": {"metadata": {"labels": labels}, "spec": self._pod(launch, name)},
            },
        }
        return {"apiVersion": "v1", "kind": "List", "items": [service, job]}

    def _pod(self, launch: StepLaunch, name: str) -> dict[str, Any]:
        cluster = launch.cluster
        executors, gpus = cluster.executors_per_instance, cluster.gpus_per_instance
        requests = {"memory": f"{executors * mebibytes(cluster.executor_memory)}Mi"}
        if not gpus:  # GPUs bind a node; its system takes some of the cores that the file names
            requests["cpu"] = str(executors * cluster.cores_per_executor)
        variables: list[dict[str, Any]] = [
            {"name": key, "value": text} for key, text in self.environment.items()
        ]
        if self.secret:
            variables += [
                {"name": key, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": key}}}
                for key in _SECRETS
            ]
        container = {
            "name": "trainer",
            "image": self.trainer_image,
            "command": launch.host_command(f"{name}-0.{name}", name),
            "env": variables,
            "resources": {"requests": requests}
            | ({"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}),
            # Ranks of a host exchange through shared memory, of which a pod has 64 MB.
            "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108
        }
        return {
            "restartPolicy": "Never",
            "subdomain": name,
            "serviceAccountName": self.service_account,
            "containers": [container],
            "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
        }
