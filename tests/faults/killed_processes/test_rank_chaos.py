"""No rank that dies or stalls, and no torchrun that dies, changes a byte of the model."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.killed_processes.rank_chaos import STRIKES, TRAINERS, RankChaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

FIRST = "htm"
"""The trainer of `make faults`: groups of ranks, and blocks; `make chaos` strikes them all."""

END_LIMIT_S = 200.0
"""The ranks' own limit, torchrun's grace of 30 s and a busy machine together; else they hang."""


@pytest.mark.parametrize(
    "trainer",
    [pytest.param(each, marks=() if each == FIRST else pytest.mark.chaos) for each in TRAINERS],
)
def test_training_resumes_to_the_same_bytes(tmp_path: Path, trainer: str) -> None:
    """Training survives killed ranks, and a stopped one or a killed torchrun; it names each.

    All other ranks end by themselves or by torchrun's SIGTERM, which only the stopped one ignores.
    """
    chaos = RankChaos(tmp_path, TRAINERS.index(trainer))
    chaos.fit(trainer, STRIKES[trainer])
    record = chaos.record
    print(record.table())
    assert record.different == []
    assert record.unnamed == []
    num_strikes = {kind: len(ended_s) for kind, ended_s in record.ended_s.items()}
    assert num_strikes == Counter(STRIKES[trainer])
    assert record.forced == record.stopped
    assert max(seconds for each in record.ended_s.values() for seconds in each) < END_LIMIT_S
    assert record.num_resumed > 0
