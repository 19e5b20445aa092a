"""Run programs in processes forked from the server that has imported torch.

A process that Python starts takes 3 to 5 s of CPU to import torch and make an optimizer.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import TCPStore

from tests.training.rank_context import rank_context

LIMIT_S = 300.0


@dataclass(frozen=True)
class Program:
    """Program is a file of Python with its arguments, its folder, and variables that it has."""

    path: Path
    arguments: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, output: str) -> None:
        """Run as the main program, write both streams to files, and end with the exit code."""
        for descriptor, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{output}.{ending}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.pop("TRITON_INTERPRET")  # which the server has for tests of kernels
        multiprocessing.set_start_method(None, force=True)  # Python's own, as in other programs
        os.environ |= self.variables
        os.chdir(self.folder)
        torch.set_num_threads(1)  # as torchrun does by OMP_NUM_THREADS
        sys.argv = [str(self.path), *self.arguments]
        runpy.run_path(str(self.path), run_name="__main__")


@dataclass(frozen=True)
class Ended:
    """Ended holds a program's exit code, negative where a signal ended it, and its streams."""

    code: int | None
    out: str
    err: str


def run_forked(programs: Sequence[Program]) -> list[Ended]:
    """Run programs side by side; return how each has ended, in order."""
    with TemporaryDirectory() as folder:
        outputs = [f"{folder}/{number}" for number in range(len(programs))]
        processes = [
            rank_context().Process(target=program.run, args=(output,))
            for program, output in zip(programs, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
            process.kill()
            process.join()
        return [
            Ended(
                process.exitcode, *(Path(f"{output}.{each}").read_text() for each in ("out", "err"))
            )
            for process, output in zip(processes, outputs, strict=True)
        ]


def run_on_ranks(num_ranks: int, path: Path, arguments: tuple[str, ...], folder: Path) -> str:
    """Run a program on ranks in the world that torchrun opens; return what all have printed.

    This process holds the ranks' store, as torchrun's agent does. Fails if a rank does.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = run_forked(
        [
            Program(path, arguments, folder, _torchruns_variables(rank, num_ranks, store.port))
            for rank in range(num_ranks)
        ]
    )
    assert [each.code for each in ended] == [0] * num_ranks, "\n".join(each.err for each in ended)
    return "".join(each.out for each in ended)


def _torchruns_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
    }
