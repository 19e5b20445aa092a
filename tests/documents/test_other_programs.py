"""The documents' lines of make, aws and docker have options that exist, and name what exists.

`make` says what it would do. There is no account of AWS and no docker daemon: the options of `aws`
are those of the request that botocore would send, and those of `docker build` name files.
"""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.validate import validate_parameters

from infra.store.uris import normalize_uri
from jobs.roles import template, text_of
from tests.documents.document_commands import ROOT, Command, commands_of, documents
from tests.infra.platforms.service_models import require_valid

COMMANDS = [command for document in documents() for command in commands_of(document)]
VARIABLE = re.compile(r"([A-Z_]+)=(.+)")
NAMED_ROLES = ("RoleName", "InstanceProfileName", "PolicyName", "ManagedPolicyName")


def shown(program: str) -> Any:
    """Parametrize a test by the documents' lines of a program."""
    found = [command for command in COMMANDS if command.program == program]
    return pytest.mark.parametrize("command", found, ids=str)


def options_of(words: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the values after each option."""
    options: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, options[word] = word, []
        else:
            options.setdefault(name, []).append(word)
    return options


def test_the_documents_have_lines_of_each() -> None:
    """Otherwise the tests below would state nothing."""
    assert {"make", "aws", "docker"} <= {command.program for command in COMMANDS}


@shown("make")
def test_make_has_the_targets_and_variables(command: Command) -> None:
    """Each target has a rule, and each variable's value is part of what would be run."""
    words = [word for word in command.words[1:] if not word.startswith("#")]
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done" not in done.stdout
    for found in filter(None, map(VARIABLE.fullmatch, words)):
        name, value = found.groups()
        for part in value.split():  # such as the URIs of several manifests
            assert re.search(rf"(?<!\w){re.escape(part)}(?!\w)", done.stdout), (
                f"{name} changes nothing"
            )


@shown("aws")
def test_aws_lines_are_requests(command: Command) -> None:
    """A stack's request has known capabilities and all parameters; a copy goes into a bucket."""
    _, service, operation, *words = command.words
    check = {("cloudformation", "deploy"): check_stack, ("s3", "sync"): check_copy}
    if (service, operation) in check:
        check[service, operation](tuple(words))
    else:
        check_operation(service, operation, tuple(words))


def check_operation(service: str, operation: str, words: tuple[str, ...]) -> None:
    """The options are an operation's parameters; what a file has is checked where it is made."""
    options = {name: value for name, (value,) in options_of(words).items()}
    client = boto3.client(service, region_name="us-east-1")
    api_name = client.meta.method_to_api_mapping[operation.replace("-", "_")]
    if "--cli-input-json" in options:
        assert options.keys() == {"--cli-input-json"}
        assert api_name in {"RunJobFlow", "RunInstances", "StartJobRun"}
        return
    shape = client.meta.service_model.operation_model(api_name).input_shape
    request = {_camel(name): value for name, value in options.items()}
    require_valid({**request, "clientToken": "drawn"}, shape)


def _camel(option: str) -> str:
    first, *others = option.removeprefix("--").split("-")
    return first + "".join(map(str.capitalize, others))


def check_stack(words: tuple[str, ...]) -> None:
    """`deploy` sends CreateChangeSet, whose parameters are those of the template."""
    options = options_of(words)
    (name,), (path,) = options.pop("--stack-name"), options.pop("--template-file")
    capabilities = options.pop("--capabilities")
    given = dict(pair.split("=", 1) for pair in options.pop("--parameter-overrides", []))
    assert not options
    # The line before has stored there what `megahour roles` prints.
    text = text_of(template({})) if path == "roles.json" else (ROOT / path).read_text()
    request = {
        "StackName": name,
        "ChangeSetName": "deploy",
        "TemplateBody": text,
        "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()],
        "Capabilities": capabilities,
    }
    client = boto3.client("cloudformation", region_name="us-east-1")
    model = client.meta.service_model.operation_model("CreateChangeSet").input_shape
    validate_parameters(request, model)
    assert set(capabilities) <= {*model.members["Capabilities"].member.enum}
    assert re.fullmatch(r"[a-zA-Z][-a-zA-Z0-9]*", name)

    loaded = yaml.load(text, Loader=TemplateLoader)
    parameters = loaded["Parameters"]
    assert set(given) <= set(parameters)
    assert {key for key, each in parameters.items() if "Default" not in each} <= set(given)
    for key, value in given.items():
        assert re.fullmatch(parameters[key].get("AllowedPattern", ".*"), value)
    named = any(
        each["Type"].startswith("AWS::IAM::") and {*NAMED_ROLES} & {*each["Properties"]}
        for each in loaded["Resources"].values()
    )
    assert capabilities == ["CAPABILITY_NAMED_IAM" if named else "CAPABILITY_IAM"]


class TemplateLoader(yaml.SafeLoader):
    """TemplateLoader reads a template of CloudFormation, whose functions are tags."""


TemplateLoader.add_multi_constructor("!", lambda *_: None)


def check_copy(words: tuple[str, ...]) -> None:
    """`sync` has a folder that `make dist` made, and a prefix of a bucket."""
    folder, uri = words
    assert f"--folder {folder}" in (ROOT / "Makefile").read_text()
    assert normalize_uri(uri) == uri
    assert re.match(r"s3://[a-z0-9.-]{3,63}/", uri)


@shown("docker")
def test_docker_builds_what_is_there(command: Command) -> None:
    """The Dockerfile and its context exist, and the tag has the project's version."""
    is_pushed = command.words[1] == "buildx"
    assert command.words[2 if is_pushed else 1] == "build"
    options = options_of(command.words[3 if is_pushed else 2 :])
    if is_pushed:
        assert options.pop("--platform") == ["linux/amd64,linux/arm64"]
        options["--tag"] += options.pop("--push")
    (path,), (tag, context) = options.pop("--file"), options.pop("--tag")
    assert not options
    assert (ROOT / path).is_file()
    assert (ROOT / context).resolve() == ROOT, "what the Dockerfile copies is relative to the root"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image, _, version = tag.rpartition(":")
    assert (Path(image).name, version) == (Path(path).stem, project["version"])
