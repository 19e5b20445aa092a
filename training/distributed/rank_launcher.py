"""Start ranks by torchrun, and end with the exit code of the rank that failed.

python -m training.distributed.rank_launcher --nproc-per-node 4 --module -- jobs.train_student ...
"""

import sys
from collections.abc import Iterable

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from infra.supervisor import describe_end, shell_code, signal_of
from infra.torchrun import set_threads_of_ranks

STEP_CODES = (2, 3)
"""The exit codes by which a step says more than that it failed; torchrun's own is always 1."""


def main() -> None:
    """Run torchrun with this command line; exit with 0, a failed rank's code, or 128 + a signal."""
    set_threads_of_ranks()
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        cause = root_cause(error.failures.values())
        if signal_of(cause.exitcode) is not None:
            end = describe_end(cause.exitcode)
            print(f"rank {cause.local_rank} (process {cause.pid}) {end}", file=sys.stderr)
        sys.exit(shell_code(cause.exitcode))
    except SignalException as ended:
        sys.exit(128 + ended.sigval)


def root_cause(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """Return the failure that explains the others: a step's own code first, then the earliest."""
    return min(failures, key=lambda each: (each.exitcode not in STEP_CODES, each.timestamp))


if __name__ == "__main__":
    main()
