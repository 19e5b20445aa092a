"""Settle Spark's settings: the command line's first, then the cluster file's, then the site's."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace

from pyspark import SparkConf, SparkContext

from infra.cluster import Cluster
from infra.settings import mebibytes
from infra.spark.host_environment import temporary_folder

# Also for a local master from the command line: nothing listens beyond this host.
LOCAL_SETTINGS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_DRIVER_MEMORY = "spark.driver.memory"
_OPTIONS = {
    "--master": "spark.master",
    "--driver-memory": _DRIVER_MEMORY,
    "--executor-memory": "spark.executor.memory",
    "--executor-cores": "spark.executor.cores",
    "--num-executors": "spark.executor.instances",
}
_DRIVER_SETTING = re.compile(r"spark\.driver\.(memory|memoryOverhead|cores|extra.*|defaultJava.*)")
"""Settings of the driver's JVM, which has started by the time that we read the cluster file."""

_SMALLEST_HEAP = 0.85
"""A JVM states less than it was given: by a survivor space with some garbage collectors."""


def cluster_settings(cluster: Cluster) -> dict[str, str]:
    """Return the settings that a cluster file makes."""
    settings = {
        "spark.master": cluster.master,
        "spark.executor.cores": str(cluster.cores_per_executor),
        "spark.executor.instances": str(cluster.num_executors),
        "spark.executor.memory": cluster.executor_memory,
        _DRIVER_MEMORY: cluster.driver_memory,
        # EMR's default would remove idle executors, and ask for others than the cluster file's.
        "spark.dynamicAllocation.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if cluster.is_local:
        settings |= LOCAL_SETTINGS
        if folder := temporary_folder():
            settings["spark.local.dir"] = folder
    return settings | cluster.spark


def launch_options(cluster: Cluster) -> list[str]:
    """Return the options of spark-submit that no program can set any more once it runs."""
    driver = {key: value for key, value in cluster.spark.items() if _DRIVER_SETTING.fullmatch(key)}
    conf = [part for key, value in driver.items() for part in ("--conf", f"{key}={value}")]
    return ["--master", cluster.master, "--driver-memory", cluster.driver_memory, *conf]


def kubernetes_options(cluster: Cluster, master: str, image: str) -> list[str]:
    """Return the options of spark-submit for Kubernetes, where the driver runs in a pod, too."""
    settings = {
        "spark.kubernetes.container.image": image,
        "spark.kubernetes.namespace": "megahour",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "megahour",
        # A pod that asks for GPUs gets them whole; tasks share them by the device pool.
        **(_pod_gpus(cluster.gpus_per_instance) if cluster.has_gpus else {}),
    }
    conf = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    of_driver = launch_options(replace(cluster, master=master))
    return [*of_driver, "--deploy-mode", "cluster", *conf]


def _pod_gpus(num_gpus: int) -> dict[str, str]:
    gpu = "spark.executor.resource.gpu"
    script = "/opt/megahour/infra/docker/gpu_addresses.sh"
    amounts = {f"{gpu}.amount": str(num_gpus), f"{gpu}.vendor": "nvidia.com"}
    return amounts | {f"{gpu}.discoveryScript": script}


def submitted_conf(app_name: str, cluster: Cluster) -> SparkConf:
    """Return the configuration under spark-submit; a setting that loses is named on stderr.

    What the command line names wins against the cluster file, and that against spark-defaults.
    """
    SparkContext._ensure_initialized()  # connects to the JVM of spark-submit
    jvm = SparkContext._jvm
    assert jvm is not None
    conf = SparkConf(_jvm=jvm)
    # spark-submit names the application after its file; the user did not choose that name.
    conf.setAppName(app_name)
    command = jvm.java.lang.System.getProperty("sun.java.command") or ""
    heap_mebibytes = int(jvm.java.lang.Runtime.getRuntime().maxMemory()) >> 20
    for message in settle(conf, cluster, command, heap_mebibytes):
        print(f"spark: {message}", file=sys.stderr)
    return conf


def settle(conf: SparkConf, cluster: Cluster, command: str, heap_mebibytes: int) -> list[str]:
    """Put the cluster file's settings into `conf`; return a message for each setting that loses.

    `command` is the command line of spark-submit's JVM, which has a heap of `heap_mebibytes`.
    """
    named = _named_settings(command)
    settings = cluster_settings(cluster)
    messages = []
    if mebibytes(cluster.driver_memory) * _SMALLEST_HEAP > heap_mebibytes:
        messages.append(
            f"{_DRIVER_MEMORY} = {cluster.driver_memory} of the cluster file comes too late: the "
            f"driver has {heap_mebibytes} MB: start spark-submit with --driver-memory "
            f"{cluster.driver_memory}"
        )
    # What is reported of the driver's memory is what it has, not what was asked for.
    del settings[_DRIVER_MEMORY]
    conf.set(_DRIVER_MEMORY, f"{heap_mebibytes}m")
    for key, value in settings.items():
        found = conf.get(key)
        if key in named:
            if found != value:
                messages.append(f"{key} = {value} of the cluster file loses to --conf: {found}")
            continue
        # Without --master spark-submit passes local[*], as if a site had set it.
        if found not in (None, value, "local[*]"):
            messages.append(f"{key} = {found} of spark-defaults loses to the cluster file: {value}")
        conf.set(key, value)
    if (conf.get("spark.master") or "").startswith("local"):
        for key, value in LOCAL_SETTINGS.items():
            conf.setIfMissing(key, value)
    return messages


def _named_settings(command: str) -> set[str]:
    """Return the settings that the command line of spark-submit names."""
    found = set(re.findall(r"(?:^|\s)(?:--conf|-c)[\s=]\s*(spark\.[^\s=]+)=", command))
    return found | {
        key for option, key in _OPTIONS.items() if re.search(rf"(^|\s){option}[\s=]", command)
    }
