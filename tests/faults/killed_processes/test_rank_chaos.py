"""No rank that dies or stalls, and no torchrun that dies, changes a byte of the model."""

from pathlib import Path

import pytest

from tests.faults.killed_processes.rank_chaos import TRAINERS, RankChaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

END_LIMIT_S = 200.0
"""The ranks' own limit, torchrun's grace of 30 s and a busy machine together; else they hang."""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_resumes_to_the_same_bytes(tmp_path: Path, trainer: str) -> None:
    """Training survives three killed ranks, a stopped one and a killed torchrun, and names each.

    All other ranks end by themselves or by torchrun's SIGTERM, which only the stopped one ignores.
    """
    chaos = RankChaos(tmp_path, TRAINERS.index(trainer))
    chaos.fit(trainer, ["rank", "rank", "rank", "stop", "torchrun"])
    record = chaos.record
    print(record.table())
    assert record.different == []
    assert record.unnamed == []
    assert {kind: len(ended_s) for kind, ended_s in record.ended_s.items()} == {
        "rank": 3,
        "stop": 1,
        "torchrun": 1,
    }
    assert record.forced == record.stopped
    assert max(seconds for each in record.ended_s.values() for seconds in each) < END_LIMIT_S
    assert record.num_resumed > 0
