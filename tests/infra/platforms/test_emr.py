"""Launch requests have the cluster file's machines, and parameters that AWS knows."""

import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest

import infra
from infra.cluster import load_cluster
from infra.platforms.accounts import load_account
from infra.platforms.emr import CODE, Emr, LaunchError, LaunchRequest, run_to_end, validate
from infra.platforms.platform import StepLaunch
from infra.settings import ConfigurationError
from jobs.run_table import STEPS
from tests.infra.platforms.account_files import account_file, account_text
from tests.infra.platforms.service_models import require_valid
from tests.job_programs import RunJob, Said
from tests.s3_server import set_endpoint

ACCOUNT = account_file("emr")
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
    service, operation = (
        ("emr", "RunJobFlow") if STEPS[step].is_on_spark else ("ec2", "RunInstances")
    )
    model = boto3.client(service, region_name="us-east-1").meta.service_model
    require_valid(parameters, model.operation_model(operation).input_shape)
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
    good = launch_request("realign")
    bad = replace(good, parameters={**good.parameters, "Nmae": "x", "LogUri": 3})
    with pytest.raises(ValueError, match=r'(?s)LogUri, value: 3.*|Unknown parameter.*"Nmae"'):
        validate(bad)


@pytest.mark.parametrize("label", ["emr-7.13.0", "emr-spark-8.0.0", "emr-spark-8.1.0"])
def test_releases_have_their_labels(tmp_path: Path, label: str) -> None:
    """EMR 7, and those of Spark 4."""
    assert load_account(with_release(tmp_path, label)).emr_release == label


@pytest.mark.parametrize("label", ["emr-8.0.0", "emr-spark-7.0.0-preview", "7.13.0", "emr-6.15.0"])
def test_releases_that_there_are_not_are_refused(tmp_path: Path, label: str) -> None:
    """The message has examples; EMR 6 has Spark 3.4 and older."""
    with pytest.raises(ConfigurationError, match=r"emr_release = .*such as 'emr-7.13.0"):
        load_account(with_release(tmp_path, label))


def with_release(folder: Path, label: str) -> str:
    path = folder / "emr.toml"
    path.write_text(account_text("emr").replace("emr-spark-8.0.0", label))
    return str(path)


def launch_request(step: str, num_instances: int = 2) -> LaunchRequest:
    # Two instances are too few to exclude one of them.
    cluster = replace(load_cluster(step), num_instances=num_instances, spark={})
    account = load_account(ACCOUNT)
    assert isinstance(account, Emr)
    row = STEPS[step]
    starter = "Spark" if row.is_on_spark else row.starter
    return account.launch_request(StepLaunch(step, RUN, starter, cluster, ("true",)))


FAKE_EMR_HOST = """\
#!/bin/sh
case "$(basename "$0")" in
aws) touch "$SAID/code/megahour-0.1.0-cp311-cp311-linux_x86_64.whl" ;;
sudo) case "$1" in dnf) echo "$*" > "$SAID/dnf" ;; mkdir) "$@" ;; esac ;;
python3.11) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
python) echo "$*" >> "$SAID/pip" ;;
esac
"""


def test_a_host_of_emr_installs_the_step_without_spark(tmp_path: Path) -> None:
    """The wheel's Python makes an environment; pip gets the wheel, then what the step requires."""
    for name in ("aws", "sudo", "python3.11", "chown"):
        (tmp_path / name).write_text(FAKE_EMR_HOST)
        (tmp_path / name).chmod(0o755)
    install = launch_request("extract_features").parameters["BootstrapActions"][0]
    code_uri, _, *requirements = install["ScriptBootstrapAction"]["Args"]
    assert not any(each.startswith("pyspark") for each in requirements)
    script = Path(infra.__file__).parent / "aws" / "install_host.sh"
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SAID": str(tmp_path)}
    command = ["bash", str(script), code_uri, f"{tmp_path}/code", *requirements]
    subprocess.run(command, env=variables, check=True)
    wheel, needed = (tmp_path / "pip").read_text().splitlines()
    assert wheel.startswith("-m pip install --quiet --no-deps ")
    assert needed.split()[-len(requirements) :] == requirements
    assert not (tmp_path / "dnf").exists(), "the host has this Python"


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


