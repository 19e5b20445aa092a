"""Derive each step's IAM role from its cluster file, as a CloudFormation template.

A role may read, write and delete below the prefixes of the cluster file, and nothing else in S3.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from infra.cluster import Cluster

RUN, CORPUS = "${Bucket}/${RunPrefix}", "${CorpusBucket}/${CorpusPrefix}"
"""The places of a run and of a corpus; the template's parameters fill them in."""

_CODE, _LOGS = "${Bucket}/${CodePrefix}", "${Bucket}/logs"
_ARN = "arn:${AWS::Partition}:s3:::"
_OBJECT = re.compile(r"/[^/{}]+\.\w+$")
"""A prefix with a file's ending is one object, not a folder."""

_PARAMETERS: Mapping[str, tuple[str, str | None, str]] = {
    "Bucket": ("The bucket of runs and code, as storage.yaml makes it", None, r"[a-z0-9.-]{3,63}"),
    "RunPrefix": (
        "The run's folder in it; runs/* permits all runs, each at any depth",
        "runs/mine",
        r"[^/$]+(/[^/$]+)*",
    ),
    "CorpusBucket": ("The bucket of the corpus", None, r"[a-z0-9.-]{3,63}"),
    "CorpusPrefix": (
        "The corpus' folder in it; without corpus.uri in the recipe it is RUN/corpus",
        "runs/mine/corpus",
        r"[^/$]+(/[^/$]+)*",
    ),
    "CodePrefix": ("The folder of the code in Bucket", "code", r"[^/$]+(/[^/$]+)*"),
    "LogGroup": ("The log group of storage.yaml", None, r"[\w./#-]{1,512}"),
}

Document = dict[str, Any]


def roles_template(
    on_emr: Mapping[str, Cluster],
    on_hosts: Mapping[str, Cluster],
    audio: Mapping[str, Sequence[str]],
) -> Document:
    """Return a template with a role and an instance profile for each step, by the step's name.

    Steps `on_emr` are Spark's; those `on_hosts` run in a container, on instances of their own.
    `audio` has by step the places outside of run and corpus, bucket/folder, that it may read.
    """
    of_hosts = {"PolicyDocument": _document(_host_statements())}
    resources: Document = {
        _HOST_POLICY: {"Type": "AWS::IAM::ManagedPolicy", "Properties": of_hosts}
    }
    for step, cluster in {**on_emr, **on_hosts}.items():
        reads = audio.get(step, ())
        if step in on_emr:  # an instance of EMR stores its own logs
            statements = s3_statements(cluster, reads, logs=(_LOGS,))
            resources |= _role(step, statements, (_EC2, _SERVERLESS))
        else:
            statements = s3_statements(cluster, reads)
            if cluster.num_instances > 1:  # to find the leader's address
                statements.append(_allow(["ec2:DescribeInstances"], ["*"]))
            resources |= _role(step, statements, (_EC2,), (_HOST_POLICY,))
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "megahour: a role for each step. Written by megahour roles; do not edit.",
        "Parameters": {
            name: {"Type": "String", "Description": description, "AllowedPattern": form}
            | ({} if default is None else {"Default": default})
            for name, (description, default, form) in _PARAMETERS.items()
        },
        "Resources": resources,
    }


_HOST_POLICY = "HostPolicy"
"""The policy that the roles of hosts share, besides their own."""

_EC2, _SERVERLESS = {"Fn::Sub": "ec2.${AWS::URLSuffix}"}, "emr-serverless.amazonaws.com"
"""The services that take a role: hosts of EC2, and jobs of EMR Serverless."""


def role_name(prefix: str, step: str) -> str:
    """Return the name of a step's role, and of its instance profile."""
    return f"{prefix}-{step}"


def s3_statements(
    cluster: Cluster, audio: Sequence[str] = (), logs: Sequence[str] = ()
) -> list[Document]:
    """Return what a step may do in S3: the requests that ObjectStore makes for its prefixes.

    Its hosts may also copy the code, and recipes and cluster files of the user's own.
    """
    # A folder of audio may have a dot in its name, as files have.
    folders = (f"{each}/" for each in audio)
    readable = (*cluster.readable(RUN, CORPUS), *audio, *folders, _CODE)
    writable = cluster.writable(RUN, CORPUS)
    allowed = (
        (["s3:GetObject"], [each for each in readable if each not in writable]),
        (["s3:GetObject", "s3:PutObject"], writable),
        (["s3:PutObject"], logs),
        (["s3:DeleteObject"], cluster.deletable(RUN, CORPUS)),
    )
    objects = [
        _allow(actions, [_sub(_ARN + each) for each in dict.fromkeys(map(_below, prefixes))])
        for actions, prefixes in allowed
        if prefixes
    ]
    return [*objects, *_listing(readable)]


def _listing(prefixes: Sequence[str]) -> list[Document]:
    """Return, for each bucket, which folders may be listed."""
    keys: dict[str, list[Document]] = {}
    for each in dict.fromkeys(map(_below, prefixes)):
        bucket, _, pattern = each.partition("/")
        keys.setdefault(bucket, []).append(_sub(pattern))
    # IfExists: S3 answers 404 for an absent object, not 403, to those who may list its bucket, and
    # such a question has no prefix. A listing without a prefix shows names of keys, no bytes.
    return [
        _allow(["s3:ListBucket"], [_sub(_ARN + bucket)])
        | {"Condition": {"StringLikeIfExists": {"s3:prefix": patterns}}}
        for bucket, patterns in keys.items()
    ]


def _host_statements() -> list[Document]:
    """Return what each host needs besides: the image, and a place for its logs."""
    place = "${AWS::Partition}:%s:${AWS::Region}:${AWS::AccountId}:"
    pull = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    write = ["logs:CreateLogStream", "logs:PutLogEvents"]
    group = "arn:" + place % "logs" + "log-group:${LogGroup}:*"
    return [
        _allow(["ecr:GetAuthorizationToken"], ["*"]),  # it knows no resources
        _allow(pull, [_sub("arn:" + place % "ecr" + "repository/megahour/*")]),
        _allow(write, [_sub(group)]),
    ]


def _role(
    step: str, statements: Sequence[Document], services: Sequence[Any], shared: Sequence[str] = ()
) -> Document:
    name = "".join(part.capitalize() for part in step.split("_"))
    named = _sub(role_name("${AWS::StackName}", step))
    by_services = {
        "Effect": "Allow",
        "Principal": {"Service": list(services)},
        "Action": "sts:AssumeRole",
    }
    policy = {"PolicyName": step, "PolicyDocument": _document(statements)}
    trust = _document([by_services])
    role = {"RoleName": named, "AssumeRolePolicyDocument": trust, "Policies": [policy]}
    if shared:
        role["ManagedPolicyArns"] = [{"Ref": name} for name in shared]
    profile = {"InstanceProfileName": named, "Roles": [{"Ref": f"{name}Role"}]}
    return {
        f"{name}Role": {"Type": "AWS::IAM::Role", "Properties": role},
        f"{name}Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": profile},
    }


def _document(statements: Sequence[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _below(prefix: str) -> str:
    return prefix if _OBJECT.search(prefix) else f"{prefix.rstrip('/')}/*"


def _allow(actions: Sequence[str], resources: Sequence[Any]) -> Document:
    return {"Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def _sub(text: str) -> Document:
    return {"Fn::Sub": text}
