"""What request_cluster prints fits the platforms' published schemas, and runs what it names."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import distribution
from itertools import cycle
from pathlib import Path
from typing import Any

import boto3
import kubernetes_validate
import pytest
import yaml
from google.protobuf.json_format import ParseDict

from infra.cluster import load_cluster
from infra.platforms import databricks_step
from infra.platforms.accounts import load_account
from infra.platforms.emr_serverless import worker
from infra.platforms.platform import StepLaunch
from infra.spark.packaging import closure, with_drivers, write_code
from jobs.run_table import STEPS, spark_steps
from tests.infra.platforms.account_files import account_file
from tests.infra.platforms.service_models import require_valid
from tests.job_programs import RunJob, Said

ROOT = Path(__file__).parents[3]
RUN = "s3://my-bucket/runs/mine"
WITHOUT_GPUS = [name for name in spark_steps() if name != "generate_targets"]
OTHERS = [name for name in STEPS if name not in spark_steps()]
MANIFEST = ("--manifest", "labelled=s3://speech/labelled.jsonl")


def request(run_job: RunJob, platform: str, step: str, *options: str) -> Said:
    manifest = MANIFEST if step == "ingest" else ()
    shared = ("--step", step, "--recipe", "hours_1m", "--run", RUN, *manifest)
    return run_job("request_cluster", *shared, "--account", account_file(platform), *options)


def printed(run_job: RunJob, platform: str, step: str, *options: str) -> Any:
    said = request(run_job, platform, step, *options)
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


@pytest.mark.parametrize("step", sorted({*WITHOUT_GPUS} - {"select_utterances"}))
def test_emr_serverless_takes_job_runs(run_job: RunJob, step: str) -> None:
    """botocore's model and patterns hold; drivers and executors are whole workers."""
    parameters = printed(run_job, "emr_serverless", step)
    model = boto3.client("emr-serverless", region_name="us-east-1").meta.service_model
    shape = model.operation_model("StartJobRun").input_shape
    require_valid({**parameters, "clientToken": "drawn"}, shape)
    submit = parameters["jobDriver"]["sparkSubmit"]
    assert submit["entryPoint"] == f"s3://my-bucket/code/{step}.py"
    settings = dict(re.findall(r"--conf (\S+?)=(\S+)", submit["sparkSubmitParameters"]))
    cluster = load_cluster(step)
    assert settings["spark.executor.instances"] == str(cluster.num_executors)
    assert settings["spark.archives"].endswith(".tar.gz#dependencies")
    assert settings["spark.emr-serverless.driverEnv.PYTHONPATH"] == "dependencies"
    heap = int(settings["spark.executor.memory"].removesuffix("g")) << 10
    beside = int(settings["spark.executor.memoryOverhead"].removesuffix("m"))
    # Executors of 21 GB: 16 vCPUs have 32 GB or more, 8 have 20 or 24.
    gibibytes = 24 if cluster.cores_per_executor == 8 else 32
    assert int(settings["spark.executor.cores"]) == cluster.cores_per_executor
    assert heap + beside == gibibytes << 10


@pytest.mark.parametrize(
    ("needed", "found"),
    [((1, 1), (1, 2)), ((3, 8192), (4, 8)), ((5, 17 << 10), (8, 20)), ((1, 61 << 10), (16, 64))],
)
def test_workers_are_the_smallest_that_fit(needed: tuple[int, int], found: tuple[int, int]) -> None:
    """By cores and by memory, whichever asks for more."""
    assert worker(*needed) == found


@pytest.mark.parametrize(
    ("step", "platform"), zip(OTHERS, cycle(["emr_serverless", "databricks", "dataproc"]))
)
def test_spark_platforms_refuse_other_steps(run_job: RunJob, step: str, platform: str) -> None:
    """Exit code 2, with platforms that have hosts for them."""
    said = request(run_job, platform, step)
    assert (said.code, said.out) == (2, "")
    assert f"{platform}: {step} is no Spark step: take emr, kubernetes or slurm" in said.err


