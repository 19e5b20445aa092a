"""Read what launch requests need to know of an AWS account: stacks' outputs, network, images."""

from dataclasses import dataclass
from typing import Annotated

from infra.configuration import read_record, read_toml
from infra.ranges import Items, Text, check_ranges

_Bucket = Annotated[
    str, Text(8, 1024, r"s3://[a-z0-9.-]{3,63}(/[\w.-]+)*", "s3://megahour-bucket/code")
]
_Image = Annotated[
    str, Text(3, 400, r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+|@sha256:[0-9a-f]{64})", "megahour:1")
]


@dataclass(frozen=True)
class Account:
    """Account names what exists in an account before a cluster starts, as its TOML file does.

    `code_uri` holds what `make dist` wrote, and `role_prefix` is the name of the stack of roles.
    `driver_instance_type` is the driver's host where a cluster's own instances have GPUs.
    """

    region: Annotated[str, Text(9, 30, r"[a-z]{2}(-[a-z]+)+-\d", "us-east-1")]
    subnet: Annotated[str, Text(10, 40, r"subnet-[0-9a-f]+", "subnet-0a1b2c3d")]
    security_groups: Annotated[
        tuple[Annotated[str, Text(6, 40, r"sg-[0-9a-f]+", "sg-0a1b2c3d")], ...], Items(1, 5)
    ]
    code_uri: _Bucket
    logs_uri: _Bucket
    log_group: Annotated[str, Text(1, 512, r"[\w./#-]+", "/megahour/megahour")]
    role_prefix: Annotated[str, Text(1, 40, r"[\w+=,.@-]+", "megahour-roles")]
    emr_service_role: Annotated[str, Text(1, 200, r"[\w+=,.@:/-]+", "megahour-EmrServiceRole-1A")]
    emr_release: Annotated[str, Text(8, 40, r"emr-(spark-)?\d+\.\d+\.\d+(-\w+)?", "emr-7.0.0")]
    trainer_image: _Image
    machine_image: Annotated[str, Text(8, 40, r"ami-[0-9a-f]+", "ami-0a1b2c3d")]
    driver_instance_type: Annotated[str, Text(1, 100)] = "m5.4xlarge"

    __post_init__ = check_ranges


def load_account(path: str) -> Account:
    """Read an account's TOML file; ConfigurationError if `read_record` refuses it."""
    return read_record(Account, read_toml(path), path)
