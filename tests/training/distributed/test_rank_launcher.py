"""The failed rank whose code torchrun's launcher ends with."""

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from training.distributed.rank_launcher import root_cause


def test_the_rank_that_explains_the_others_is_chosen() -> None:
    """Its own code comes before that of a rank that was ended; else the earliest failure."""

    def failure(rank: int, code: int, second: int) -> ProcessFailure:
        found = ProcessFailure(rank, 100 + rank, code, "no such file")
        found.timestamp = second
        return found

    ended, refused, failed = failure(0, -15, 1), failure(1, 2, 3), failure(2, 1, 2)
    assert root_cause([ended, refused, failed]) is refused
    assert root_cause([failed, ended]) is ended
