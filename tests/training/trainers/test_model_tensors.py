"""Which models a trainer takes, and what becomes of buffers and frozen parameters."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.training.trainers.ranks import RankPool, sgd, small_model, take_step
from training.distributed.simulated_group import simulate_ranks
from training.trainers import AdPsgd, OneBit, Synchronous, Trainer
from training.trainers.replica import check_optimizer


def buffers_of(rank: int) -> dict[str, Tensor]:
    """One of each kind, of values of this rank's own."""
    return {
        "count": torch.tensor(rank),
        "mask": torch.tensor([rank > 0, True]),
        "codes": torch.full((3,), rank, dtype=torch.uint8),
        "rounded": torch.full((3,), rank, dtype=torch.bfloat16),
        "phase": torch.full((3,), rank * 1j),
        "empty": torch.zeros(0, 4),
        "transposed": (torch.arange(6.0).view(2, 3) + rank).T,
        "every other": (torch.arange(12.0).view(3, 4) + rank)[:, ::2],
    }


def register(module: nn.Module, buffers: Mapping[str, Tensor], persistent: bool = True) -> None:
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent)


def leave_with_buffers(group: ProcessGroup) -> list[dict[str, Tensor]]:
    """The buffers after entering and after leaving; each rank changes its own between."""
    rank = group.rank()
    model = small_model()
    buffers = buffers_of(rank)
    register(model[0], dict(reversed(buffers.items())) if rank else buffers)
    register(model[2], {"not saved": torch.full((2,), rank)}, persistent=False)
    model[2].register_buffer("tied", model[0].rounded)
    optimizer = sgd(model)
    with Synchronous(model, optimizer, group=group):
        entered = copy.deepcopy(dict(model.named_buffers()))
        take_step(model, optimizer, 0, rank)
        for name, buffer in buffers_of(rank + 1).items():
            getattr(model[0], name).copy_(buffer)
        register(model[1], {"late": torch.full((2,), rank)}, persistent=False)
    return [entered, dict(model.named_buffers())]


def test_buffers_are_rank_0s_by_name(rank_pool: RankPool) -> None:
    """On entering and on leaving, whatever their types, strides and order of registration."""
    for entered, left in rank_pool.run(2, leave_with_buffers):
        for found, rank in ((entered, 0), (left, 1)):
            for name, expected in buffers_of(rank).items():
                assert torch.equal(found[f"0.{name}"], expected), name
        assert entered["2.not saved"].tolist() == left["2.not saved"].tolist() == [0, 0]
        assert left["1.late"].tolist() == [0, 0]


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


ODD: dict[str, tuple[Callable[[], Tensor | None], str]] = {
    "none": (lambda: None, "buffer odd: None on rank 1, torch.float32 (3,) on cpu on rank 0"),
    "longer": (lambda: torch.zeros(4), "buffer odd: torch.float32 (4,) on cpu on rank 1"),
    "empty": (lambda: torch.zeros(0), "buffer odd: torch.float32 (0,) on cpu on rank 1"),
    "double": (lambda: torch.zeros(3).double(), "buffer odd: torch.float64 (3,) on cpu on rank 1"),
    "expanded": (lambda: torch.zeros(1).expand(3), "rank 1: buffer odd is expanded"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), "rank 1: buffer odd is a Tensor of torch.spars"),
    "inference": (inference_tensor, "rank 1: buffer odd was made in torch.inference_mode()"),
    "meta": (lambda: torch.zeros(3, device="meta"), "rank 1: buffer odd lies on the meta device"),
}


def refusals_of_odd_buffers(group: ProcessGroup, is_late: bool) -> dict[str, str]:
    """Rank 1 has another buffer than rank 0, from the start or from a step within the block."""
    messages = {}
    for name, (make, _) in ODD.items():
        model = small_model()
        optimizer = sgd(model)
        odd = make() if group.rank() == 1 else torch.zeros(3)
        model.register_buffer("odd", torch.zeros(3) if is_late else odd)
        try:
            with Synchronous(model, optimizer, group=group):
                take_step(model, optimizer, 0, group.rank())
                model.odd = odd
            messages[name] = "no error"
        except ValueError as error:
            messages[name] = str(error)
    return messages


@pytest.mark.parametrize("is_late", [False, True])
def test_buffers_that_differ_are_named(rank_pool: RankPool, is_late: bool) -> None:
    """On both ranks, on entering or on leaving, and before any of them is sent."""
    for messages in rank_pool.run(2, refusals_of_odd_buffers, is_late):
        for name, (_, expected) in ODD.items():
            assert expected in messages[name]


def enter_with_frozen(group: ProcessGroup, frozen: list[dict[str, float]]) -> dict[str, float]:
    model = nn.ModuleDict({"trained": nn.Linear(2, 1)})
    for name, value in frozen[group.rank()].items():
        parameter = nn.Parameter(torch.full((int(value),), value), requires_grad=False)
        model.register_parameter(name, parameter)
    with Synchronous(model, sgd(model["trained"]), group=group):
        return {name: float(each.sum()) for name, each in model.named_parameters(recurse=False)}


