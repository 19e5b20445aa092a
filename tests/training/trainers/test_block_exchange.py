"""Blocks exchanged in few bits: what is sent, what stays behind, and that all ranks agree."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.algorithms.test_top_k import sent_of
from tests.training.trainers.ranks import RankPool, all_equal, sgd, small_model, take_step, weights
from training.algorithms.top_k_lengths import num_message_words
from training.checkpoints.training_state import load_whole_state, reshard, whole_state
from training.distributed.simulated_group import simulate_ranks
from training.settings.trainers import TopK
from training.tensor_encoding import decode_state, encode_state
from training.trainers import Bmuf, Htm, SparseLoco, Trainer

pytestmark = pytest.mark.chaos

BLOCK_SIZE, NUM_ELEMENTS, TAU = 3, 66, 1 / 64
CODES = {"top_k": TopK(density=0.1), "top_k of 8 bits": TopK(density=0.3, bits=8, error_decay=1.0)}


def make_bmuf(*parts: Any, group: ProcessGroup, code: TopK | None = None, **settings: Any) -> Bmuf:
    return Bmuf(*parts, group=group, block_size=BLOCK_SIZE, block_exchange=code, **settings)


def make_htm(*parts: Any, group: ProcessGroup, code: TopK | None = None, size: int = 2) -> Htm:
    return Htm(
        *parts,
        group=group,
        group_size=size,
        block_size=BLOCK_SIZE,
        gradient_threshold=TAU,
        block_exchange=code,
    )


def train(group: ProcessGroup, make: Any, num_steps: int) -> dict[str, Any]:
    """The rank's models after each step, before and after exchanges; what it leaves, and sends."""
    model = small_model(seed=group.rank())
    optimizer = sgd(model)
    models, locals_ = [], []
    # It runs before the trainer's own hook, which is added later.
    optimizer.register_step_post_hook(lambda *_: locals_.append(weights(model)))
    with make(model, optimizer, group=group) as trainer:
        for step in range(num_steps):
            take_step(model, optimizer, step, group.rank())
            models.append(weights(model))
    state, statistics = trainer.state_dict(), trainer.statistics()
    return {
        "models": models,
        "locals": locals_,
        "final": weights(model),
        "state": state,
        "bytes": statistics["bytes_sent"],
    }


def flat(by_name: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in by_name.values()])


def simulate_sparse_loco(num_ranks: int, num_blocks: int, top_k: TopK, rate: float) -> Tensor:
    """Run algorithm 1 of the paper, with a reference of its messages, in one process."""
    locals_ = [small_model() for _ in range(num_ranks)]
    optimizers = [sgd(model) for model in locals_]
    errors = [np.zeros(NUM_ELEMENTS, np.float32) for _ in range(num_ranks)]
    theta = weights(locals_[0])
    for block in range(num_blocks):
        sent = np.zeros((num_ranks, NUM_ELEMENTS), np.float32)
        for rank, model in enumerate(locals_):
            for step in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
                take_step(model, optimizers[rank], step, rank)
            delta = (theta - weights(model)).numpy()
            errors[rank] = np.float32(top_k.error_decay) * errors[rank] + delta
            sent[rank] = sent_of(errors[rank], top_k)
            errors[rank] -= sent[rank]
        theta = theta - rate * torch.from_numpy(sent.mean(0))
        for model in locals_:
            nn.utils.vector_to_parameters(theta.clone(), model.parameters())
    return theta


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sparse_loco_is_the_papers_algorithm(rank_pool: RankPool, num_ranks: int) -> None:
    """Local steps, error feedback, the mean of sparse changes, an outer rate; on real ranks."""
    top_k, rate = TopK(density=0.2, bits=3, error_decay=0.9), 0.7
    make = partial(
        SparseLoco, block_size=3, density=0.2, bits=3, error_decay=0.9, outer_learning_rate=rate
    )
    ranks = rank_pool.run(num_ranks, train, make, 12)
    assert all_equal([rank["final"] for rank in ranks])
    expected = simulate_sparse_loco(num_ranks, 4, top_k, rate)
    torch.testing.assert_close(ranks[0]["final"], expected, rtol=1e-5, atol=1e-6)
    others = simulate_sparse_loco(num_ranks, 4, TopK(density=0.2, bits=3, error_decay=1.0), rate)
    assert not torch.allclose(ranks[0]["final"], others, rtol=1e-3, atol=1e-4)


