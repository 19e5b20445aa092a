"""Start the one server from which all tests' ranks are forked."""

from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running

from torch.multiprocessing import get_context


def rank_context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.training.preloaded"])
    return context


def start_rank_server() -> None:
    """Before others start one that has not imported what ranks need: 0.7 s a rank."""
    rank_context()
    ensure_running()
