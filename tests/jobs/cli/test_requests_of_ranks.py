"""A training step's record has the requests of all ranks."""

from infra.task_metrics import RequestCounts
from jobs.cli.training_steps import requests_of_others
from training.distributed.process_group import CPU, ProcessGroup
from training.distributed.simulated_group import simulate_ranks


def test_rank_0_adds_what_the_others_asked_for() -> None:
    """Its own are counted where its process is; the others' nowhere else."""

    def ask(group: ProcessGroup) -> RequestCounts:
        own = RequestCounts(get=10 ** group.rank(), bytes_sent=1)
        return requests_of_others(own, group, CPU)

    assert simulate_ranks(3, ask) == [
        RequestCounts(get=110, bytes_sent=2),
        RequestCounts(),
        RequestCounts(),
    ]
