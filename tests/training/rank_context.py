"""The server that all tests' ranks are forked from: a process has one, whoever starts it first."""

from multiprocessing.context import ForkServerContext

from torch.multiprocessing import get_context


def rank_context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.training.preloaded"])
    return context
