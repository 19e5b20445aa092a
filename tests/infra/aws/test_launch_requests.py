"""Launch requests have the cluster file's machines, and parameters that AWS knows."""

import json
import os
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.aws.cluster_launch import (
    CODE,
    emr_request,
    host_request,
    load_account,
    run_to_end,
    validate,
)
from infra.cluster import load_cluster
from jobs.request_cluster import make_request
from jobs.run_table import STEPS
from tests.job_programs import RunJob, Said

ACCOUNT = str(Path(__file__).with_name("account.toml"))
RUN = "s3://megahour-bucket/runs/1"
MANIFEST = ("--manifest", "labelled=s3://speech/labelled.jsonl", "--manifest", "s3://speech/days")
TEXTS = ("--lexicon", "s3://speech/lexicon.txt", "--language-model", "s3://speech/lm.arpa.gz")

FAKE_HOST = """\
#!/bin/sh
case "$(basename "$0") $*" in
"curl "*instance-id) echo i-7 ;;
"curl "*reservation-id) echo r-9 ;;
"aws ec2 describe-instances"*) echo 10.0.0.5 ;;
"docker run"*) shift; printf '%s\\n' "$@" > "$SAID/docker"; exit "${DOCKER_CODE:-0}" ;;
"docker login"*) cat > "$SAID/login" ;;
"aws ecr"*) echo password ;;
"aws s3"*) printf '%s\\n' "$@" > "$SAID/copied" ;;
shutdown*) printf '%s\\n' "$@" > "$SAID/shutdown" ;;
esac
"""
"""Programs of a host, each of which notes its arguments."""


def request(run_job: RunJob, step: str, *options: str) -> Said:
    shared = ("--step", step, "--recipe", "hours_1m", "--run", RUN)
    return run_job("request_cluster", *shared, "--account", ACCOUNT, *options)


@pytest.mark.parametrize("step", STEPS)
def test_parameters_are_botocores(run_job: RunJob, step: str) -> None:
    """Each step's request passes botocore's model of the service, and has the file's instances."""
    said = request(run_job, step, *(MANIFEST if step == "ingest" else ()))
    assert (said.code, said.err) == (0, "")
    parameters = json.loads(said.out)
    cluster = load_cluster(step)
    if STEPS[step].is_on_spark:
        _, core = parameters["Instances"]["InstanceGroups"]
        machines = core["InstanceType"], core["InstanceCount"]
        assert parameters["JobFlowRole"] == f"megahour-roles-{step}"
        assert not parameters["Instances"]["KeepJobFlowAliveWhenNoSteps"]
    else:
        machines = parameters["InstanceType"], parameters["MinCount"]
        assert parameters["MinCount"] == parameters["MaxCount"]
        assert parameters["IamInstanceProfile"] == {"Name": f"megahour-roles-{step}"}
    assert machines == (cluster.instance_type, cluster.num_instances)


def test_what_botocore_does_not_know_is_refused() -> None:
    """A wrong name and a wrong type are both named."""
    cluster, account = load_cluster("align"), load_account(ACCOUNT)
    good = emr_request("align", RUN, cluster, account, [])
    bad = replace(good, parameters={**good.parameters, "Nmae": "x", "LogUri": 3})
    with pytest.raises(ValueError, match=r'(?s)LogUri, value: 3.*|Unknown parameter.*"Nmae"'):
        validate(bad)


