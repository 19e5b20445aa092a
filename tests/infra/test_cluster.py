import tomllib
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest

import infra
from infra.cluster import load_cluster, require_dependencies
from infra.settings import ConfigurationError
from tests.source_trees import REPOSITORY

NAMES = tuple(path.stem for path in Path(infra.__file__).with_name("clusters").glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_step_has_a_cluster(name: str) -> None:
    """The clusters of the package are valid, and their dependencies are ours."""
    cluster = load_cluster(name)
    require_dependencies(cluster)
    assert cluster.num_executors >= 1
    assert all("{" not in prefix for prefix in cluster.readable("s3://b/run", "s3://b/corpus"))


def test_clusters_are_the_papers() -> None:
    """Instance types are those of 003 III-A: 16 GPUs for the teacher (VIII), 64 for the student."""
    types = {name: load_cluster(name).instance_type for name in NAMES}
    assert types["extract_features"] == "c4.4xlarge"
    assert types["select_utterances"] == "x1.32xlarge"
    assert types["generate_targets"] == types["train_student"] == "p3.16xlarge"
    assert load_cluster("train_teacher").num_executors == 16
    assert load_cluster("train_student").num_executors == 64


def test_permissions_are_filled_in() -> None:
    """{run} and {corpus} become this run's; a step may read what it writes."""
    cluster = load_cluster("extract_features")
    written = ("s3://b/runs/1/features", "s3://b/runs/1/steps")
    assert cluster.writable("s3://b/runs/1/", "s3://b/corpus") == written
    assert cluster.readable("s3://b/runs/1", "s3://b/corpus") == (
        "s3://b/corpus/audio",
        "s3://b/corpus/metadata",
        "s3://b/runs/1/selection",
        *written,
    )


def test_steps_delete_below_their_own_prefixes() -> None:
    """Training removes old checkpoints, each step its start record; elsewhere none may."""
    cluster, started = load_cluster("train_student"), "s3://b/runs/1/steps/started"
    assert cluster.deletable("s3://b/runs/1", "s3://c") == ("s3://b/runs/1/models", started)
    assert load_cluster("extract_features").deletable("s3://b/runs/1", "s3://c") == (started,)
    with pytest.raises(ValueError, match=r"delete_prefixes: '\{run\}': need what the step"):
        replace(cluster, delete_prefixes=("{run}",))


def test_a_value_is_not_filled_in_twice() -> None:
    """A run's name that looks like a placeholder stays as it is."""
    cluster = load_cluster("extract_features")
    assert cluster.writable("s3://b/{corpus}", "s3://c")[0] == "s3://b/{corpus}/features"


@pytest.mark.parametrize(
    ("master", "has_one"),
    [
        *(("local", True), ("local[1]", True), ("local[1, 4]", True)),
        *(("local[2]", False), ("local[*]", False), ("local[11]", False)),
        *(("local-cluster[1,1,1024]", False), ("yarn", False)),
    ],
)
def test_one_slot_runs_one_task_at_a_time(master: str, has_one: bool) -> None:
    """Only there may a task have this host's GPU: two tasks would share it."""
    assert replace(load_cluster("demo"), master=master).has_one_slot == has_one


def test_a_cluster_of_ones_own_is_read_by_path(tmp_path: Path) -> None:
    """A path to a .toml file is read as it is; other names are refused with the known ones."""
    text = (Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml").read_text()
    path = tmp_path / "own.toml"
    path.write_text(text.replace("local[2]", "local[3]"))
    assert load_cluster(str(path)).master == "local[3]"
    with pytest.raises(
        ConfigurationError, match=r"cluster 'demmo': .*one of bootstrap, build_graph, certify"
    ):
        load_cluster("demmo")
    path.write_text(text.replace("num_instances = 1", "num_instances = 0"))
    with pytest.raises(ConfigurationError, match=r"own.toml: num_instances = 0: need 1\.\.100000"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"executor_memory": "4 GB"},
            "executor_memory = '4 GB': need a size such as \"4g\", from 450m to 32t",
        ),
        ({"price_per_instance_hour": -1.0}, "price_per_instance_hour = -1.0: need 0"),
        ({"read_prefixes": ("{runs}/a",)}, "{runs}: need {run} or {corpus}"),
        ({"delete_prefixes": ("{run}/steps/{day}",)}, "{day}: need {run} or {corpus}"),
        (
            {"instance_type": "c4.4xlarge", "spark": {"spark.executor.memoryOverhead": "19 GB"}},
            "spark.executor.memoryOverhead: size = '19 GB': need a size such as",
        ),
        ({"devices": ("cpu", "cpu")}, "devices = .*: need each once"),
        ({"master": "moon"}, "master = 'moon': need .*such as 'local"),
        ({"instance_type": "c4.4xlarge", "cores_per_executor": 17}, "= 17: need at most 16, the c"),
        ({"instance_type": "c4.4xlarge", "executor_memory": "29g"}, "32665 MB: need at most 30720"),
        (
            {
                "instance_type": "c4.4xlarge",
                "master": "yarn",
                "executor_memory": "4g",
                "spark": {"spark.executor.memoryOverhead": "20g"},
            },
            "24576 MB: need at most 22144 MB, the memory of c4.4xlarge that YARN gives to contain",
        ),
        (
            {
                "instance_type": "p3.16xlarge",
                "master": "yarn",
                "executor_memory": "400g",
                "spark": {
                    "spark.executor.memoryOverhead": "79g",
                    "spark.executor.pyspark.memory": "129m",
                },
            },
            "490625 MB: need at most 490624 MB",
        ),
        ({"instance_type": "c4.4xlarge", "driver_memory": "31g"}, "driver_memory = 31744 MB: need"),
        (
            {
                "instance_type": "c4.4xlarge",
                "executor_memory": "20g",
                "spark": {"spark.executor.memoryOverhead": "10241"},
            },
            r"executor_memory \+ overhead\) = 30721 MB: need at most 30720 MB, the memory of c4.4x",
        ),
        (
            {"spark": {"spark.excludeOnFailure.enabled": "true"}},
            "1 attempts at a task on 1 executors of 1 instances: need spark.task.maxFailures, 4",
        ),
        (
            {
                "num_instances": 3,
                "executors_per_instance": 4,
                "spark": {"spark.excludeOnFailure.enabled": "true", "spark.task.maxFailures": "7"},
            },
            "6 attempts at a task on 12 executors of 3 instances: need .*, 7: leave it out",
        ),
        ({"spark": {"sparky": "1"}}, "spark: key = 'sparky': need .*spark.task.maxFailures"),
    ],
)
def test_bad_clusters_are_refused(change: dict[str, object], message: str) -> None:
    """Sizes, prices, placeholders and properties are checked, with the value and the remedy."""
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        replace(load_cluster("demo"), **change)  # type: ignore[arg-type]


