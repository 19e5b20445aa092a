"""Run a training job as a user starts it, under a torchrun whose ranks can be found and struck."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.process_tree import children
from tests.whole_path.processes import REPOSITORY, TINY

NUM_RANKS = 4
_RANK = re.compile(rb"(?:^|\0)RANK=(\d+)\0")


@dataclass(frozen=True)
class TorchrunJob:
    """TorchrunJob is four ranks that train a run's student, and their common log with torchrun."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @classmethod
    def start(cls, program: Path, run_uri: str, log: Path, options: Sequence[str]) -> "TorchrunJob":
        """Start it; torchrun restarts it three times, a fifth start is another call of this."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        job = [str(program), "--recipe", str(TINY), "--run", run_uri, *options]
        ranks = ["--nproc-per-node", str(NUM_RANKS), "--"]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *torchrun, *ranks, *job],
                cwd=REPOSITORY,
                env=os.environ | one_thread | {"PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=output,
            )
        return cls(process, log)

    def ranks(self) -> dict[int, int]:
        """Return the processes of its ranks, by rank, as far as they exist."""
        found = {}
        for process_id in children(self.process.pid):
            with suppress(OSError):
                environment = Path(f"/proc/{process_id}/environ").read_bytes()
                if rank := _RANK.search(environment):
                    found[int(rank[1])] = process_id
        return found

    def text(self) -> str:
        """Read all output of torchrun and its ranks."""
        return self.log.read_text(errors="replace")


def strike(process_id: int, signal_number: signal.Signals) -> bool:
    """Send a signal; return whether there was a process to receive it."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal_number)
        return True
    return False