def test_sent_changes_and_residuals_are_the_changes() -> None:
    """With decay 1 the model's way and the residuals of all ranks are the mean changes' sum.

    In float32, to a few roundings of each of 4 blocks; the residuals are no rounding themselves.
    """
    ranks = simulate_ranks(
        4, train, partial(make_bmuf, code=CODES["top_k of 8 bits"], block_momentum=0.0), 12
    )
    starts = [weights(small_model()), *(ranks[0]["models"][end] for end in (2, 5, 8))]
    ends = [torch.stack([rank["locals"][end] for rank in ranks]) for end in (2, 5, 8, 11)]
    changes = sum(end.mean(0) - start for start, end in zip(starts, ends, strict=True))
    moved = ranks[0]["final"] - starts[0]
    residual = sum(flat(rank["state"]["block_residuals"]) for rank in ranks)
    assert isinstance(residual, Tensor)
    torch.testing.assert_close(moved + residual, changes, rtol=0, atol=1e-6)
    assert residual.abs().max() > 1e-3


@pytest.mark.parametrize("code", sorted(CODES))
def test_one_model_exchanges_nothing(code: str) -> None:
    """BMUF's one rank and HTM's one group take the steps of the exact exchange, bitwise."""
    for make, num_ranks in ((make_bmuf, 1), (partial(make_htm, size=2), 2)):
        coded, exact = (
            simulate_ranks(num_ranks, train, partial(make, code=each), 7)
            for each in (CODES[code], None)
        )
        assert torch.equal(coded[0]["final"], exact[0]["final"])


def test_only_leaders_send_and_have_residuals() -> None:
    """In two blocks a leader sends two messages and twice the mean to its group; others nothing.

    GTC's bytes are those of a training without a block's end.
    """
    top_k = TopK(density=0.1)
    message_bytes = 4 * num_message_words(NUM_ELEMENTS, top_k)
    assert message_bytes == 4 * (1 + 2 + 1)  # 7 codes of 3 + 2 bits, 7 + 8 unary bits
    ranks = simulate_ranks(4, train, partial(make_htm, code=top_k), 6)
    exact = simulate_ranks(4, train, make_htm, 6)
    for number, (rank, with_floats) in enumerate(zip(ranks, exact, strict=True)):
        residual = flat(rank["state"]["block_residuals"])
        assert torch.any(residual != 0) == (number % 2 == 0)
        gtc_bytes = 0 if number % 2 else 2 * 4 * NUM_ELEMENTS + 2 * message_bytes
        exact_bytes = 0 if number % 2 else 2 * 4 * NUM_ELEMENTS + 2 * 4 * NUM_ELEMENTS
        # What GTC's steps send depends a little on the model.
        assert abs(rank["bytes"] - gtc_bytes - (with_floats["bytes"] - exact_bytes)) < 200
    alone = simulate_ranks(2, train, partial(make_bmuf, code=top_k), 6)
    assert [rank["bytes"] for rank in alone] == [2 * message_bytes] * 2


def test_leaders_send_the_mean_of_their_ranks() -> None:
    """With two leaders of two ranks each, the exact mean is that of four, but for rounding.

    Sums within pairs cross no slow link; a leader's message does, whatever its ranks hold.
    """
    four = simulate_ranks(4, train, make_bmuf, 7)
    pairs = simulate_ranks(4, train, partial(make_bmuf, ranks_per_leader=2), 7)
    assert all_equal([rank["final"] for rank in pairs])
    torch.testing.assert_close(pairs[0]["final"], four[0]["final"], rtol=0, atol=1e-6)
    top_k = TopK(density=0.1)
    make = partial(make_bmuf, code=top_k, ranks_per_leader=2)
    ranks = simulate_ranks(4, train, make, BLOCK_SIZE)
    assert all_equal([rank["final"] for rank in ranks])
    changes = torch.stack([rank["locals"][BLOCK_SIZE - 1] for rank in ranks])
    shares = (changes.view(2, 2, -1).mean(1) - weights(small_model())) / 2
    sent = sum(torch.from_numpy(sent_of(share.numpy(), top_k)) for share in shares)
    torch.testing.assert_close(
        ranks[0]["final"], weights(small_model()) + sent, rtol=1e-5, atol=1e-6
    )
    vector_bytes, message_bytes = 4 * NUM_ELEMENTS, 4 * num_message_words(NUM_ELEMENTS, top_k)
    leader_bytes = vector_bytes + message_bytes + vector_bytes
    assert [rank["bytes"] for rank in ranks] == [leader_bytes, vector_bytes] * 2