def test_missing_dependencies_are_named() -> None:
    """An absent dependency is named with the pip command; a malformed one is refused."""
    cluster = replace(load_cluster("demo"), python_dependencies=("numpy>=2", "no-such-thing==1"))
    with pytest.raises(ConfigurationError, match=r"pip install 'no-such-thing==1'$"):
        require_dependencies(cluster)
    with pytest.raises(ConfigurationError, match="need a distribution and its versions"):
        replace(cluster, python_dependencies=("--index-url x",))


def test_cluster_files_and_the_package_need_the_same_versions() -> None:
    """`make compat` tests the lowest versions of pyproject.toml: cluster files name no others."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    assert {*chain(*(load_cluster(name).python_dependencies for name in NAMES))} <= known


def test_installed_versions_are_compared() -> None:
    """The message names what is needed and what is installed; markers of other systems pass."""
    installed = version("numpy")
    demo = load_cluster("demo")
    for fine in (f"numpy=={installed}", "NumPy>=1,<1000", "none-such; sys_platform == 'plan9'"):
        require_dependencies(replace(demo, python_dependencies=(fine,)))
    old = replace(demo, python_dependencies=("numpy>=1", "numpy<2", "pyarrow>=9999"))
    message = rf"numpy<2: {installed} is installed; pyarrow>=9999: .* is installed: pip install 'nu"
    with pytest.raises(ConfigurationError, match=message):
        require_dependencies(old)


def test_devices_are_named_or_found(tmp_path: Path) -> None:
    """A plan counts those named on each host; "auto" are the instance's GPUs, or else the cores."""
    demo, targets = load_cluster("demo"), load_cluster("generate_targets")
    assert (demo.devices, demo.num_devices) == (("cpu#0", "cpu#1"), 2)
    assert (targets.devices, targets.num_devices) == ("auto", 8 * 8)
    of_cores = replace(
        targets, instance_type="c4.8xlarge", executor_memory="1g", driver_memory="1g", spark={}
    )
    assert of_cores.num_devices == 8 * 24
    own = tmp_path / "own.toml"
    text = (Path(infra.__file__).parent / "clusters" / "demo.toml").read_text()
    own.write_text(text.replace('["cpu#0", "cpu#1"]', '"all"'))
    with pytest.raises(
        ConfigurationError, match=r"devices = 'all': need a list, .* or one of 'auto'"
    ):
        load_cluster(str(own))
