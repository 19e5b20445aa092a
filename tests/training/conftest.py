"""Keep one pool of ranks for all tests of training: starting them costs more than the tests."""

from collections.abc import Iterator

import pytest

from tests.training.trainers.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(str(tmp_path_factory.mktemp("rendezvous") / "store"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(str(tmp_path_factory.mktemp("rendezvous") / "store"), world_size=8)
    yield pool
    pool.close()
