"""Count the files between a job and its mathematics, by tracing small runs in this process.

python -m tests.architecture.call_depth

Tasks run in a plain loop and the teacher answers in this process, so that one stack holds all of a
step's own code. On Spark the stack is cut: the driver's ends in infra/spark/session.py, an
executor's begins with infra/task_metrics.py; the teacher's server is a process of its own.
"""

import io
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType

import pytest

from infra.devices.batches import PoolRequest
from infra.devices.device_client import PoolAnswer, RequestStream
from jobs.cli import spark_steps
from jobs.cli.job import Job
from pipeline.runs.engine import Distribute
from pipeline.runs.names import SUBSETS
from tests.faults.killed_processes.chaos_run import store_random_teacher
from tests.in_process_teacher import answer_alone
from tests.small_corpus import local_store, serially, write_corpus
from tests.training.fit import small_fits
from tests.whole_path.processes import TINY

REPOSITORY = Path(__file__).parents[2]
PACKAGES = tuple(f"{REPOSITORY}/{name}/" for name in ("jobs", "training", "pipeline", "infra"))

MAX_FILES = 8

MATHEMATICS = {
    "select_utterances": (
        "pipeline/sampling.py:sampling_priority",
        "pipeline/packing.py:pack_speakers",
    ),
    "extract_features": (
        "pipeline/filterbank/log_mel.py:compiled_log_mel_energies",
        "pipeline/normalization/causal_mean.py:subtract_causal_means",
    ),
    "generate_targets": (
        "pipeline/splicing.py:splice",
        "training/models/acoustic_model.py:utterance_logits",
        "pipeline/kbest.py:select_kbest",
    ),
    "train_student": (
        "training/models/acoustic_model.py:forward",
        "training/models/losses.py:kbest_cross_entropy",
    ),
}
"""The functions that hold each step's equations."""


@dataclass
class Trace:
    """The project's files that ran, and the longest chain of them to each equation."""

    equations: Sequence[str]
    executed: set[str] = field(default_factory=set)
    chains: dict[str, list[str]] = field(default_factory=dict)

    def observe(self, frame: FrameType, event: str, _: object) -> None:
        """Note one call; a global trace function as sys.settrace takes it, which sees no lines."""
        if event != "call" or (file := project_file(frame)) is None:
            return
        self.executed.add(file)
        equation = f"{file}:{frame.f_code.co_name}"
        if equation in self.equations:
            chain = files_on_stack(frame)
            self.chains[equation] = max(chain, self.chains.get(equation, []), key=len)


def project_file(frame: FrameType) -> str | None:
    """The file of a frame, relative to the repository; None if it is not one of the packages."""
    name = frame.f_code.co_filename
    is_import = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
    return name[len(f"{REPOSITORY}/") :] if name.startswith(PACKAGES) and not is_import else None


def files_on_stack(frame: FrameType | None) -> list[str]:
    """The distinct files of the packages on the stack, outermost first."""
    files: list[str] = []
    while frame is not None:
        if (file := project_file(frame)) is not None:
            files.append(file)
        frame = frame.f_back
    return list(dict.fromkeys(reversed(files)))


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Observe every call of this thread and of those that it starts."""
    threading.settrace(trace.observe)
    sys.settrace(trace.observe)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@contextmanager
def plain_loop(_: Job) -> Iterator[Distribute]:
    """A step's tasks one after the other, in the place of Spark."""
    yield serially


def answers_here(stream: RequestStream, requests: Iterable[PoolRequest]) -> Iterator[PoolAnswer]:
    """The answers of the pool's server in this process, in the place of the device pool's."""
    function = resolve_name(stream._pool.factory)("cpu", **stream._pool.arguments)
    for each in requests:
        answer = answer_alone(function, each.payload)
        assert isinstance(answer, bytes)
        yield answer


def start(name: str, run_uri: str, *options: str) -> int:
    """Start jobs/<name>.py as a program, in this process; the exit code."""
    arguments = [name, "--recipe", str(TINY), "--run", run_uri, *options]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", arguments)
        patch.setattr(spark_steps, "distribute_on_spark", plain_loop)
        patch.setattr(RequestStream, "answers", answers_here)
        patch.delitem(sys.modules, f"jobs.{name}", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"jobs.{name}", run_name="__main__", alter_sys=True)
    return int(ended.value.code or 0)


def trace_steps(folder: Path) -> dict[str, Trace]:
    """Run selection, extraction, target generation and the student's training below `folder`."""
    store, run_uri, corpus_uri = local_store(folder / "pipeline")
    for subset in SUBSETS:
        write_corpus(store, corpus_uri, subset, num_speakers=3, num_each=2)
    traces = {name: Trace(files) for name, files in MATHEMATICS.items()}
    for name, trace in traces.items():
        uri, options = run_uri, ()
        if name == "generate_targets":
            store_random_teacher(store, run_uri)
        elif name == "train_student":
            (_, uri), options = small_fits.write_run(folder / "training"), ("--trainer", "gtc")
        with traced(trace):
            code = start(name, uri, *options)
        assert code == 0, f"{name} exited with {code}"
    return traces


def main() -> None:
    """Print the chains and the number of files that each step executed."""
    with tempfile.TemporaryDirectory() as folder:
        traces = trace_steps(Path(folder))
    for name, trace in traces.items():
        print(f"{name}: {len(trace.executed)} files executed")
        for equation, chain in trace.chains.items():
            print(f"  {len(chain)} files to {equation}: {' > '.join(chain)}")


if __name__ == "__main__":
    main()
