"""Amazon EMR on EC2: a Spark step is a cluster's only step; any other runs on EC2 hosts.

The hosts run a container, and shut down when it ends. So every cluster ends itself, and only the
step's own time is paid for. The request is made of the step's cluster file and the account file,
which holds the outputs of our CloudFormation stacks, the network and the machine images.

A cluster is found by its name. If the caller is killed and started again, it waits for the cluster
that it launched before, and does not launch and pay for a second one.
"""

import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.validate import ParamValidator

from infra.aws.step_roles import role_name
from infra.cluster import Cluster
from infra.platforms.platform import CodeUri, Image, Region, RolePrefix, StepLaunch
from infra.settings import Items, Text, check_ranges
from infra.spark.session import launch_options

Release = Annotated[
    str,
    # EMR 7 has Spark 3.5; releases for Spark 4 alone are named emr-spark-8.
    Text(8, 40, r"emr-(7\.\d+|spark-\d+\.\d+)\.\d+", "emr-7.13.0, or emr-spark-8.0.0"),
]


@dataclass(frozen=True)
class Emr:
    """Emr names what exists in an account before a cluster starts.

    `driver_instance_type` is the driver's host where a cluster's own instances have GPUs.
    """

    region: Region
    subnet: Annotated[str, Text(10, 40, r"subnet-[0-9a-f]+", "subnet-0a1b2c3d")]
    security_groups: Annotated[
        tuple[Annotated[str, Text(6, 40, r"sg-[0-9a-f]+", "sg-0a1b2c3d")], ...], Items(1, 5)
    ]
    code_uri: CodeUri
    logs_uri: CodeUri
    log_group: Annotated[str, Text(1, 512, r"[\w./#-]+", "/megahour/megahour")]
    role_prefix: RolePrefix
    emr_service_role: Annotated[str, Text(1, 200, r"[\w+=,.@:/-]+", "megahour-EmrServiceRole-1A")]
    emr_release: Release
    trainer_image: Image
    machine_image: Annotated[str, Text(8, 40, r"ami-[0-9a-f]+", "ami-0a1b2c3d")]
    driver_instance_type: Annotated[str, Text(1, 100)] = "m5.4xlarge"

    __post_init__ = check_ranges

    def request(self, launch: StepLaunch) -> str:
        """Return the parameters of RunJobFlow or RunInstances, as the AWS command line takes them.

        Raises ValueError for what botocore's model of the service does not know.
        """
        request = self.launch_request(launch)
        validate(request)
        return json.dumps(request.parameters, indent=2)

    def launch_request(self, launch: StepLaunch) -> "LaunchRequest":
        """Return the request for the step's cluster, which `run_to_end` sends."""
        if launch.starter == "Spark":
            return emr_request(launch, self)
        return host_request(launch, self, launch.host_command(LEADER, RESERVATION))


LEADER, RESERVATION = "@leader@", "@reservation@"
"""Words of a command that each host replaces: the address of the first host, and their name."""

CODE = "/opt/megahour/code"
"""The folder of each host into which the code is copied before a step starts."""

_METADATA = "http://169.254.169.254/latest"

_SCRIPT = """\
#!/bin/bash
# {name}: run one command in a container, then end this host.
set -euo pipefail
trap 'shutdown -h now' EXIT
token=$(curl -sSf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 600' {metadata}/api/token)
ask() {{ curl -sSf -H "X-aws-ec2-metadata-token: $token" "{metadata}/meta-data/$1"; }}
host=$(ask instance-id)
reservation=$(ask reservation-id)
{find_leader}
mkdir -p {code}
aws s3 cp --region {region} --recursive --only-show-errors {code_uri} {code}
aws ecr get-login-password --region {region} |
  docker login --username AWS --password-stdin {registry}
docker run --rm --network host --ipc host{gpus} --volume {code}:{code}:ro \\
  --env AWS_DEFAULT_REGION={region} --log-driver awslogs --log-opt awslogs-region={region} \\
  --log-opt awslogs-group={log_group} --log-opt awslogs-stream="$reservation/$host" \\
  {image} {command}
"""

# The hosts of one request have one reservation, and are numbered in it.
_FIND_LEADER = """\
leader=$(aws ec2 describe-instances --region {region} \\
  --filters "Name=reservation-id,Values=$reservation" --output text \\
  --query 'sort_by(Reservations[].Instances[], &AmiLaunchIndex)[0].PrivateIpAddress')"""