def test_frozen_parameters_are_rank_0s_by_name(rank_pool: RankPool) -> None:
    """Registered in another order they keep their names; of another shape they are named."""
    orders = [{"a": 2.0, "b": 2.5}, {"b": 2.75, "a": 2.0}]
    assert rank_pool.run(2, enter_with_frozen, orders) == [{"a": 4.0, "b": 5.0}] * 2
    with pytest.raises(AssertionError, match=r"untrained parameter a: torch\.float32 \(3,\) on ra"):
        rank_pool.run(2, enter_with_frozen, [{"a": 2.0}, {"a": 3.0}])


def train_in_another_order(group: ProcessGroup) -> None:
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    model = nn.ModuleDict(dict(reversed(layers.items())) if group.rank() else layers)
    by_name = [each for _, each in sorted(model.named_parameters())]
    with Synchronous(model, torch.optim.SGD(by_name, lr=0.1), group=group):
        pass


def test_parameters_in_another_order_are_named() -> None:
    """Ranks would sum the gradients of different layers, of equal shapes."""
    with pytest.raises(ValueError, match=r"parameter number 0: b\.weight on rank 1, a\.weig"):
        simulate_ranks(2, train_in_another_order)


def complex_model() -> nn.Module:
    return nn.Linear(2, 1, dtype=torch.complex64)


def expanded_model() -> nn.Module:
    model = nn.Linear(2, 1)
    model.bias = nn.Parameter(torch.zeros(1).expand(3))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (complex_model, r"parameter weight is torch\.complex64"),
    "expanded": (expanded_model, "parameter bias is expanded"),
    "meta": (lambda: nn.Linear(2, 1, device="meta"), "parameter weight lies on the meta device"),
    "lazy": (lambda: nn.LazyLinear(1), "parameter weight has no shape yet"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_ranks_cannot_exchange_are_refused(name: str) -> None:
    """In the constructor, by the parameter's name."""
    make, message = MODELS[name]
    model = make()
    with pytest.raises(ValueError, match=message):
        simulate_ranks(1, lambda group: Synchronous(model, sgd(model), group=group))


def refusals_of_wrapped_models(group: ProcessGroup) -> dict[str, str]:
    from torch.distributed import fsdp  # noqa: PLC0415 - 1 s, for this test alone

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
    sharded = nn.Sequential(nn.Linear(2, 1))
    fsdp.fully_shard(sharded[0], mesh=mesh)
    models = {
        "DistributedDataParallel": DistributedDataParallel(small_model(), process_group=group),
        "FullyShardedDataParallel": fsdp.FullyShardedDataParallel(
            small_model(), process_group=group, device_id=torch.device("cpu")
        ),
        "FSDPModule": sharded,
    }
    messages = {name: refusal(group, model, sgd(model)) for name, model in models.items()}
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, process_group=group, lr=0.1
    )
    return messages | {"ZeroRedundancyOptimizer": refusal(group, model, optimizer)}


def refusal(group: ProcessGroup, model: nn.Module, optimizer: Any) -> str:
    try:
        Synchronous(model, optimizer, group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def test_models_that_exchange_by_themselves_are_refused(rank_pool: RankPool) -> None:
    """Gradients would be summed twice, or parameters be in parts: named by their wrapper."""
    for messages in rank_pool.run(4, refusals_of_wrapped_models):
        assert all(name in message for name, message in messages.items())
        assert "wraps another optimizer" in messages["ZeroRedundancyOptimizer"]


class Wrapper(torch.optim.SGD):
    """As those of acceleration libraries."""

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer


def test_what_is_no_optimizer_is_refused() -> None:
    """A schedule, and an optimizer around another one, whose steps no hook sees."""
    model = small_model()
    schedule = torch.optim.lr_scheduler.StepLR(sgd(model), 3)
    with pytest.raises(ValueError, match=r"optimizer is a StepLR: need a torch\.optim"):
        check_optimizer(schedule)
    wrapper = Wrapper(sgd(model))
    with pytest.raises(ValueError, match="Wrapper wraps another optimizer, the SGD in its attrib"):
        simulate_ranks(1, lambda group: Synchronous(model, wrapper, group=group))


def refusals_under_debugging(group: ProcessGroup) -> list[str]:
    def ad_psgd(model: nn.Module) -> Trainer:
        return AdPsgd(model, sgd(model), group=group, mixing_seed=1)

    def one_bit(model: nn.Module) -> Trainer:
        return OneBit(model, sgd(model, 0.0), group=group, double_buffering=True)

    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    messages = []
    try:
        for make in (ad_psgd, one_bit):
            with pytest.raises(ValueError, match="set it to INFO or OFF") as refused:
                make(small_model())
            messages.append(str(refused.value))
    finally:
        dist.set_debug_level(level)
    return messages


def test_exchanges_beside_are_refused_under_debugging(rank_pool: RankPool) -> None:
    """torch compares how many exchanges each rank has begun, and would end the training."""
    for messages in rank_pool.run(2, refusals_under_debugging):
        assert all("TORCH_DISTRIBUTED_DEBUG=DETAIL ends" in each for each in messages)