def stop(group: ProcessGroup, make: Any) -> tuple[bytes, Tensor]:
    """The whole state at a block's end, and its residual."""
    model = small_model()
    optimizer = sgd(model)
    with make(model, optimizer, group=group) as trainer:
        for step in range(BLOCK_SIZE):
            take_step(model, optimizer, step, group.rank())
        state = whole_state(model, optimizer, trainer)
    return encode_state(state), flat(state["trainer"]["block_residuals"])


def enter(
    group: ProcessGroup, trainer_class: type[Trainer], states: list[bytes], make: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The model as resharded, as entering makes it, and the residual then."""
    decoded = map(decode_state, states)
    state = reshard(decoded, len(states), group.rank(), group.size(), trainer_class)
    model = small_model()
    optimizer = sgd(model)
    trainer = make(model, optimizer, group=group)
    load_whole_state(state, model, optimizer, trainer)
    before = weights(model)
    with trainer:
        residual = flat(trainer.state_dict()["block_residuals"])
    return before, weights(model), residual


@pytest.mark.parametrize("code", sorted(CODES))
@pytest.mark.parametrize("num_new", [2, 6, 8])
def test_resharding_keeps_the_sum_of_residuals(num_new: int, code: str) -> None:
    """Residuals are shares of the mean, so their sum is what the model lacks of any N models.

    In HTM a new group's leader takes what resharding gives to others of its ranks.
    """
    for make, trainer_class, size in (
        (make_bmuf, Bmuf, 1),
        (partial(make_htm, size=2), Htm, num_new // 2),
    ):
        states, residuals = zip(
            *simulate_ranks(4, stop, partial(make, code=CODES[code])), strict=True
        )
        again = partial(make, code=CODES[code])
        if trainer_class is Htm:
            again = partial(make_htm, code=CODES[code], size=size)
        entered = simulate_ranks(num_new, enter, trainer_class, list(states), again)
        taken = [residual for *_, residual in entered]
        torch.testing.assert_close(sum(taken), sum(residuals))
        assert not any(each.any() for rank, each in enumerate(taken) if rank % size > 0)


@pytest.mark.parametrize("code", sorted(CODES))
@pytest.mark.parametrize("num_new", [1, 2])
def test_one_leader_takes_up_what_more_had_not_sent(num_new: int, code: str) -> None:
    """It sends nothing: its model moves at once as far as blocks would in all; none remains.

    A mean change counts C N times by eq. (5) of 000, or zeta / (1 - eta), whatever zeta is. BMUF's
    N are ranks, HTM's are groups.
    """
    small, plain = {"block_learning_rate": 0.25}, {"block_momentum": 0.0}
    for old, trainer_class, new, rate in (
        (make_bmuf, Bmuf, partial(make_bmuf, ranks_per_leader=num_new), num_new),
        (
            partial(make_bmuf, **small),
            Bmuf,
            partial(make_bmuf, ranks_per_leader=num_new, **small),
            num_new,
        ),
        (
            partial(make_bmuf, **small, **plain),
            Bmuf,
            partial(make_bmuf, ranks_per_leader=num_new, **small, **plain),
            0.25,
        ),
        (partial(make_htm, size=2), Htm, partial(make_htm, size=num_new), 1),
    ):
        states, residuals = zip(
            *simulate_ranks(4, stop, partial(old, code=CODES[code])), strict=True
        )
        again = partial(new, code=CODES[code])
        for before, after, residual in simulate_ranks(
            num_new, enter, trainer_class, list(states), again
        ):
            torch.testing.assert_close(after - before, rate * sum(residuals), rtol=0, atol=1e-6)
            assert not residual.any()
