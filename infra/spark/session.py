"""Start Spark sessions and run one Spark task per element; as a program, set up spark-submit.

Of Spark's settings the command line's win, then the cluster file's, then the site's. A progress bar
shows the tasks of a job. The job fails if no executor takes its tasks for half an hour.
"""

import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext, StatusTracker, inheritable_thread_target
from pyspark.accumulators import AddingAccumulatorParam
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from infra.blas_threads import ONE_THREAD
from infra.cluster import Cluster, require_dependencies
from infra.log_lines import progress_bar
from infra.settings import mebibytes, printable
from infra.spark.host_environment import find_java_home, require_environment, temporary_folder
from infra.task_metrics import Measured, MeasuredFunction, ObservedFunction, TaskTotals

# Also for a local master from the command line: nothing listens beyond this host.
LOCAL_SETTINGS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_MASTER, _DRIVER_MEMORY = "spark.master", "spark.driver.memory"
_SUBMITTED = "spark.megahour.submitted"
"""Says that a submission named the cluster file's settings. The driver cannot see its command."""

_SECRET = re.compile(r"secret|password|token|credential|access[.]?key", re.IGNORECASE)
"""Settings whose values are not logged, as Spark's spark.redaction.regex has it."""

_OPTIONS = {
    "--master": _MASTER,
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
        _MASTER: cluster.master,
        "spark.executor.cores": str(cluster.cores_per_executor),
        "spark.executor.instances": str(cluster.num_executors),
        "spark.executor.memory": cluster.executor_memory,
        _DRIVER_MEMORY: cluster.driver_memory,
        # EMR's default would remove idle executors, and ask for others than the cluster file's.
        "spark.dynamicAllocation.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    settings |= {f"spark.executorEnv.{name}": value for name, value in ONE_THREAD.items()}
    if cluster.is_local:
        settings |= LOCAL_SETTINGS
        if folder := temporary_folder():
            settings["spark.local.dir"] = folder
    return settings | cluster.spark


def launch_options(cluster: Cluster) -> list[str]:
    """Return the options of spark-submit that no program can set any more once it runs."""
    driver = {key: value for key, value in cluster.spark.items() if _DRIVER_SETTING.fullmatch(key)}
    where = ["--master", cluster.master, "--driver-memory", cluster.driver_memory]
    return [*where, *conf_options(driver)]


def conf_options(settings: Mapping[str, str]) -> list[str]:
    """Return settings as options of spark-submit."""
    return [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]


def submitted_settings(cluster: Cluster) -> dict[str, str]:
    """Return what a submission names of the cluster file where the driver starts elsewhere.

    All but the master, which is the platform's. The driver then takes the settings as they arrive.
    """
    settings = {key: value for key, value in cluster_settings(cluster).items() if key != _MASTER}
    return {**settings, _SUBMITTED: "true"}


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
    if conf.contains(_SUBMITTED):
        return []
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
                lost, won = _shown(key, value), _shown(key, found)
                messages.append(f"{key} = {lost} of the cluster file loses to --conf: {won}")
            continue
        # Without --master spark-submit passes local[*], as if a site had set it.
        if found not in (None, value, "local[*]"):
            lost, won = _shown(key, found), _shown(key, value)
            messages.append(f"{key} = {lost} of spark-defaults loses to the cluster file: {won}")
        conf.set(key, value)
    if (conf.get(_MASTER) or "").startswith("local"):
        for key, value in LOCAL_SETTINGS.items():
            conf.setIfMissing(key, value)
    return messages


def _shown(key: str, value: str | None) -> str:
    """Return a setting's value for a message, but none that may be a secret."""
    return "***" if _SECRET.search(key) else printable(str(value))


def _named_settings(command: str) -> set[str]:
    """Return the settings that the command line of spark-submit names."""
    found = set(re.findall(r"(?:^|\s)(?:--conf|-c)[\s=]\s*(spark\.[^\s=]+)=", command))
    return found | {
        key for option, key in _OPTIONS.items() if re.search(rf"(^|\s){option}[\s=]", command)
    }


R = TypeVar("R")

IDLE_LIMIT_S = 1800.0
"""Seconds that a job may have no running task; clusters that grow on demand take minutes."""

_POLL_INTERVAL_S = 0.2


class TaskError(RuntimeError):
    """TaskError ends a Spark job that Spark will not retry; it names the work and the cause."""


def await_tasks(
    future: "Future[list[R]]",
    tracker: StatusTracker,
    group: str,
    num_tasks: int,
    description: str,
    idle_limit_s: float,
    watch: Callable[[], object],
) -> None:
    """Wait until `future`, which runs the job group, has a result or an error; raise neither.

    Calls `watch` five times a second; its errors are raised. Raises TaskError when no task of the
    group has run for `idle_limit_s`.
    """
    busy_at = time.monotonic()
    with progress_bar(description=description, total=num_tasks) as bar:
        while wait([future], timeout=_POLL_INTERVAL_S).not_done:
            watch()
            num_active, num_completed = _num_tasks(tracker, group)
            if num_active or num_completed != bar.n:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at > idle_limit_s:
                raise TaskError(
                    f"{description}: no task ran for {idle_limit_s:.0f} s, the limit; give the "
                    "cluster free cores, or ask for fewer (executor_memory, cores_per_executor)"
                )
            bar.update(num_completed - bar.n)
        if future.exception() is None:
            bar.update(num_tasks - bar.n)


def _num_tasks(tracker: StatusTracker, group: str) -> tuple[int, int]:
    """Return the numbers of active and of completed tasks of the group."""
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    infos = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    stages = [stage for stage in infos if stage]
    active = sum(stage.numActiveTasks for stage in stages)
    return active, sum(stage.numCompletedTasks for stage in stages)


T = TypeVar("T")

# py4j raises these once the driver's JVM has ended.
_JVM_LOST = (Py4JError, ConnectionError)

# spark-submit sources this file. The user's settings win, except for Java, which was checked.
# On a host that cannot resolve its own name Spark fails without SPARK_LOCAL_IP. Standard error is
# reopened to append, because our programs open it a second time (infra/log_lines.py).
_SPARK_ENV = """\
# Written by `python -m infra.spark.session`; run it again when Java or the environment moves.
JAVA_HOME={java_home}
: "${{PYSPARK_PYTHON:={python}}}"
getent hosts "$(uname -n)" > /dev/null 2>&1 || : "${{SPARK_LOCAL_IP:=127.0.0.1}}"
[ -f /dev/stderr ] && [ ! /dev/stdout -ef /dev/stderr ] && exec 2>> /dev/stderr
"""

_OF_PYSPARK = Path(pyspark.__file__).parent / "conf"
"""The settings that spark-submit reads by default; wheels of pyspark lack them."""

_JAVA_TEMPORARY = "-Djava.io.tmpdir="

_LOG4J2 = """\
# Written by `python -m infra.spark.session`: errors only, and on standard error.
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{3}
"""


def spark_environment() -> dict[str, str]:
    """Copy the environment and add what a child's pyspark and spark-submit need: Java and Python.

    The first call in an environment makes it ready for spark-submit, where it may write there.
    Raises JavaError if there is no Java.
    """
    if "SPARK_CONF_DIR" not in os.environ and not _OF_PYSPARK.exists():
        with suppress(OSError):
            configure()
    scripts = str(Path(sys.executable).parent)  # spark-submit calls find-spark-home and python3
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if (folder := temporary_folder()) and _JAVA_TEMPORARY not in options:
        options = f'{options} "{_JAVA_TEMPORARY}{folder}"'.strip()
    return {
        **os.environ,
        **({"SPARK_SUBMIT_OPTS": options} if options else {}),
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON") or sys.executable,
        "PATH": os.pathsep.join([scripts, *(part for part in path if part != scripts)]),
    }


def configure() -> Path:
    """Write the settings that let plain `spark-submit` work in this Python environment.

    Returns the directory that spark-submit will read: SPARK_CONF_DIR, or else `conf` in pyspark.
    Raises JavaError if there is no Java.
    """
    directory = Path(os.environ.get("SPARK_CONF_DIR") or _OF_PYSPARK)
    directory.mkdir(parents=True, exist_ok=True)
    java_home, python = shlex.quote(str(find_java_home())), shlex.quote(sys.executable)
    environment = _SPARK_ENV.format(java_home=java_home, python=python)
    (directory / "spark-env.sh").write_text(environment, encoding="utf-8")
    (directory / "log4j2.properties").write_text(_LOG4J2, encoding="utf-8")
    return directory


@contextmanager
def spark_session(app_name: str, cluster: Cluster) -> Iterator[SparkSession]:
    """Start Spark as `cluster` says, and stop it at the end of the `with` statement.

    Spark that runs already is used as it is. Under spark-submit its options win. Raises
    ConfigurationError if a Python dependency of the cluster is not installed, or if the environment
    names what Spark cannot use.
    """
    require_dependencies(cluster)
    if SparkContext._active_spark_context is not None:  # the platform's, as Databricks has one
        yield SparkSession.builder.getOrCreate()
        return
    require_environment(cluster)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        conf = submitted_conf(app_name, cluster)
    else:
        os.environ.update(spark_environment())
        if cluster.is_local:  # a container's name may not resolve
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        conf = SparkConf().setAppName(app_name).setAll(list(cluster_settings(cluster).items()))
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        with suppress(*_JVM_LOST):  # it stopped with its JVM
            session.stop()


def run_tasks(
    session: SparkSession,
    tasks: Sequence[T],
    function: Callable[[T], R],
    description: str,
    idle_limit_s: float = IDLE_LIMIT_S,
    totals: TaskTotals | None = None,
) -> list[R]:
    """Run `function` on each of `tasks`, one Spark task each; results keep the order of `tasks`.

    An ObservedFunction sees each result's summary soon after its task has ended. The requests and
    the seconds of the tasks add up in `totals`.
    Spark retries a failed task as often as its master allows; local masters do not retry. Raises
    TaskError after the last attempt, when the JVM ends, or when no task ran for `idle_limit_s`.
    Other exceptions, such as KeyboardInterrupt, cancel the job. Progress goes to a terminal.
    """
    if not tasks:
        return []
    context, group, totals = session.sparkContext, uuid.uuid4().hex, totals or TaskTotals()
    observed = function if isinstance(function, ObservedFunction) else None
    num_seen = 0
    try:
        summaries = context.accumulator(list[Any](), AddingAccumulatorParam(list[Any]()))
        measured = MeasuredFunction(function)
        if observed is not None:
            summarize = observed.summarize
            measured = MeasuredFunction(
                observed.run_task, lambda result: summaries.add([summarize(result)])
            )

        def collect() -> list[Measured[R]]:
            context.setJobGroup(group, description, interruptOnCancel=True)
            return context.parallelize(tasks, len(tasks)).map(measured).collect()

        def watch() -> None:
            nonlocal num_seen
            if observed is not None and (new := summaries.value[num_seen:]):
                num_seen += len(new)
                for each in new:
                    observed.see(each)

        with ThreadPoolExecutor(1) as pool:
            try:
                future = pool.submit(_inheriting_thread(session)(collect))
                tracker = context.statusTracker()
                await_tasks(future, tracker, group, len(tasks), description, idle_limit_s, watch)
                return [totals.add(each) for each in future.result()]
            except (Py4JJavaError, PySparkException) as error:
                raise TaskError(f"{description}: {_cause(error)}") from error
            except BaseException:
                context.cancelJobGroup(group)
                raise
    except _JVM_LOST as error:  # also while reading a failure or cancelling a job
        lost = "the driver's JVM has ended, killed or out of memory: run the step again"
        raise TaskError(f"{description}: {lost}; it resumes from its commits") from error


def _inheriting_thread(session: SparkSession) -> Callable[[Callable[[], R]], Callable[[], R]]:
    """Return a decorator for functions of threads that have this thread's local properties."""
    if pyspark.__version__ < "4":  # Spark 3 takes the function, and Spark 4 the session
        return inheritable_thread_target
    return inheritable_thread_target(session)


def _cause(error: Py4JJavaError | PySparkException) -> str:
    """Find the task's own error in Spark's long message: the line after the last frame."""
    java_error = getattr(error, "java_exception", None)
    message = str(error if java_error is None else java_error.getMessage()).strip()
    _, traceback, frames = message.rpartition("Traceback (most recent call last):\n")
    lines = frames.splitlines()
    return next((line for line in lines if traceback and line[:1].strip()), lines[0])


if __name__ == "__main__":
    print(f"wrote {configure()}: spark-submit is ready", file=sys.stderr)
