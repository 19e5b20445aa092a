"""The command line wins against the cluster file, and that against a site's spark-defaults."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pyspark import SparkConf

from infra.cluster import Cluster, load_cluster
from infra.spark.session import launch_options, settle, submitted_settings

EXTRACTION = load_cluster("extract_features")
COMMAND = "org.apache.spark.deploy.SparkSubmit {} dist/extract_features.py --run s3://b/run"


def settled(
    site: Mapping[str, str], options: str, heap_mebibytes: int = 8192, cluster: Cluster = EXTRACTION
) -> tuple[SparkConf, list[str]]:
    conf = SparkConf(loadDefaults=False).setAll(list(site.items()))
    return conf, settle(conf, cluster, COMMAND.format(options), heap_mebibytes)


def test_a_site_loses_by_name() -> None:
    """A value of spark-defaults that differs is replaced, and named with both values."""
    site = {"spark.executor.memory": "1g", "spark.speculation": "true", "spark.eventLog.dir": "/x"}
    conf, messages = settled(site | {"spark.master": "local[*]"}, "")
    assert messages == [
        "spark.executor.memory = 1g of spark-defaults loses to the cluster file: 2g"
    ]
    assert conf.get("spark.master") == "yarn", "spark-submit's own default loses in silence"
    assert conf.get("spark.executor.memory") == "2g"
    assert conf.get("spark.executor.memoryOverhead") == "19g"
    assert conf.get("spark.eventLog.dir") == "/x", "the cluster file says nothing of it"
    assert conf.get("spark.ui.enabled") is None, "a setting of local masters"


def test_secrets_are_not_said() -> None:
    """Neither the site's nor the cluster file's, as Spark redacts them."""
    key = "spark.hadoop.fs.s3a.secret.key"
    ours = replace(EXTRACTION, spark={key: "our-own"})
    for site, options in (({key: "the-site"}, ""), ({key: "given"}, f"--conf {key}=given")):
        _, (message,) = settled(site, options, cluster=ours)
        assert message.startswith(f"{key} = *** of ")
        assert message.endswith(": ***")


def test_the_number_of_executors_is_the_cluster_files() -> None:
    """A site that allocates them dynamically, as EMR does, does not win; a cluster file does."""
    site = {"spark.dynamicAllocation.enabled": "true"}
    conf, messages = settled(site, "")
    assert conf.get("spark.dynamicAllocation.enabled") == "false"
    assert messages == [
        "spark.dynamicAllocation.enabled = true of spark-defaults loses to the cluster file: false"
    ]
    conf, messages = settled(site, "", cluster=replace(EXTRACTION, spark=site))
    assert (conf.get("spark.dynamicAllocation.enabled"), messages) == ("true", [])


@pytest.mark.parametrize(
    "options",
    ["--conf spark.executor.memory=1g", "--executor-memory 1g", "-c spark.executor.memory=1g"],
)
def test_the_command_line_wins_by_name(options: str) -> None:
    """However it is written; the cluster file's value is named as the one that loses."""
    conf, messages = settled({"spark.executor.memory": "1g"}, options)
    assert conf.get("spark.executor.memory") == "1g"
    assert messages == ["spark.executor.memory = 2g of the cluster file loses to --conf: 1g"]


def test_a_local_master_of_the_command_line_listens_on_loopback() -> None:
    """The cluster file's master loses, by name."""
    conf, messages = settled({"spark.master": "local[3]"}, "--master local[3]")
    assert conf.get("spark.master") == "local[3]"
    assert conf.get("spark.driver.host") == "127.0.0.1"
    assert messages == ["spark.master = yarn of the cluster file loses to --conf: local[3]"]


@pytest.mark.parametrize(("heap_mebibytes", "is_late"), [(1024, True), (6900, True), (7000, False)])
def test_driver_memory_is_what_the_driver_has(heap_mebibytes: int, is_late: bool) -> None:
    """A heap that is smaller than the cluster file's is reported, with the option that sets it."""
    conf, messages = settled({"spark.driver.memory": "8g"}, "", heap_mebibytes)
    assert conf.get("spark.driver.memory") == f"{heap_mebibytes}m"
    late = (
        "spark.driver.memory = 8g of the cluster file comes too late: the driver has "
        f"{heap_mebibytes} MB: start spark-submit with --driver-memory 8g"
    )
    assert messages == ([late] if is_late else [])


def test_launch_options_hold_what_the_driver_needs_before_it_starts() -> None:
    """Master, memory, and the settings of the driver's JVM; no others."""
    cluster = replace(
        EXTRACTION, spark={"spark.driver.extraJavaOptions": "-Xss4m", "spark.speculation": "true"}
    )
    assert launch_options(cluster) == [
        *("--master", "yarn", "--driver-memory", "8g"),
        *("--conf", "spark.driver.extraJavaOptions=-Xss4m"),
    ]


def test_a_submission_to_elsewhere_keeps_its_settings_and_master() -> None:
    """A driver that a platform starts cannot see the command line: what arrives, wins."""
    settings = submitted_settings(EXTRACTION)
    assert "spark.master" not in settings
    assert settings["spark.executor.memoryOverhead"] == "19g"
    arrived = {**settings, "spark.master": "k8s://https://host:443", "spark.executor.memory": "3g"}
    conf, messages = settled(arrived, "")
    assert messages == []
    assert conf.get("spark.master") == "k8s://https://host:443"
    assert conf.get("spark.executor.memory") == "3g"