@pytest.mark.parametrize(
    ("platform", "step", "options", "message"),
    [
        (
            "emr_serverless",
            "select_utterances",
            (),
            "15 cores with 180224 MB: need at most 16 with",
        ),
        (
            "emr_serverless",
            "generate_targets",
            (),
            "its hosts have no GPU: give --cluster with CPUs",
        ),
        ("dataproc", "generate_targets", (), "its hosts have no GPU: give --cluster with CPUs"),
        ("databricks", "realign", ("--recipe", "mine.toml"), "mine.toml: cannot be read"),
        (
            "kubernetes",
            "realign",
            ("--cluster", "infra/clusters/realign.toml"),
            "need a name of ours",
        ),
        ("slurm", "realign", (), "slurm: realign: it is Spark's: run megahour realign on one"),
        ("slurm", "report", ("--send",), "--send: it is for emr"),
        ("dataproc", "ingest", ("--placements", "2"), "--placements: simulate rooms on emr or kub"),
    ],
)
def test_what_a_platform_cannot_do_is_refused(
    run_job: RunJob, platform: str, step: str, options: tuple[str, ...], message: str
) -> None:
    """Exit code 2, and one line with the remedy."""
    said = request(run_job, platform, step, *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_unknown_platforms_are_refused(tmp_path: Path, run_job: RunJob) -> None:
    """The message lists those that there are; so does a file without one."""
    path = tmp_path / "x.toml"
    for text in ('platform = "pbs"', "region = 1"):
        path.write_text(text)
        said = run_job(
            "request_cluster",
            *("--step", "realign", "--recipe", "hours_1m", "--run", RUN, "--account", str(path)),
        )
        assert said.code == 2
        assert (
            "need one of emr, emr_serverless, databricks, dataproc, kubernetes, slurm" in said.err
        )


@pytest.mark.parametrize("step", spark_steps())
def test_databricks_takes_runs(run_job: RunJob, step: str) -> None:
    """Its SDK knows every field; the cluster has dedicated access, and installs no Spark."""
    from databricks.sdk.service.jobs import SubmitTask  # noqa: PLC0415 - 3.5 s of CPU

    document = printed(run_job, "databricks", step)
    assert document.keys() == {"run_name", "tasks"}
    (task,) = document["tasks"]
    assert SubmitTask.from_dict(task).as_dict() == task
    assert task["new_cluster"]["data_security_mode"] == "SINGLE_USER"
    assert task["new_cluster"]["num_workers"] == load_cluster(step).num_instances
    packages = [each["pypi"]["package"] for each in task["libraries"] if "pypi" in each]
    assert all(re.fullmatch(r"[\w.-]+==\S+", each) for each in packages)
    assert not any(each.startswith(("pyspark", "py4j")) for each in packages)
    assert task["spark_python_task"]["parameters"][0] == step


def test_a_task_of_databricks_fails_only_where_its_step_does(tmp_path: Path) -> None:
    """Exit code 0 is no exception there; another is named."""
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "step.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    program = databricks_step.__file__
    for code in (0, 3):
        done = subprocess.run(
            [sys.executable, program, "step", str(code)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "step: exit code 3" in done.stderr) == (int(code > 0), code > 0)


@pytest.mark.parametrize("step", WITHOUT_GPUS)
def test_dataproc_takes_workflows(run_job: RunJob, step: str) -> None:
    """Google's messages have every field; the driver runs in the cluster, which reads S3."""
    from google.cloud.dataproc_v1 import WorkflowTemplate  # noqa: PLC0415 - 1.2 s of CPU

    template = printed(run_job, "dataproc", step)
    ParseDict(template, WorkflowTemplate.pb(WorkflowTemplate()))
    (job,) = template["jobs"]
    properties = job["pysparkJob"]["properties"]
    assert properties["spark.submit.deployMode"] == "cluster"
    for prefix in ("spark.yarn.appMasterEnv", "spark.executorEnv"):
        assert properties[f"{prefix}.PYTHONPATH"] == "dependencies"
        assert properties[f"{prefix}.AWS_SHARED_CREDENTIALS_FILE"].startswith("/etc/megahour/")
    config = template["placement"]["managedCluster"]["config"]
    (action,) = config["initializationActions"]
    assert (ROOT / "infra/platforms" / Path(action["executableFile"]).name).exists()
    assert config["workerConfig"]["numInstances"] == load_cluster(step).num_instances + 1


@pytest.mark.parametrize("step", ["realign", "generate_targets"])
def test_kubernetes_takes_spark_submits(run_job: RunJob, step: str) -> None:
    """Credentials are references to a secret; GPUs are asked for where the file has them."""
    said = request(run_job, "kubernetes", step)
    words = shlex.split(said.out)
    assert words[:5] == [
        *("spark-submit", "--master", "k8s://https://10.0.0.1:443", "--deploy-mode", "cluster")
    ]
    settings = dict(word.split("=", 1) for word in words if word.startswith("spark."))
    assert (
        settings["spark.kubernetes.container.image"] == "registry.example.com/megahour/spark:0.1.0"
    )
    for role in ("driver", "executor"):
        key = f"spark.kubernetes.{role}.secretKeyRef.AWS_SECRET_ACCESS_KEY"
        assert settings[key] == "megahour-s3:AWS_SECRET_ACCESS_KEY"
    assert settings["spark.executor.memoryOverhead"] in ("19g", "240g")
    assert "spark.master" not in settings
    gpus = settings.get("spark.executor.resource.gpu.amount")
    assert gpus == ("8" if step == "generate_targets" else None)
    assert f"local:///opt/megahour/jobs/{step}.py" in words


def test_executors_of_a_host_share_its_gpus() -> None:
    """Two pods on hosts of eight GPUs ask for four each."""
    cluster = load_cluster("generate_targets")
    halved = {**cluster.spark, "spark.executor.memoryOverhead": "120g"}
    cluster = replace(cluster, executors_per_instance=2, spark=halved)
    platform = load_account(account_file("kubernetes"))
    launch = StepLaunch("generate_targets", "s3://bucket/x", "Spark", cluster, ())
    assert "spark.executor.resource.gpu.amount=4" in shlex.split(platform.request(launch))


def valid(document: dict[str, Any]) -> dict[str, Any]:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    return document


@pytest.mark.parametrize("step", OTHERS)
def test_kubernetes_takes_indexed_jobs(run_job: RunJob, step: str) -> None:
    """Strict schemas hold; a pod for each host, whose ranks meet at the pod of index 0."""
    service, job = map(valid, printed(run_job, "kubernetes", step)["items"])
    cluster, name = load_cluster(step), job["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == cluster.num_instances
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] == name
    assert len(f"{name}-{cluster.num_instances - 1}") <= 63
    (container,) = pod["spec"]["containers"]
    command = container["command"]
    if cluster.num_instances > 1:
        assert command[command.index("--rdzv-endpoint") + 1] == f"{name}-0.{name}:29400"
        assert command[command.index("--nproc-per-node") + 1] == "8"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert f"jobs.{step}" in command
    assert json.dumps(container).count("megahour-s3") == 2


def test_the_namespace_is_valid_and_is_the_accounts() -> None:
    """Drivers may make pods there by the account's default names."""
    documents = yaml.safe_load_all((ROOT / "infra/kubernetes/namespace.yaml").read_text())
    kinds = {each["kind"]: valid(each) for each in documents}
    assert {each["metadata"]["name"] for each in kinds.values()} == {"megahour"}
    (rule,) = kinds["Role"]["rules"]
    assert {"pods", "services", "configmaps"} <= {*rule["resources"]}


FAKE_SLURM = """\
#!/bin/sh
case "$(basename "$0")" in
scontrol) echo node7; echo node8 ;;
srun) printf '%s\\n' "$@" > "$SAID"; command -v python >> "$SAID" ;;
esac
"""


@pytest.mark.parametrize("step", OTHERS)
def test_slurm_takes_scripts(run_job: RunJob, tmp_path: Path, step: str) -> None:
    """shellcheck has no complaint; each host starts its ranks, which meet at the first host."""
    script = tmp_path / "step.sh"
    script.write_text(request(run_job, "slurm", step).out)
    checker = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([checker, script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")
    setting = "corpus.uri=s3://speech/it's; touch $(oops)"
    said = request(run_job, "slurm", step, "--set", setting)
    script.write_text(said.out.replace("/shared/megahour/venv", str(tmp_path)))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", said.out, re.M))
    cluster = load_cluster(step)
    assert options["nodes"] == str(cluster.num_instances)
    assert options.get("gpus-per-node") == ("8" if cluster.gpus_per_instance else None)
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "srun", "python"):
        (tmp_path / "bin" / name).write_text(FAKE_SLURM)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "42"}
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SAID": str(tmp_path / "said")}
    subprocess.run(["bash", script], env={**variables, **path}, check=True)
    *words, python = (tmp_path / "said").read_text().splitlines()
    assert python == f"{tmp_path}/bin/python"
    if cluster.num_instances > 1:
        assert words[words.index("--rdzv-endpoint") + 1] == "node7:29400"
        assert words[words.index("--rdzv-id") + 1] == "42"
    assert words[-2:] == ["--set", setting]


def test_slurm_hosts_share_files(run_job: RunJob, tmp_path: Path) -> None:
    """A run may be a folder, and a recipe a file, both named for any working directory."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text((ROOT / "jobs/recipes/hours_1m.toml").read_text())
    said = run_job(
        "request_cluster",
        *("--step", "report", "--recipe", str(recipe), "--run", str(tmp_path / "run")),
        *("--account", account_file("slurm")),
    )
    assert (said.code, said.err) == (0, "")
    assert f"--recipe {recipe} --run {tmp_path}/run\n" in said.out


def test_recipes_and_cluster_files_lie_in_s3(run_job: RunJob, s3_bucket: str) -> None:
    """A step's host reads them there, and so does the request; one that is absent is named."""
    store = boto3.client("s3")
    for key, path in (
        ("r.toml", "jobs/recipes/hours_1m.toml"),
        ("c.toml", "infra/clusters/realign.toml"),
    ):
        store.put_object(Bucket=s3_bucket, Key=key, Body=(ROOT / path).read_bytes())
    store.put_object(Bucket=s3_bucket, Key="large.toml", Body=b"#" * ((1 << 20) + 1))
    recipe, cluster = f"s3://{s3_bucket}/r.toml", f"s3://{s3_bucket}/c.toml"
    words = shlex.split(
        request(run_job, "kubernetes", "realign", "--recipe", recipe, "--cluster", cluster).out
    )
    assert words[-6:] == ["--recipe", recipe, "--run", RUN, "--cluster", cluster]
    said = run_job(
        "realign",
        "--recipe",
        recipe,
        "--run",
        f"s3://{s3_bucket}/run",
        "--cluster",
        cluster,
        "--dry-run",
    )
    assert said.code == 0, said.err
    for name, message in (
        ("none.toml", "no such object"),
        ("large.toml", "need at most 1048576 bytes"),
    ):
        said = request(run_job, "kubernetes", "realign", "--recipe", f"s3://{s3_bucket}/{name}")
        assert (said.code, message in said.err) == (2, True)


IMPORTING = """
import runpy, sys
sys.path[:0] = {path!r}
sys.argv = [{program!r}, "--help"]
runpy.run_path({program!r}, run_name="__main__")
"""


def test_drivers_start_from_code_archive_and_spark_alone(tmp_path: Path) -> None:
    """As on a platform that starts the driver elsewhere: nothing else is installed there.

    The selection's list is the shortest of all.
    """
    step = "select_utterances"
    site = tmp_path / "site"
    site.mkdir()
    needed = closure(with_drivers(load_cluster(step).python_dependencies))
    for each in [*needed.values(), distribution("pyspark"), distribution("py4j")]:
        for top_level in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            (site / top_level).symlink_to(each.locate_file(top_level))
    program = tmp_path / f"{step}.py"
    program.write_text((ROOT / "jobs" / program.name).read_text())
    path = [str(write_code(tmp_path)), str(site)]
    text = IMPORTING.format(path=path, program=str(program))
    command = [sys.executable, "-S", "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--run RUN" in done.stdout
