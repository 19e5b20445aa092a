"""Make the request that launches a step's cluster, from its cluster file and the account.

A Spark step is a cluster of EMR with that one step. All others run in a container, on hosts that
end with it. Each cluster ends itself, so what is paid for is what the step takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.aws.account import Account
from infra.aws.host_script import host_script
from infra.aws.step_roles import role_name
from infra.cluster import Cluster
from infra.spark.settings import launch_options

CODE = "/opt/megahour/code"
"""The folder of each host into which the code is copied before a step starts."""

_PYTHON = "/opt/megahour/venv/bin/python"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """LaunchRequest holds the parameters of one operation of a service, as botocore takes them."""

    service: Literal["emr", "ec2"]
    operation: Literal["RunJobFlow", "RunInstances"]
    name: str
    parameters: dict[str, Any]


def emr_request(
    step: str,
    run: str,
    cluster: Cluster,
    account: Account,
    arguments: Sequence[str],
    extras: Sequence[str] = (),
) -> LaunchRequest:
    """Return the request for a cluster of EMR that runs a Spark step with these arguments.

    Its hosts install these extras of megahour, too.
    """
    name = cluster_name(step, run)
    submit = [
        *("spark-submit", "--deploy-mode", "client", *launch_options(cluster)),
        *("--conf", f"spark.pyspark.python={_PYTHON}"),
        *(f"{CODE}/{step}.py", *arguments),
    ]
    driver = account.driver_instance_type if cluster.has_gpus else cluster.instance_type
    groups = [
        _instances("MASTER", driver, 1, cluster.disk_gibibytes),
        _instances("CORE", cluster.instance_type, cluster.num_instances, cluster.disk_gibibytes),
    ]
    parameters = {
        "Name": name,
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
        "BootstrapActions": [_installing(account, extras)],
        "Steps": [
            {
                "Name": step,
                "ActionOnFailure": "TERMINATE_CLUSTER",
                "HadoopJarStep": {"Jar": "command-runner.jar", "Args": submit},
            }
        ],
        "Tags": [
            *_tags(name, step, run),
            {"Key": "for-use-with-amazon-emr-managed-policies", "Value": "true"},
        ],
    }
    return LaunchRequest("emr", "RunJobFlow", name, parameters)


def _installing(account: Account, extras: Sequence[str]) -> dict[str, Any]:
    given = [account.code_uri, CODE, *([",".join(extras)] if extras else [])]
    install = {"Path": f"{account.code_uri}/install_host.sh", "Args": given}
    return {"Name": "install megahour", "ScriptBootstrapAction": install}


def host_request(
    step: str, run: str, cluster: Cluster, account: Account, command: Sequence[str]
) -> LaunchRequest:
    """Return the request for EC2 hosts that run a command in the trainer's image, and then end.

    All hosts start, or none. `command` may have the words of `host_script` in it.
    """
    name = cluster_name(step, run)
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
        "TagSpecifications": [{"ResourceType": "instance", "Tags": _tags(name, step, run)}],
        "UserData": host_script(name, cluster, account, CODE, command),
    }
    return LaunchRequest("ec2", "RunInstances", name, parameters)


def cluster_name(step: str, run: str) -> str:
    """Return the name by which the clusters of a step of a run are found again."""
    return f"megahour {step} {run}"[:256]


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


def _tags(name: str, step: str, run: str) -> list[dict[str, str]]:
    tags = {"Name": name, "megahour:step": step, "megahour:run": run[:256]}
    return [{"Key": key, "Value": value} for key, value in tags.items()]
