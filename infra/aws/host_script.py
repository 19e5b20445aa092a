"""Write the script that an EC2 host runs at its start: one container, then the host's end."""

import re
import shlex
from collections.abc import Sequence

from infra.aws.account import Account
from infra.cluster import Cluster

LEADER, RESERVATION = "@leader@", "@reservation@"
"""Words of a command that each host replaces: the address of the first host, and their name."""

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


def host_script(
    name: str, cluster: Cluster, account: Account, code: str, command: Sequence[str]
) -> str:
    """Return the script of every host of a cluster; EC2 takes at most 16 kB of it.

    The machine image must have docker, the AWS command line and, for GPUs, NVIDIA's runtime.
    """
    finds_leader = cluster.num_instances > 1
    script = _SCRIPT.format(
        name=re.sub(r"\s+", " ", name),
        metadata=_METADATA,
        region=account.region,
        find_leader=_FIND_LEADER.format(region=account.region) if finds_leader else "leader=",
        code=code,
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
