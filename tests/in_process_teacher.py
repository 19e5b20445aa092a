"""Teachers of the targets step without servers: functions of frames, and servers' own functions."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np

from pipeline.kbest import KBest, TeacherFailure
from pipeline.steps.targets import Teacher
from pipeline.steps.teacher_inputs import TeacherInput
from training.targets.teacher import TeacherFunction
from training.targets.teacher_messages import decode_targets, encode_input

T = TypeVar("T")


def teacher_of(label: Callable[[np.ndarray], KBest]) -> Teacher:
    """Return a teacher that labels each utterance by its frames alone."""
    return lambda inputs: (label(each.frames) for each in inputs)


def answer_alone(function: TeacherFunction, payload: bytes) -> bytes | Exception:
    """Compute one request as a server does that has no other."""
    (answer,) = function.finish(function.compute(function.prepare([payload])))
    return answer


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
