"""No rank that dies or stalls, and no torchrun that dies, changes a byte of the model."""

from pathlib import Path

import pytest

from tests.faults.killed_processes.rank_chaos import TRAINERS, RankChaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

KILL_LIMIT_S = 30.0  # torchrun's own grace for ranks that do not end by SIGTERM
STALL_LIMIT_S = 100.0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_resumes_to_the_same_bytes(tmp_path: Path, trainer: str) -> None:
    """Training survives three killed ranks, a stopped one and a killed torchrun, and names each."""
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
    assert max(record.ended_s["rank"] + record.ended_s["torchrun"]) < KILL_LIMIT_S
    assert max(record.ended_s["stop"]) < STALL_LIMIT_S
    assert record.num_resumed > 0