def host_run(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a host's script with fake programs in place of AWS's, docker and shutdown."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("aws", "curl", "docker", "shutdown"):
        (programs / name).write_text(FAKE_HOST)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"
    local = script.replace("/opt/megahour", str(folder / "opt"))
    variables = {"PATH": path, "SAID": str(folder), **environment}
    command = ["bash", "-c", local]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_each_host_finds_the_leader_and_starts_its_ranks(tmp_path: Path) -> None:
    """The script of 8 hosts joins 64 ranks at the first host's address, whatever is in --set."""
    setting = "student.seed=5; touch $(oops)'"
    given = {"step": "train_student", "recipe": "hours_1m", "run": RUN, "cluster": None}
    arguments = Namespace(**given, set=[setting], account=ACCOUNT, extends="", manifest=None)
    made = make_request(arguments, load_cluster("train_student"))
    script = made.parameters["UserData"]
    done = host_run(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "docker").read_text().splitlines()
    image = words.index(load_account(ACCOUNT).trainer_image)
    expected = (
        "python -m training.distributed.rank_launcher --nnodes 8 --rdzv-backend c10d "
        "--rdzv-endpoint 10.0.0.5:29400 --rdzv-id r-9 --nproc-per-node 8 --max-restarts 1 "
        f"--module -- jobs.train_student --recipe hours_1m --run {RUN}"
    )
    assert words[image + 1 :] == [*expected.split(), "--set", setting]
    assert words[words.index("--gpus") + 1] == "all"
    assert "awslogs-stream=r-9/i-7" in words
    assert (tmp_path / "login").read_text() == "password\n"
    assert (tmp_path / "shutdown").read_text().split() == ["-h", "now"]


def test_a_host_ends_also_when_its_step_fails(run_job: RunJob, tmp_path: Path) -> None:
    """A container that fails does not leave a host that costs."""
    script = json.loads(request(run_job, "certify").out)["UserData"]
    done = host_run(tmp_path, script, DOCKER_CODE="1")
    assert done.returncode == 1
    assert (tmp_path / "shutdown").exists()
    words = (tmp_path / "docker").read_text().splitlines()
    assert words[-6:] == ["-m", "jobs.certify", "--recipe", "hours_1m", "--run", RUN]
    assert "--gpus" not in words


def test_files_of_your_own_lie_with_the_code(run_job: RunJob, tmp_path: Path) -> None:
    """A recipe and a cluster file are named by their places on the hosts."""
    cluster = tmp_path / "mine.toml"
    cluster.write_text((Path("infra/clusters") / "align.toml").read_text())
    said = request(run_job, "align", "--cluster", str(cluster))
    (step,) = json.loads(said.out)["Steps"]
    words = step["HadoopJarStep"]["Args"]
    assert words[words.index("--cluster") + 1] == "/opt/megahour/code/mine.toml"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--run", "runs/mine"), r"runs/mine: need s3://bucket/prefix"),
        (("--step", "ingest"), "--step ingest: need --manifest: a directory is copied where it"),
        (MANIFEST, "--step align: --manifest is for ingest alone"),
        (("--dev-share", "0.1"), "--step align: --dev-share is for ingest alone"),
        (("--placements", "2"), "--step align: --placements is for ingest alone"),
        (("--step", "ingest", *MANIFEST[2:], "--dev-share", "0.1"), "need --manifest labelled=URI"),
        (("--step", "ingest", "--manifest", "day.jsonl"), "/day.jsonl: need s3://bucket/key, for"),
        (("--step", "ingest", *MANIFEST, "--lexicon", "x.txt"), "x.txt: need s3://bucket/key, for"),
        (("--step", "ingest", "--manifest", "x=s3://b/m"), "--manifest x=s3://b/m: need [SUBSET=]"),
        (("--cluster", "demo"), "cluster with master local[2] is this computer"),
        (("--kubernetes", "k8s://https://host"), "need --account FILE for AWS, or --kubernetes"),
        (("--account", "nowhere.toml"), "nowhere.toml: cannot be read"),
    ],
)
def test_what_no_host_could_do_is_refused(
    run_job: RunJob, options: tuple[str, ...], message: str
) -> None:
    """Exit code 2, and one line with the remedy."""
    said = request(run_job, "align", *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_kubernetes_gets_a_command_line(run_job: RunJob) -> None:
    """spark-submit's line has the image, the driver's memory, and GPUs where the file has them."""
    shared = ("--recipe", "hours_1m", "--run", RUN, "--kubernetes", "k8s://https://host:443")
    said = run_job("request_cluster", "--step", "generate_targets", *shared, "--image", "m:1")
    words = shlex.split(said.out)
    assert words[:5] == [
        *("spark-submit", "--master", "k8s://https://host:443", "--driver-memory", "8g")
    ]
    assert "spark.kubernetes.container.image=m:1" in words
    assert "spark.executor.resource.gpu.amount=8" in words
    assert "local:///opt/megahour/jobs/generate_targets.py" in words
    said = run_job("request_cluster", "--step", "align", *shared)
    assert (said.code, "need --image REPOSITORY:TAG" in said.err) == (2, True)
    said = run_job("request_cluster", "--step", "report", *shared, "--image", "m:1")
    assert "--kubernetes: report: need a Spark step: ingest, select_utterances, " in said.err


def test_manifests_are_ingested_on_a_cluster(run_job: RunJob) -> None:
    """On EMR and on Kubernetes ingest gets the manifests, and what lies beside them."""
    share = ("--manifest", "labelled=s3://speech/spoken.jsonl", "--dev-share", "0.1")
    placed = ("--placements", "2", "--heldout-placements", "clean,DP1", "--placement-seed", "3")
    options = (*MANIFEST, *TEXTS, "--format", "table", "--speaker-buckets", "64", *share, *placed)
    asked = json.loads(request(run_job, "ingest", *options).out)
    (step,), (install,) = asked["Steps"], asked["BootstrapActions"]
    assert install["ScriptBootstrapAction"]["Args"][1:] == [CODE, "demo"]
    plain = json.loads(request(run_job, "ingest", *MANIFEST).out)["BootstrapActions"]
    assert plain[0]["ScriptBootstrapAction"]["Args"][1:] == [CODE, "spark"]
    on_emr = step["HadoopJarStep"]["Args"]
    shared = ("--recipe", "hours_1m", "--run", RUN)
    kubernetes = ("--kubernetes", "k8s://https://host:443", "--image", "m:1")
    said = run_job("request_cluster", "--step", "ingest", *shared, *kubernetes, *options)
    for words, folder in ((on_emr, CODE), (shlex.split(said.out), "local:///opt/megahour/jobs")):
        given = words[words.index(f"{folder}/ingest.py") + 1 :]
        assert given[:4] == [*shared]
        pairs = set(zip(given[4::2], given[5::2], strict=True))
        passed = set(zip(options[::2], options[1::2], strict=True))
        assert pairs == passed


def launched(service: str, step: str) -> Any:
    cluster, account = load_cluster(step), load_account(ACCOUNT)
    make = emr_request if service == "emr" else host_request
    # Two instances are too few to exclude one of them.
    return make(step, RUN, replace(cluster, num_instances=2, spark={}), account, ["true"])


def test_emr_clusters_are_found_again_and_their_ends_are_known(s3_bucket: str) -> None:
    """A second call waits for the first one's cluster; a cluster that was ended is an error."""
    del s3_bucket  # it points boto3 to moto's server
    emr = boto3.client("emr", region_name="us-east-1")
    request = launched("emr", "align")
    said: list[str] = []

    def terminate(text: str) -> None:
        """End the cluster as soon as it is reported."""
        said.append(text)
        for each in emr.list_clusters(ClusterStates=["WAITING", "RUNNING"])["Clusters"]:
            emr.set_termination_protection(JobFlowIds=[each["Id"]], TerminationProtected=False)
            emr.terminate_job_flows(JobFlowIds=[each["Id"]])

    alive = emr.run_job_flow(**request.parameters)["JobFlowId"]
    run_to_end(request, "us-east-1", terminate, poll_s=0.01)
    assert said[0] == f"{alive}: found"
    assert len(emr.list_clusters()["Clusters"]) == 1


def test_hosts_are_launched_once_and_waited_for(s3_bucket: str) -> None:
    """The first call launches two hosts, and returns when both have ended."""
    del s3_bucket
    ec2 = boto3.client("ec2", region_name="us-east-1")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    subnet = ec2.describe_subnets()["Subnets"][0]
    of_vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}]
    group = ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"][0]["GroupId"]
    profile = {"Name": "megahour-roles-train_teacher"}
    boto3.client("iam").create_instance_profile(InstanceProfileName=profile["Name"])
    request = launched("ec2", "train_teacher")
    places: Mapping[str, Any] = {
        "ImageId": image,
        "SubnetId": subnet["SubnetId"],
        "SecurityGroupIds": [group],
    }
    request = replace(request, parameters={**request.parameters, **places})
    said: list[str] = []

    def end(text: str) -> None:
        said.append(text)
        hosts = [each for each in text.partition(": ")[0].split(", ") if each.startswith("i-")]
        if hosts and "terminated" not in text:
            ec2.terminate_instances(InstanceIds=hosts)

    run_to_end(request, "us-east-1", end, poll_s=0.01)
    assert said[0] == "RunInstances: sent"
    assert said[-1].endswith(": 2 terminated")
