"""A user's own model in other processes: Spark's tasks and device servers import it, or say how."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from infra.cluster import load_cluster
from infra.devices.device_pool import DeviceError, DevicePool
from infra.settings import canonical_json
from infra.spark.session import TaskError, run_tasks, spark_session
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import joined
from pipeline.runs.names import ALIGNMENT_STEP, TEACHER, realignment_rounds
from pipeline.settings import TargetsConfig
from pipeline.steps.targets import TeacherInput
from tests.training.align.labelled_run import (
    Place,
    bootstrapped,
    shards,
    store_network,
    write_labelled,
)
from training.align.realignment import AlignmentSettings, realign
from training.settings.decoding import WindowsConfig
from training.settings.models import FactoryConfig
from training.targets.teacher import PooledTeacher, kept_targets

pytestmark = pytest.mark.chaos

SOURCE = """\
from torch import nn


class Small(nn.Linear):
    def __init__(self, num_inputs: int, num_senones: int) -> None:
        super().__init__(num_inputs, num_senones)

    def forward(self, frames, lengths):
        return super().forward(frames)
"""
FORM = FactoryConfig(factory="users_models:Small", look_ahead=0)
REMEDY = "No module named 'users_models': need a module that every process finds: install its"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which this process alone finds."""
    path = tmp_path / "own" / "users_models.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(path.parent)
    return path


@pytest.fixture
def place(tmp_path: Path, module: Path) -> Place:
    assert module.exists()
    made = write_labelled(tmp_path / "data", shards())
    bootstrapped(made, max_hours=8 / 3600)
    return made


@pytest.fixture
def session() -> Iterator[SparkSession]:
    with spark_session("own model", load_cluster("demo")) as session:
        yield session


def test_spark_tasks_find_it_among_py_files(
    place: Place, module: Path, session: SparkSession
) -> None:
    """Without, they name the module and the remedy, and commit nothing; then the step resumes."""
    (only,) = realignment_rounds(1)
    store_network(place, only.aligner, FORM)

    def distribute(tasks: Sequence[Any], function: Any, description: str) -> list[Any]:
        return run_tasks(session, tasks, function.run_task, description)

    def align() -> Any:
        return realign(*place, only, AlignmentSettings(0.3, FORM), 1.0, distribute).manifest

    with pytest.raises(TaskError, match=REMEDY):
        align()
    assert not [each for each in place[0].list(place[1]) if f"{ALIGNMENT_STEP}/" in each.uri]
    session.sparkContext.addPyFile(str(module))  # as --py-files does
    assert align().tally_in.utterances > 0


def test_device_servers_find_it_where_their_task_does(place: Place, module: Path) -> None:
    """A server has its task's import path; where it does not find the module, it says so."""
    store_network(place, TEACHER, FORM)
    arguments = {"run_uri": place[1], "k": "2", "form": canonical_json(FORM)}

    def label() -> list[Any]:
        serve = "training.targets.teacher:serve_teacher"
        pool = DevicePool(serve, arguments, ("cpu",), 100, idle_timeout_s=1.0)
        kept = partial(kept_targets, TargetsConfig(2, 100, 3))
        teacher = PooledTeacher(pool, WindowsConfig(), kept, joined)
        return list(teacher([TeacherInput(np.ones((3, NUM_INPUTS), np.float32), 0)]))

    assert label()[0].senones.shape == (3, 2)
    module.rename(module.with_name("others_models.py"))
    with pytest.raises(DeviceError, match=REMEDY):
        label()
