"""Validate launch requests, send them, and wait for the clusters to end.

A cluster is found again by its name. So a caller that was killed, started again, waits for the
cluster that it had launched, and pays for no second one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.exceptions import BotoCoreError, ClientError
from botocore.validate import ParamValidator

from infra.aws.launch_requests import LaunchRequest

POLL_S = 30.0
# One that ends already is not waited for: a second attempt would fail with it.
_ALIVE = ["STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING"]
_ALIVE_HOSTS = ["pending", "running"]

Report = Callable[[str], None]


class LaunchError(RuntimeError):
    """LaunchError says what AWS refused, or how a cluster ended, and a remedy."""


@dataclass(frozen=True, slots=True)
class _Service:
    """_Service finds the clusters of a name, launches one, and describes how it is."""

    client: Any

    def wait(self, found: Sequence[str], report: Report, poll_s: float) -> None:
        """Wait until the clusters have ended; report each change."""
        before = ""
        while True:
            state, is_over = self.state(found)
            if state != before:
                report(f"{', '.join(found)}: {state}")
                before = state
            if is_over:
                return
            time.sleep(poll_s)

    def find(self, name: str) -> list[str]:
        """Return the ids of the living clusters, or hosts, of this name."""
        raise NotImplementedError

    def launch(self, parameters: dict[str, Any]) -> list[str]:
        """Launch; return the ids."""
        raise NotImplementedError

    def state(self, ids: Sequence[str]) -> tuple[str, bool]:
        """Describe how they are, and whether they have ended; LaunchError for a bad end."""
        raise NotImplementedError


class _Emr(_Service):
    def find(self, name: str) -> list[str]:
        pages = self.client.get_paginator("list_clusters").paginate(ClusterStates=_ALIVE)
        return [each["Id"] for page in pages for each in page["Clusters"] if each["Name"] == name]

    def launch(self, parameters: dict[str, Any]) -> list[str]:
        return [self.client.run_job_flow(**parameters)["JobFlowId"]]

    def state(self, ids: Sequence[str]) -> tuple[str, bool]:
        status = self.client.describe_cluster(ClusterId=ids[0])["Cluster"]["Status"]
        state, reason = status["State"], status.get("StateChangeReason", {})
        if state == "TERMINATED_WITH_ERRORS" or reason.get("Code") in (
            "STEP_FAILURE",
            "BOOTSTRAP_FAILURE",
            "INSTANCE_FAILURE",
            "USER_REQUEST",
        ):
            cause = f"{reason.get('Code', state)}: {reason.get('Message', 'no reason given')}"
            raise LaunchError(f"{ids[0]}: {cause}: read its log, then give the same command again")
        return state, state == "TERMINATED"


class _Ec2(_Service):
    def find(self, name: str) -> list[str]:
        return [each["InstanceId"] for each in self._hosts(_named(name))]

    def launch(self, parameters: dict[str, Any]) -> list[str]:
        return [each["InstanceId"] for each in self.client.run_instances(**parameters)["Instances"]]

    def state(self, ids: Sequence[str]) -> tuple[str, bool]:
        mine = [{"Name": "instance-id", "Values": list(ids)}]
        states = [each["State"]["Name"] for each in self._hosts(mine)]
        counts = {each: states.count(each) for each in sorted(set(states))}
        text = ", ".join(f"{count} {each}" for each, count in counts.items()) or "gone"
        return text, set(counts) <= {"terminated"}

    def _hosts(self, filters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        pages = self.client.get_paginator("describe_instances").paginate(Filters=list(filters))
        reservations = (each for page in pages for each in page["Reservations"])
        return [host for each in reservations for host in each["Instances"]]


def validate(request: LaunchRequest) -> None:
    """Compare a request with botocore's model of the service; ValueError for what does not fit."""
    model = botocore.session.get_session().get_service_model(request.service)
    shape = model.operation_model(request.operation).input_shape
    report = ParamValidator().validate(request.parameters, shape)
    if report.has_errors():
        raise ValueError(f"{request.operation}: {report.generate_report()}")


def run_to_end(request: LaunchRequest, region: str, report: Report, poll_s: float = POLL_S) -> None:
    """Launch the cluster, unless it lives already, and wait for its end.

    Raises LaunchError where AWS refuses, or where EMR says that the step failed. EC2 does not say
    how a host's command ended: the step's manifests do.
    """
    client = boto3.client(request.service, region_name=region)
    service = {"emr": _Emr, "ec2": _Ec2}[request.service](client)
    try:
        found = service.find(request.name)
        report(f"{', '.join(found)}: found" if found else f"{request.operation}: sent")
        service.wait(found or service.launch(request.parameters), report, poll_s)
    except (BotoCoreError, ClientError) as error:
        remedy = "check the account file, the credentials and their permissions"
        raise LaunchError(f"{request.operation}: {error}: {remedy}") from error


def _named(name: str) -> list[dict[str, Any]]:
    return [
        {"Name": "tag:Name", "Values": [name.replace("*", r"\*").replace("?", r"\?")]},
        {"Name": "instance-state-name", "Values": _ALIVE_HOSTS},
    ]
