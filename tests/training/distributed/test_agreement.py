"""Claims of ranks are compared by name; who differs from most is named."""

import pytest
import torch

from training.distributed.checks import Claims, Comparison, Replica, TensorDigests, check_equal
from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ((0.1, 0.2, 0.1), r"rate: 0\.2 on rank 1, 0\.1 on rank 0: need the same on all ranks"),
        ((0.2, 0.1, 0.1), r"rate: 0\.2 on rank 0, 0\.1 on rank 1: need"),
        ((0.1, 0.2), r"rate: 0\.2 on rank 1, 0\.1 on rank 0: need"),
        ((0.1, 0.2, 0.3), r"rate: 0\.2 on rank 1, 0\.1 on rank 0: need"),
    ],
)
def test_the_rank_that_differs_from_most_is_named(rates: list[float], message: str) -> None:
    """Or from rank 0, where no value has a majority."""
    with pytest.raises(ValueError, match=message):
        check_equal([Claims(settings={"rate": str(rate)}).to_json() for rate in rates])


def test_the_first_name_is_named() -> None:
    """Settings before tensors, in the order of the model; a missing one differs too."""
    whole = Claims(tensors={"b": "1", "a": "2"})
    with pytest.raises(ValueError, match="b: 3 on rank 1, 1 on rank 0: replicas have drifted"):
        check_equal([whole.to_json(), Claims(tensors={"b": "3", "a": "4"}).to_json()])
    with pytest.raises(ValueError, match="a: None on rank 1, 2 on rank 0"):
        check_equal([whole.to_json(), Claims(tensors={"b": "1"}).to_json()])


def test_parts_are_compared_within_themselves() -> None:
    """Ranks 0 and 1 may differ from 2 and 3; a problem of one rank is everyone's."""
    facts = [("0", 0), ("0", 0), ("1", 1), ("1", 1)]
    check_equal([Claims(part=part, of_part={"w": value}).to_json() for value, part in facts])
    facts[3] = ("2", 1)
    with pytest.raises(ValueError, match="w: 2 on rank 3, 1 on rank 2: replicas"):
        check_equal([Claims(part=part, of_part={"w": value}).to_json() for value, part in facts])
    with pytest.raises(ValueError, match="rank 1: lost its way"):
        check_equal([Claims().to_json(), Claims(problem="lost its way").to_json()])


def compare_later(group: ProcessGroup, odd: str) -> None:
    """Change the tensors of rank 2 before the checksums are taken, and those of all afterwards."""
    shared, own = torch.ones(700), torch.ones(3)
    if group.rank() == 2:
        {"shared": shared, "of part": own}.get(odd, torch.ones(1))[1:] += 1e-7
    settings = {"rate": "0.2" if odd == "settings" and group.rank() == 2 else "0.1"}
    digests = TensorDigests({"shared": shared}, CPU)
    replica = Replica(settings, digests, group.rank() // 2, TensorDigests({"own": own}, CPU))
    comparison = Comparison(replica, group)
    shared += group.rank()
    comparison.check()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("shared", r"shared: digest \w{16} on rank 2, digest \w{16} on rank 0"),
        ("of part", r"own: digest \w{16} on rank 3, digest \w{16} on rank 2"),
        ("settings", r"rate: 0\.2 on rank 2, 0\.1 on rank 0"),
    ],
)
def test_a_comparison_is_of_its_moment(odd: str, message: str) -> None:
    """Checksums that differ lead to a comparison by name, of what the tensors were then."""
    with pytest.raises(ValueError, match=message):
        simulate_ranks(4, compare_later, odd)
    simulate_ranks(4, compare_later, "nothing")