def host_script(name: str, cluster: Cluster, account: Emr, command: Sequence[str]) -> str:
    """Return the script of every host of a cluster; EC2 takes at most 16 kB of it.

    The machine image must have docker, the AWS command line and, for GPUs, NVIDIA's runtime.
    """
    finds_leader = cluster.num_instances > 1
    script = _SCRIPT.format(
        name=re.sub(r"\s+", " ", name),
        metadata=_METADATA,
        region=account.region,
        find_leader=_FIND_LEADER.format(region=account.region) if finds_leader else "leader=",
        code=CODE,
        code_uri=account.code_uri,
        registry=account.trainer_image.partition("/")[0],
        gpus=" --gpus all" if cluster.gpus_per_instance else "",
        log_group=account.log_group,
        image=account.trainer_image,
        command=" ".join(map(_word, command)),
    )
    if len(script.encode()) > 16_384:
        raise ValueError(
            f"a host's script of {len(script.encode())} bytes: need at most 16384: put settings "
            "into a recipe of your own instead of --set"
        )
    return script


def _word(word: str) -> str:
    """Quote a word for the shell, with what each host fills in outside of the quotes."""
    pieces = re.split(f"({LEADER}|{RESERVATION})", word)
    values = {LEADER: '"$leader"', RESERVATION: '"$reservation"'}
    return "".join(values.get(piece) or shlex.quote(piece) for piece in pieces if piece) or "''"


_PYTHON = "/opt/megahour/venv/bin/python"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """LaunchRequest holds the parameters of one operation of a service, as botocore takes them."""

    service: Literal["emr", "ec2", "emr-serverless"]
    operation: Literal["RunJobFlow", "RunInstances", "StartJobRun"]
    name: str
    parameters: dict[str, Any]


def emr_request(launch: StepLaunch, account: Emr) -> LaunchRequest:
    """Return the request for a cluster of EMR that runs a Spark step.

    Its hosts install what the step requires. Spark is the release's own.
    """
    step, cluster = launch.step, launch.cluster
    submit = [
        *("spark-submit", "--deploy-mode", "client", *launch_options(cluster)),
        *("--conf", f"spark.pyspark.python={_PYTHON}"),
        *(f"{CODE}/{step}.py", *launch.arguments),
    ]
    driver = account.driver_instance_type if cluster.has_gpus else cluster.instance_type
    groups = [
        _instances("MASTER", driver, 1, cluster.disk_gibibytes),
        _instances("CORE", cluster.instance_type, cluster.num_instances, cluster.disk_gibibytes),
    ]
    install = {
        "Path": f"{account.code_uri}/install_host.sh",
        "Args": [account.code_uri, CODE, *launch.requirements],
    }
    parameters = {
        "Name": launch.title,
        "ReleaseLabel": account.emr_release,
        "Applications": [{"Name": "Spark"}],
        "LogUri": f"{account.logs_uri}/",
        "ServiceRole": account.emr_service_role,
        "JobFlowRole": role_name(account.role_prefix, step),
        "Instances": {
            "InstanceGroups": groups,
            "Ec2SubnetId": account.subnet,
            "KeepJobFlowAliveWhenNoSteps": False,
            "TerminationProtected": False,
        },
        "BootstrapActions": [{"Name": "install megahour", "ScriptBootstrapAction": install}],
        "Steps": [
            {
                "Name": step,
                "ActionOnFailure": "TERMINATE_CLUSTER",
                "HadoopJarStep": {"Jar": "command-runner.jar", "Args": submit},
            }
        ],
        "Tags": [
            *_tags(launch),
            {"Key": "for-use-with-amazon-emr-managed-policies", "Value": "true"},
        ],
    }
    return LaunchRequest("emr", "RunJobFlow", launch.title, parameters)


