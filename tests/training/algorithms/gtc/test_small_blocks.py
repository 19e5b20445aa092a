"""Run the Triton kernels on blocks of 1024 elements, so that a small model has many."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.training.algorithms.gtc.interpreted import cuda_encoding
from tests.training.algorithms.gtc.test_encoding import Step, at_density
from training.algorithms.gtc import encoding as on_cpu
from training.algorithms.gtc.cuda_encoding import accumulate, add_signs, choose, take
from training.algorithms.gtc.encoding import HEADER_WORDS, Encoding, num_map_words, num_plane_words

ROWS, CHUNK = 32, 2
BLOCK = 32 * ROWS
SIZE = 4 * BLOCK + 77  # five blocks, which `choose` reads in chunks of two
EDGE_WORDS = 2 * BLOCK

__all__ = ["cuda_encoding"]


def edge(values: Tensor) -> float:
    return 3.0 if values.is_floating_point() else 0x55555555


def between_edges(values: Tensor) -> Tensor:
    """Copy an array into a larger one, whose other words change every result that reads them."""
    whole = values.new_full((len(values) + 2 * EDGE_WORDS,), edge(values))
    inside(whole).copy_(values)
    return whole


def inside(whole: Tensor) -> Tensor:
    return whole[EDGE_WORDS:-EDGE_WORDS]


def assert_edges_are_intact(whole: Tensor) -> None:
    edges = torch.cat([whole[:EDGE_WORDS], whole[-EDGE_WORDS:]])
    assert (edges == edge(whole)).all()


def take_message(
    residual: Tensor, gradients: Tensor, tau: float, capacity: int, first_block: Tensor
) -> Tensor:
    """Run the three passes on arrays between edges, which hold other numbers before."""
    size, num_words = len(residual), num_plane_words(len(residual))
    num_blocks = -(-num_words // ROWS)
    lengths = [2 * num_words, num_blocks, num_blocks, HEADER_WORDS + capacity]
    unwritten = [torch.full((length,), 0x55555555, dtype=torch.int32) for length in lengths]
    wholes = [between_edges(each) for each in (residual, gradients, *unwritten)]
    r, g, planes, counts, starts, message = map(inside, wholes)
    threshold = residual.new_tensor(tau)
    accumulate[(num_blocks,)](r, g, threshold, planes, counts, size, num_words, ROWS)
    choose[(1,)](counts, starts, message, first_block, num_blocks, 2 * num_words, capacity, CHUNK)
    take[(num_blocks,)](
        r, threshold, planes, counts, starts, message, first_block, num_words, capacity, ROWS
    )
    for whole in wholes:
        assert_edges_are_intact(whole)
    residual.copy_(r)
    return message


def counted(messages: list[Tensor], num_elements: int) -> Tensor:
    """Add all messages to counts of 7."""
    stacked = torch.stack(messages)
    capacity = stacked.shape[1] - HEADER_WORDS
    of_messages = between_edges(stacked.flatten())
    counts = between_edges(torch.full((num_elements,), 7, dtype=torch.int32))
    add_signs[(-(-capacity // ROWS), len(messages))](
        inside(counts), inside(of_messages), num_plane_words(num_elements), capacity, ROWS
    )
    assert_edges_are_intact(counts)
    return inside(counts)


def block_number(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


@pytest.mark.parametrize(
    ("size", "density", "dtype"),
    [
        *product([1, 33, BLOCK, SIZE], [0.0, 0.02, 0.4, 1.0], [torch.float32]),
        *product([SIZE], [0.02, 0.4], [torch.float64]),
    ],
)
def test_messages_with_room_for_a_map_are_those_of_the_cpu(
    size: int, density: float, dtype: torch.dtype
) -> None:
    """Words and residuals are equal, and nothing is written beyond the arrays."""
    residual, gradients, tau = at_density(size, density, 3, dtype)
    kept = residual.clone()
    expected = on_cpu.take_message(kept, gradients, tau)
    first_block = block_number(0)
    message = take_message(residual, gradients, tau, num_map_words(size) + 5, first_block)
    assert torch.equal(message[: len(expected)], expected)
    assert torch.equal(residual, kept)
    assert first_block == 0


@pytest.mark.parametrize(
    ("num_sent", "room", "encoding"),
    [(130, 130, Encoding.INDICES), (131, 130, Encoding.MAP), (131, 129, Encoding.INDICES)],
)
def test_a_map_needs_more_elements_than_its_words_and_room(
    num_sent: int, room: int, encoding: Encoding
) -> None:
    """A map of 65 rows has 130 words: as many indices are not longer."""
    gradients = torch.zeros(65 * 32)
    gradients[:num_sent] = 2.0
    gradients[1:num_sent:3] = -2.0
    message = take_message(torch.zeros(65 * 32), gradients, 2.0, room, block_number(0))
    assert message[:HEADER_WORDS].tolist() == [encoding, num_sent]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, BLOCK, SIZE - 1])
def test_a_gradient_that_is_not_finite_is_marked(broken: float, place: int) -> None:
    """The gradients are added, nothing is sent, and no message is added to the counts."""
    residual, gradients, tau = at_density(SIZE, 0.05, 1, torch.float32)
    gradients[place] = broken
    total = residual + gradients
    message = take_message(residual, gradients, tau, num_map_words(SIZE), block_number(0))
    assert message[0] == Encoding.NOT_FINITE
    assert torch.equal(residual.nan_to_num(3.0), total.nan_to_num(3.0))
    assert torch.equal(counted([message], SIZE), torch.full((SIZE,), 7))


@pytest.mark.parametrize("capacity", [100, num_map_words(SIZE) - 1])
def test_elements_are_sent_in_order_from_the_first_block_until_the_room_ends(capacity: int) -> None:
    """The next message begins with the block of the first element that remains."""
    residual, gradients, tau = at_density(SIZE, 0.1, 7, torch.float32)
    first_block, expected_first = block_number(2), 2
    for _ in range(3):
        step = Step.of(residual, gradients, tau)
        waiting = step.signs.nonzero().squeeze(1)
        is_before = waiting < expected_first * BLOCK
        waiting = torch.cat([waiting[~is_before], waiting[is_before]])
        sent, total = waiting[:capacity], residual + gradients
        message = take_message(residual, gradients, tau, capacity, first_block)
        assert message[:HEADER_WORDS].tolist() == [Encoding.INDICES, len(waiting)]
        words = [index - 2**31 if step.signs[index] < 0 else index for index in sent.tolist()]
        assert message[HEADER_WORDS:][: len(words)].tolist() == words
        total[sent] = step.residual[sent]
        assert torch.equal(residual, total)
        if len(waiting) > capacity:
            expected_first = int(waiting[capacity]) // BLOCK
        assert first_block == expected_first
        counts = torch.full((SIZE,), 7, dtype=torch.int32)
        counts[sent] += step.signs[sent].int()
        assert torch.equal(counted([message], SIZE), counts)
        gradients = torch.zeros(SIZE)


@pytest.mark.parametrize(("num_later", "next_first"), [(0, 3), (1, 4)])
def test_the_first_block_changes_only_if_an_element_remains(
    num_later: int, next_first: int
) -> None:
    """Room that ends with a block's last element sends that block whole."""
    gradients = torch.zeros(SIZE)
    gradients[3 * BLOCK + 5 : 3 * BLOCK + 45] = 9.0
    gradients[4 * BLOCK : 4 * BLOCK + num_later] = 9.0
    first_block = block_number(3)
    residual = torch.zeros(SIZE)
    message = take_message(residual, gradients, 1.0, 40, first_block)
    assert message[HEADER_WORDS:].tolist() == list(range(3 * BLOCK + 5, 3 * BLOCK + 45))
    assert first_block == next_first
    assert residual.sum() == 40 * 8 + 9 * num_later


def test_messages_of_all_ranks_are_added() -> None:
    """Indices, a map and a gradient that is not finite are added, each for what it is.

    Element 0 is positive in all: its index is the word 0.
    """
    capacity = num_map_words(SIZE)
    messages, total = [], torch.full((SIZE,), 7, dtype=torch.int32)
    for density, broken in ((0.02, 0.0), (0.4, 0.0), (0.5, math.nan), (0.03, 0.0), (1.0, 0.0)):
        residual, gradients, tau = at_density(SIZE, density, 5, torch.float32)
        gradients[0] = 9.0
        gradients[SIZE - 1] += broken
        step = Step.of(residual, gradients, tau)
        messages.append(take_message(residual, gradients, tau, capacity, block_number(0)))
        total += 0 if broken else step.signs.int()
    assert [int(message[0]) for message in messages] == [0, 1, 2, 0, 1]
    assert torch.equal(counted(messages, SIZE), total)
