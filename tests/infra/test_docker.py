"""The images' files name what exists, and do what hadolint and shellcheck cannot know."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "infra" / "docker"
IMAGES = sorted(DOCKER.glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_versions_are_those_of_constraints(path: Path) -> None:
    """Wheels are constrained by constraints.txt, and pip installs no others."""
    pips = [text for name, text in instructions(path) if name == "RUN" and "pip " in text]
    made, installed = pips
    assert "pip wheel" in made
    assert "--constraint constraints.txt" in made
    assert "--no-index /wheels/*.whl" in installed


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_no_image_is_bound_to_an_architecture(path: Path) -> None:
    """No instruction names one, so that each builds for amd64 and arm64."""
    said = " ".join(text for _, text in instructions(path))
    assert re.search(r"amd64|x86_64|arm64|aarch64", said) is None


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_what_images_copy_exists(path: Path) -> None:
    """Each source of COPY and of a mount is a file of the repository that .dockerignore admits."""
    admitted = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    sources = [text.split()[:-1] for name, text in instructions(path) if name == "COPY"]
    mounted = re.findall(r"type=bind,source=([\w./]+)", path.read_text())
    for source in [*(each for group in sources for each in group), *mounted]:
        assert list(ROOT.glob(source)) if source != "." else True, source
        assert source == "." or source.split("/")[0] in admitted


def test_the_build_has_all_that_the_wheel_needs() -> None:
    """Packages, modules and files that pyproject.toml names, and the versions; nothing else."""
    admitted = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, built = document["project"], document["tool"]["setuptools"]
    packages = {each.removesuffix("*") for each in built["packages"]["find"]["include"]}
    modules = {f"{each}.py" for each in built["py-modules"]}
    named = {project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt"}
    assert packages | modules | named == admitted


def run_script(folder: Path, script: str, *arguments: str, **environment: str) -> str:
    """Run a script of the images; programs of the folder come first."""
    variables = {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin", **environment}
    command = [str(DOCKER / script), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_gpus_are_listed_as_spark_reads_them(tmp_path: Path) -> None:
    """Two GPUs become one JSON object with two addresses."""
    program(tmp_path / "nvidia-smi", "printf '0\\n1\\n'")
    found = json.loads(run_script(tmp_path, "gpu_addresses.sh"))
    assert found == {"name": "gpu", "addresses": ["0", "1"]}


def test_the_entrypoint_starts_drivers_and_executors(tmp_path: Path) -> None:
    """A driver's arguments pass through, and Spark's variables become an executor's options."""
    program(tmp_path / "spark/bin/spark-submit", "printf '%s\\n' \"$@\"")
    program(tmp_path / "java/bin/java", "printf '%s\\n' \"$@\"")
    places = {"SPARK_HOME": str(tmp_path / "spark"), "JAVA_HOME": str(tmp_path / "java")}
    bound = {"SPARK_DRIVER_BIND_ADDRESS": "10.0.0.1"}
    said = run_script(
        tmp_path, "spark_entrypoint.sh", "driver", "local:///x.py", "a b", **places, **bound
    )
    words = said.splitlines()
    assert words[:2] == ["--deploy-mode", "client"]
    assert "spark.driver.bindAddress=10.0.0.1" in words
    assert words[-2:] == ["local:///x.py", "a b"]
    names = ("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP")
    more = ("RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME", "EXECUTOR_MEMORY")
    variables = {f"SPARK_{name}": name.lower() for name in (*names, *more)}
    options = {"SPARK_JAVA_OPT_0": "-Da=b c", "SPARK_JAVA_OPT_1": "-Dd"}
    said = run_script(tmp_path, "spark_entrypoint.sh", "executor", **places, **variables, **options)
    words = said.splitlines()
    assert words[:4] == ["-Da=b c", "-Dd", "-Xmsexecutor_memory", "-Xmxexecutor_memory"]
    assert "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend" in words
    assert words[words.index("--driver-url") + 1] == "driver_url"