def host_request(launch: StepLaunch, account: Emr, command: Sequence[str]) -> LaunchRequest:
    """Return the request for EC2 hosts that run a command in the trainer's image, and then end.

    All hosts start, or none. `command` may have the words of `host_script` in it.
    """
    step, cluster = launch.step, launch.cluster
    root = {
        "VolumeSize": cluster.disk_gibibytes,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    parameters = {
        "ImageId": account.machine_image,
        "InstanceType": cluster.instance_type,
        "MinCount": cluster.num_instances,
        "MaxCount": cluster.num_instances,
        "SubnetId": account.subnet,
        "SecurityGroupIds": list(account.security_groups),
        "IamInstanceProfile": {"Name": role_name(account.role_prefix, step)},
        "InstanceInitiatedShutdownBehavior": "terminate",
        # Two hops: the container asks for its role's credentials, too.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": root}],
        "TagSpecifications": [{"ResourceType": "instance", "Tags": _tags(launch)}],
        "UserData": host_script(launch.title, cluster, account, command),
    }
    return LaunchRequest("ec2", "RunInstances", launch.title, parameters)


def _instances(role: str, kind: str, count: int, gibibytes: int) -> dict[str, Any]:
    volume = {"VolumeType": "gp3", "SizeInGB": gibibytes}
    disks = {"EbsBlockDeviceConfigs": [{"VolumeSpecification": volume, "VolumesPerInstance": 1}]}
    return {
        "Name": "driver" if role == "MASTER" else "executors",
        "InstanceRole": role,
        "InstanceType": kind,
        "InstanceCount": count,
        "EbsConfiguration": disks,
    }


def _tags(launch: StepLaunch) -> list[dict[str, str]]:
    tags = {"Name": launch.title, "megahour:step": launch.step, "megahour:run": launch.run[:256]}
    return [{"Key": key, "Value": value} for key, value in tags.items()]


POLL_S = 30.0
# One that ends already is not waited for: a second attempt would fail with it.
_ALIVE = ["STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING"]
_ALIVE_HOSTS = ["pending", "running"]


class LaunchError(RuntimeError):
    """LaunchError says what AWS refused, or how a cluster ended, and a remedy."""


@dataclass(frozen=True, slots=True)
class _Emr:
    """_Emr finds the clusters of a name, launches one, and describes how it is."""

    client: Any

    def find(self, name: str) -> list[str]:
        """Return the ids of the living clusters of this name."""
        pages = self.client.get_paginator("list_clusters").paginate(ClusterStates=_ALIVE)
        return [each["Id"] for page in pages for each in page["Clusters"] if each["Name"] == name]

    def launch(self, parameters: dict[str, Any]) -> list[str]:
        return [self.client.run_job_flow(**parameters)["JobFlowId"]]

    def state(self, ids: Sequence[str]) -> tuple[str, bool]:
        """Describe how they are, and whether they have ended; LaunchError for a bad end."""
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


@dataclass(frozen=True, slots=True)
class _Ec2:
    """_Ec2 does the same with hosts."""

    client: Any

    def find(self, name: str) -> list[str]:
        alive = {"Name": "instance-state-name", "Values": _ALIVE_HOSTS}
        plain = name.replace("*", r"\*").replace("?", r"\?")
        hosts = self._hosts([{"Name": "tag:Name", "Values": [plain]}, alive])
        return [each["InstanceId"] for each in hosts]

    def launch(self, parameters: dict[str, Any]) -> list[str]:
        ids = [each["InstanceId"] for each in self.client.run_instances(**parameters)["Instances"]]
        # Hosts that EC2 does not list yet would pass for ended ones.
        self.client.get_waiter("instance_exists").wait(InstanceIds=ids)
        return ids

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


def run_to_end(
    request: LaunchRequest, region: str, report: Callable[[str], None], poll_s: float = POLL_S
) -> None:
    """Launch the cluster, unless it lives already, and wait for its end.

    Raises LaunchError where AWS refuses, or where EMR says that the step failed. EC2 does not say
    how a host's command ended: the step's manifests do.
    """
    kind = _Emr if request.service == "emr" else _Ec2
    service = kind(boto3.client(request.service, region_name=region))
    # RunJobFlow has no token of the client: asked again, EMR would launch another cluster.
    once = Config(retries={"total_max_attempts": 1})
    launching = kind(boto3.client(request.service, region_name=region, config=once))
    try:
        found = service.find(request.name)
        report(f"{', '.join(found)}: found" if found else f"{request.operation}: sent")
        ids = found or launching.launch(request.parameters)
        before = ""
        while True:
            state, is_over = service.state(ids)
            if state != before:
                report(f"{', '.join(ids)}: {state}")
                before = state
            if is_over:
                return
            time.sleep(poll_s)
    except (BotoCoreError, ClientError) as error:
        remedy = (
            "check the account file, the credentials and their permissions, and give the same "
            "command again: it waits for the cluster if one was launched"
        )
        raise LaunchError(f"{request.operation}: {error}: {remedy}") from error
