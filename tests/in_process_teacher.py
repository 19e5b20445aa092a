"""Teachers of the targets step without servers: functions of frames, and servers' own functions."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import TypeVar

import numpy as np

from infra.devices.device_client import LOOK_AHEAD_BATCHES, PoolAnswer, RequestStream
from infra.devices.messages import PoolRequest, form_batches
from pipeline.kbest import KBest, TeacherFailure
from pipeline.settings import TargetsConfig
from pipeline.steps.targets import Teacher, TeacherInput
from training.settings.decoding import WindowsConfig
from training.targets.teacher import TeacherFunction, decode_targets, encode_input

T = TypeVar("T")


def teacher_of(label: Callable[[np.ndarray], KBest]) -> Teacher:
    """Return a teacher that labels each utterance by its frames alone."""
    return lambda inputs: (label(each.frames) for each in inputs)


def answer_alone(function: TeacherFunction, payload: bytes) -> bytes | Exception:
    """Compute one request as a server does that has no other."""
    (answer,) = function.finish(function.compute(function.prepare([payload])))
    return answer


def in_batches(function: TeacherFunction, config: TargetsConfig) -> Teacher:
    """Return a teacher that computes in this process the batches that a task would send."""

    def label(inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        requests = [PoolRequest(len(each.frames), encode_input(each)) for each in inputs]
        found: dict[int, KBest | TeacherFailure] = {}
        longest = max(config.request_frames, WindowsConfig().window_frames)
        look_ahead = LOOK_AHEAD_BATCHES * longest
        for batch in form_batches(enumerate(requests), config.request_frames, look_ahead):
            prepared = function.prepare([each.payload for each in batch.requests])
            answers = function.finish(function.compute(prepared))
            for number, answer in zip(batch.numbers, answers, strict=True):
                assert isinstance(answer, bytes)
                found[number] = decode_targets(answer, config.k, config.tail_samples)
        return iter([found[number] for number in range(len(requests))])

    return label


def in_process(function: TeacherFunction, k: int) -> Teacher:
    """Return a teacher that computes in this process what a server would, one by one."""
    return lambda inputs: stream_alone(function, partial(decode_targets, k=k), inputs)


def stream_alone(
    function: TeacherFunction, decode: Callable[[bytes], T], inputs: Iterable[TeacherInput]
) -> Iterator[T | TeacherFailure]:
    """Yield what a server's function answers to each utterance alone."""
    for each in inputs:
        answer = answer_alone(function, encode_input(each))
        if isinstance(answer, Exception):
            yield TeacherFailure(f"{type(answer).__name__}: {answer}")
        else:
            yield decode(answer)


def answers_here(stream: RequestStream, requests: Iterable[PoolRequest]) -> Iterator[PoolAnswer]:
    """Yield the answers of the pool's server in this process, in the place of the device pool's."""
    function = resolve_name(stream._pool.factory)("cpu", **stream._pool.arguments)
    for each in requests:
        answer = answer_alone(function, each.payload)
        assert isinstance(answer, bytes)
        yield answer