def test_each_host_finds_the_leader_and_starts_its_ranks(run_job: RunJob, tmp_path: Path) -> None:
    """The script of 8 hosts joins 64 ranks at the first host's address, whatever is in --set."""
    setting = "corpus.uri=s3://speech/it's; touch $(oops)"
    said = request(run_job, "train_student", "--set", setting)
    script = json.loads(said.out)["UserData"]
    done = host_run(tmp_path, script)
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "docker").read_text().splitlines()
    image = next(n for n, word in enumerate(words) if "/megahour/trainer:" in word)
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
    cluster.write_text((Path("infra/clusters") / "realign.toml").read_text())
    said = request(run_job, "realign", "--cluster", str(cluster))
    (step,) = json.loads(said.out)["Steps"]
    words = step["HadoopJarStep"]["Args"]
    assert words[words.index("--cluster") + 1] == "/opt/megahour/code/mine.toml"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--run", "runs/mine"), r"runs/mine: need s3://bucket/prefix"),
        (("--step", "ingest"), "--step ingest: need --manifest: a directory is copied where it"),
        (MANIFEST, "--step realign: --manifest is for ingest alone"),
        (("--dev-share", "0.1"), "--step realign: --dev-share is for ingest alone"),
        (("--placements", "2"), "--step realign: --placements is for ingest alone"),
        (("--step", "ingest", *MANIFEST[2:], "--dev-share", "0.1"), "need --manifest labelled=URI"),
        (("--step", "ingest", "--manifest", "day.jsonl"), "/day.jsonl: need s3://bucket/key, for"),
        (("--step", "ingest", *MANIFEST, "--lexicon", "x.txt"), "x.txt: need s3://bucket/key, for"),
        (("--step", "ingest", "--manifest", "x=s3://b/m"), "--manifest x=s3://b/m: need [SUBSET=]"),
        (("--cluster", "demo"), "cluster with master local[2] is this computer"),
        (("--account", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (
            ("--step", "train_student", "--set", "student.trainer.ranks_per_leader=7"),
            "student: trainer: ranks_per_leader = 7: need a divisor of 64",
        ),
        (("--extends", "s3://bucket/others/x"), "--extends s3://bucket/others/x: need a run in"),
        (("--step", "ingest", *MANIFEST, "--placements", "DP77"), "--placements: "),
    ],
)
def test_what_no_host_could_do_is_refused(
    run_job: RunJob, options: tuple[str, ...], message: str
) -> None:
    """Exit code 2, and one line with the remedy."""
    said = request(run_job, "realign", *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_manifests_are_ingested_on_a_cluster(run_job: RunJob) -> None:
    """On EMR and on Kubernetes ingest gets the manifests, and what lies beside them.

    EMR's hosts install what simulates rooms where a driver needs it.
    """
    share = ("--manifest", "labelled=s3://speech/spoken.jsonl", "--dev-share", "0.1")
    placed = ("--placements", "2", "--heldout-placements", "clean,DP1", "--placement-seed", "3")
    options = (*MANIFEST, *TEXTS, "--format", "table", "--speaker-buckets", "64", *share, *placed)
    asked = json.loads(request(run_job, "ingest", *options).out)
    (step,), (install,) = asked["Steps"], asked["BootstrapActions"]
    installed = install["ScriptBootstrapAction"]["Args"]
    plain = json.loads(request(run_job, "ingest", *MANIFEST).out)["BootstrapActions"]
    added = {*installed} - {*plain[0]["ScriptBootstrapAction"]["Args"]}
    assert sorted(re.split(r"\W[=0-9]", each)[0] for each in added) == [
        *("espeakng-loader", "pyroomacoustics")
    ]
    on_emr = step["HadoopJarStep"]["Args"]
    shared = ("--recipe", "hours_1m", "--run", RUN)
    kubernetes = ("--account", account_file("kubernetes"))
    said = run_job("request_cluster", "--step", "ingest", *shared, *kubernetes, *options)
    for words, folder in ((on_emr, CODE), (shlex.split(said.out), "local:///opt/megahour/jobs")):
        given = words[words.index(f"{folder}/ingest.py") + 1 :]
        assert given[:4] == [*shared]
        pairs = set(zip(given[4::2], given[5::2], strict=True))
        passed = set(zip(options[::2], options[1::2], strict=True))
        assert pairs == passed


def test_emr_clusters_are_found_again_and_their_ends_are_known(s3_bucket: str) -> None:
    """A second call waits for the first one's cluster; a cluster that was ended is an error."""
    del s3_bucket  # it points boto3 to moto's server
    emr = boto3.client("emr", region_name="us-east-1")
    request = launch_request("realign")
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


class LosingServer(BaseHTTPRequestHandler):
    """LosingServer knows no cluster, and takes launches without an answer."""

    launches: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        if operation == "RunJobFlow":
            self.launches.append(operation)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"Clusters": []}')

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_launch_whose_answer_is_lost_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMR may have launched a cluster: the remedy is the same command, which finds it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), LosingServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    set_endpoint(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    try:
        with pytest.raises(LaunchError, match="same command again: it waits for the cluster if"):
            run_to_end(launch_request("realign"), "us-east-1", lambda _: None)
    finally:
        server.shutdown()
        server.server_close()
    assert LosingServer.launches == ["RunJobFlow"]


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
    request = launch_request("train_teacher")
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
