"""Utterances through real device servers: in batches, cut into windows, of several tasks."""

import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from infra.devices.device_pool import DevicePool, _private_directory
from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, TeacherFailure, joined
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import model_step
from pipeline.steps.targets import TargetsConfig, TeacherInput
from tests.in_process_teacher import in_batches, in_process
from training.models.lstm import LstmModel
from training.models.store import TrainedModel, store_model
from training.settings.decoding import WindowsConfig
from training.settings.models import LstmConfig
from training.targets.teacher import PooledTeacher, kept_targets, serve_teacher
from training.targets.teacher_messages import encode_input, encode_targets

CONFIG = TargetsConfig(5, 400, 3)
FORM = LstmConfig(1, 16, bidirectional=True, look_ahead=0, dropout=0.0)
BATCH_FRAMES = 400


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevicePool]:
    """Two servers of an untrained teacher."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trained = TrainedModel(LstmModel(FORM, 30).eval(), torch.zeros(30))
    spec = StepSpec(ObjectStore((str(folder),)), str(folder), model_step("teacher"), {})
    run_step(spec, partial(store_model, trained=trained, data=Tally(), statistics={}))
    arguments = {"run_uri": str(folder), "k": "5", "form": canonical_json(FORM)}
    serve = "training.targets.teacher:serve_teacher"
    pool = DevicePool(serve, arguments, ("cpu#0", "cpu#1"), BATCH_FRAMES, idle_timeout_s=3.0)
    yield pool
    shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)


def inputs(seed: int, count: int = 60) -> list[TeacherInput]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 120, count)
    return [
        TeacherInput(generator.normal(size=(length, 192)).astype(np.float32), number)
        for number, length in enumerate(lengths)
    ]


def teacher(pool: DevicePool, windows: WindowsConfig) -> PooledTeacher[KBest]:
    return PooledTeacher(pool, windows, partial(kept_targets, CONFIG), joined)


def assert_close(found: Sequence[KBest | TeacherFailure], given: Sequence[TeacherInput]) -> None:
    """Compare with each utterance alone: logits within a rounding of float16 and its neighbour."""
    function = serve_teacher("cpu", **ARGUMENTS)
    for one, other in zip(found, in_process(function, 5)(given), strict=True):
        assert isinstance(one, KBest)
        assert isinstance(other, KBest)
        np.testing.assert_allclose(one.logits, other.logits, atol=2e-3)
        np.testing.assert_allclose(one.log_z, other.log_z, atol=4e-3)
        assert (one.senones == other.senones).mean() > 0.99


ARGUMENTS: dict[str, str] = {}


@pytest.fixture(autouse=True)
def arguments(pool: DevicePool) -> None:
    ARGUMENTS.update(pool.arguments)


def test_batches_give_what_each_utterance_gives_alone(pool: DevicePool) -> None:
    """In their order, up to the last bits."""
    given = inputs(1)
    assert_close(list(teacher(pool, WindowsConfig())(given)), given)


def test_no_task_changes_another_s_bits(pool: DevicePool) -> None:
    """Four tasks at once, one of which waits at times, have what each has alone, to the bit."""
    given = [inputs(seed) for seed in (1, 2, 7, 8)]
    whole = teacher(pickle.loads(pickle.dumps(pool)), WindowsConfig())

    def waiting(utterances: list[TeacherInput]) -> Iterator[TeacherInput]:
        for number, each in enumerate(utterances):
            if number % 20 == 10:
                time.sleep(0.2)
            yield each

    with ThreadPoolExecutor(len(given)) as threads:
        streams = [waiting(given[0]), *given[1:]]
        found = list(threads.map(lambda each: list(whole(each)), streams))
    alone = in_batches(serve_teacher("cpu", **ARGUMENTS), CONFIG)
    for one, other in zip(found, given, strict=True):
        assert list(map(encoded, one)) == list(map(encoded, alone(other)))


def encoded(targets: KBest | TeacherFailure) -> bytes:
    assert isinstance(targets, KBest)
    return encode_targets(targets)


def test_the_same_batch_has_the_same_bytes() -> None:
    """The last bits depend on a batch's utterances alone: the same batch gives them again."""
    batch = [encode_input(each) for each in inputs(6, 8)]
    answers = []
    for _ in range(2):
        function = serve_teacher("cpu", **ARGUMENTS)
        answers.append(function.finish(function.compute(function.prepare(batch))))
    assert answers[0] == answers[1]
    assert all(isinstance(answer, bytes) for answer in answers[0])


def test_long_utterances_go_in_windows(pool: DevicePool) -> None:
    """Cut far below their length, their targets are those of the whole; none is lost."""
    given = inputs(3, 12)
    cut = teacher(pool, WindowsConfig(window_frames=80, overlap_frames=30))
    assert_close(list(cut(given)), given)


def test_an_utterance_that_fails_in_one_window_fails(pool: DevicePool) -> None:
    """Its other windows' answers are dropped; the next utterance has its own."""
    given = inputs(4, 3)
    poison = TeacherInput(np.ones((200, 192), np.float32), 0)
    poison.frames[150] = np.nan
    cut = teacher(pool, WindowsConfig(window_frames=80, overlap_frames=30))
    first, failed, *rest = cut([given[0], poison, *given[1:]])
    assert isinstance(failed, TeacherFailure)
    assert "NaN or infinity" in failed.reason
    assert_close([first, *rest], given)


def test_answers_begin_before_all_is_given(pool: DevicePool) -> None:
    """A stream without end is labelled as it comes."""

    def endless() -> Iterator[TeacherInput]:
        while True:
            yield from inputs(5)

    answers = teacher(pool, WindowsConfig())(endless())
    assert isinstance(next(answers), KBest)
    answers.close()
