"""Run a thread beside the training thread that exchanges with other ranks while it computes."""

import threading
from collections.abc import Callable

from training.distributed.process_group import ProcessGroup, are_exchanges_numbered
from training.distributed.simulated_group import SimulatedGroup


class CommunicationThread:
    """CommunicationThread runs `work` from now on; of a simulated rank, in its virtual time.

    Its exchanges use tags or a group that no other thread uses. An error ends it, and is raised by
    `check` and `join` in the training thread. It does not keep alive a process that ends.
    """

    def __init__(self, work: Callable[[], None], group: ProcessGroup, purpose: str) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._join: Callable[[], None]
        if isinstance(group, SimulatedGroup):
            self._join = group.start_thread(self._run)
        else:
            thread = threading.Thread(target=self._run, name=purpose, daemon=True)
            thread.start()
            self._join = thread.join

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until the thread ends; raise the error that ended it, if any."""
        self._join()
        self.check()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `check` raises it in the training thread
            self._error = error


def check_exchanges_beside(group: ProcessGroup) -> None:
    """Raise ValueError where torch numbers exchanges: those of threads follow no order."""
    if are_exchanges_numbered() and group.size() > 1 and not isinstance(group, SimulatedGroup):
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL ends trainings whose exchanges run beside the "
            "gradients, AdPsgd and OneBit with double_buffering: set it to INFO or OFF"
        )
