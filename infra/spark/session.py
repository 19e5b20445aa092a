"""Start Spark sessions and run one Spark task per element; as a program, set up spark-submit.

A progress bar shows the tasks of a job. The job fails if no executor takes its tasks for half an
hour.
"""

import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf, StatusTracker, inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from infra.cluster import Cluster, require_dependencies
from infra.log_lines import progress_bar
from infra.spark.host_environment import find_java_home, require_environment, temporary_folder
from infra.spark.observer import ObservedFunction, Observer, Summaries
from infra.spark.settings import cluster_settings, submitted_conf

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

S = TypeVar("S")

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

    Raises JavaError if there is no Java.
    """
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
    of_pyspark = Path(pyspark.__file__).parent / "conf"  # absent from wheels
    directory = Path(os.environ.get("SPARK_CONF_DIR") or of_pyspark)
    directory.mkdir(parents=True, exist_ok=True)
    java_home, python = shlex.quote(str(find_java_home())), shlex.quote(sys.executable)
    environment = _SPARK_ENV.format(java_home=java_home, python=python)
    (directory / "spark-env.sh").write_text(environment, encoding="utf-8")
    (directory / "log4j2.properties").write_text(_LOG4J2, encoding="utf-8")
    return directory


@contextmanager
def spark_session(app_name: str, cluster: Cluster) -> Iterator[SparkSession]:
    """Start Spark as `cluster` says, and stop it at the end of the `with` statement.

    Under spark-submit its options win. Raises ConfigurationError if a Python dependency of the
    cluster is not installed, or if the environment names what Spark cannot use.
    """
    require_dependencies(cluster)
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
    observer: Observer[R, S] | None = None,
) -> list[R]:
    """Run `function` on each of `tasks`, one Spark task each; results keep the order of `tasks`.

    The `observer` sees each result's summary soon after its task has ended.
    Spark retries a failed task as often as its master allows; local masters do not retry. Raises
    TaskError after the last attempt, when the JVM ends, or when no task ran for `idle_limit_s`.
    Other exceptions, such as KeyboardInterrupt, cancel the job. Progress goes to a terminal.
    """
    if not tasks:
        return []
    try:
        if observer is None:
            return _collect(session, tasks, function, description, idle_limit_s, lambda: None)
        summaries = session.sparkContext.accumulator(list[Any](), Summaries())
        observed = ObservedFunction(function, observer.summarize, summaries)
        num_seen = 0

        def watch() -> None:
            nonlocal num_seen
            new = summaries.value[num_seen:]
            num_seen += len(new)
            for each in new:
                observer.see(each)

        return _collect(session, tasks, observed, description, idle_limit_s, watch)
    except _JVM_LOST as error:  # also while reading a failure or cancelling a job
        lost = "the driver's JVM has ended, killed or out of memory: run the step again"
        raise TaskError(f"{description}: {lost}; it resumes from its commits") from error


def _collect(
    session: SparkSession,
    tasks: Sequence[T],
    function: Callable[[T], R],
    description: str,
    idle_limit_s: float,
    watch: Callable[[], object],
) -> list[R]:
    context = session.sparkContext
    group = uuid.uuid4().hex

    def collect() -> list[R]:
        context.setJobGroup(group, description, interruptOnCancel=True)
        return context.parallelize(tasks, len(tasks)).map(function).collect()

    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(inheritable_thread_target(session)(collect))
            tracker = context.statusTracker()
            await_tasks(future, tracker, group, len(tasks), description, idle_limit_s, watch)
            results: list[R] = future.result()
        except (Py4JJavaError, PySparkException) as error:
            raise TaskError(f"{description}: {_cause(error)}") from error
        except BaseException:
            context.cancelJobGroup(group)
            raise
    return results


def _cause(error: Py4JJavaError | PySparkException) -> str:
    """Find the task's own error in Spark's long message: the line after the last frame."""
    java_error = getattr(error, "java_exception", None)
    message = str(error if java_error is None else java_error.getMessage()).strip()
    _, traceback, frames = message.rpartition("Traceback (most recent call last):\n")
    lines = frames.splitlines()
    return next((line for line in lines if traceback and line[:1].strip()), lines[0])


if __name__ == "__main__":
    print(f"wrote {configure()}: spark-submit is ready", file=sys.stderr)
