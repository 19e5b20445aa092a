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
from hypothesis import given
from hypothesis import strategies as st

from infra.devices.device_pool import DevicePool, _private_directory
from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import KBest, TeacherFailure, joined
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import model_step
from pipeline.settings import TargetsConfig
from pipeline.steps.targets import TeacherInput
from tests.in_process_teacher import in_batches, in_process
from training.models.lstm import LstmModel
from training.models.store import TrainedModel, store_model
from training.settings.decoding import WindowsConfig
from training.settings.models import LstmConfig
from training.targets.teacher import (
    PooledTeacher,
    encode_targets,
    kept_targets,
    serve_teacher,
    windows,
)

CONFIG = TargetsConfig(5, 400, 3)
FORM = LstmConfig(1, 16, bidirectional=True, look_ahead=0, dropout=0.0)
BATCH_FRAMES = 400


ARGUMENTS: dict[str, str] = {}
"""Those of the pool's factory."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevicePool]:
    """Two servers of an untrained teacher."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trained = TrainedModel(LstmModel(FORM, 30).eval(), torch.zeros(30))
    spec = StepSpec(ObjectStore((str(folder),)), str(folder), model_step("teacher"), {})
    run_step(spec, lambda step: store_model(step, trained, Tally(), {}, Tally()))
    arguments = {"run_uri": str(folder), "k": "5", "form": canonical_json(FORM)}
    ARGUMENTS.update(arguments)
    serve = "training.targets.teacher:serve_teacher"
    pool = DevicePool(serve, arguments, ("cpu#0", "cpu#1"), BATCH_FRAMES, idle_timeout_s=3.0)
    yield pool
    shutil.rmtree(_private_directory() / pool.token, ignore_errors=True)


def inputs(seed: int, count: int = 60) -> list[TeacherInput]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 120, count)
    return [
        TeacherInput(generator.normal(size=(length, NUM_INPUTS)).astype(np.float32), number)
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


def test_long_utterances_go_in_windows(pool: DevicePool) -> None:
    """Cut far below their length, their targets are those of the whole; none is lost."""
    given = inputs(3, 12)
    cut = teacher(pool, WindowsConfig(window_frames=80, overlap_frames=30))
    assert_close(list(cut(given)), given)


def test_an_utterance_that_fails_in_one_window_fails(pool: DevicePool) -> None:
    """Its other windows' answers are dropped; the next utterance has its own."""
    given = inputs(4, 3)
    poison = TeacherInput(np.ones((200, NUM_INPUTS), np.float32), 0)
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


@given(st.integers(0, 500), st.integers(3, 60), st.integers(0, 29))
def test_each_frame_is_labelled_once(num_frames: int, window: int, overlap: int) -> None:
    """In order; no window is longer than the bound, and cuts hear the whole overlap."""
    config = WindowsConfig(window, min(overlap, (window - 1) // 2))
    cut = windows(num_frames, config)
    assert [frame for each in cut for frame in each.labelled] == list(range(num_frames))
    for each in cut:
        assert len(each.heard) <= window
        assert list(each.heard)[each.kept] == list(each.labelled)
        before = each.labelled.start - each.heard.start
        after = each.heard.stop - each.labelled.stop
        assert before == min(config.overlap_frames, each.labelled.start) or len(cut) == 1
        assert after == min(config.overlap_frames, num_frames - each.labelled.stop) or len(cut) == 1


def test_windows_are_of_like_length() -> None:
    """101 frames in windows that label 50 at most are 33, 34 and 34, not 50, 50 and 1."""
    cut = windows(101, WindowsConfig(70, 10))
    assert [len(each.labelled) for each in cut] == [33, 34, 34]
    assert windows(70, WindowsConfig(70, 10))[0].kept == slice(0, 70)


def test_an_overlap_leaves_something_to_label() -> None:
    """Twice the overlap must be less than the window."""
    with pytest.raises(ValueError, match=r"overlap_frames = 50: need less than half of .* = 100"):
        WindowsConfig(100, 50)
