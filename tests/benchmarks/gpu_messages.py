"""Time GTC's messages on a device, as shares of the bandwidth of a plain copy."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.benchmarks.gpu_graphs import captured, repeated
from tests.benchmarks.gtc_task import DENSITIES, GtcTask
from tests.benchmarks.measure import Figure, interleaved
from training.algorithms.gtc import encoding
from training.algorithms.gtc.encoding import HEADER_WORDS, num_map_words
from training.trainers.gtc import capacity_for

NUM_ELEMENTS = 25_000_000
NUM_RANKS = 8
REPEATS = 20
FLOAT_BYTES = 4


def figures(num_elements: int, device: torch.device, num_rounds: int) -> list[Figure]:
    """Return the bandwidths of the necessary bytes, interleaved with a copy, at each density."""
    found = []
    for density in DENSITIES:
        check_bits(min(num_elements, 2**20), density, device)
        found += _figures_at(num_elements, density, device, num_rounds)
    return found


def check_bits(num_elements: int, density: float, device: torch.device) -> None:
    """Raise AssertionError where three steps differ from the CPU's in a bit."""
    from training.algorithms.gtc import cuda_encoding  # noqa: PLC0415 - as in the trainers

    task = GtcTask.of(num_elements, density, device)
    residual, gradients = task.residual.cpu().clone(), task.gradients.cpu()
    threshold = task.residual.new_tensor(task.gradient_threshold)
    first_block = torch.zeros((), dtype=torch.int32, device=device)
    for _ in range(3):
        expected = encoding.take_message(residual, gradients, task.gradient_threshold)
        message = cuda_encoding.take_message(
            task.residual, task.gradients, threshold, num_map_words(num_elements), first_block
        )
        assert torch.equal(message[: len(expected)].cpu(), expected)
        assert torch.equal(task.residual.cpu(), residual)


def _figures_at(
    num_elements: int, density: float, device: torch.device, num_rounds: int
) -> list[Figure]:
    works = messages_work(num_elements, density, device)
    # Encoding reads the residual and the gradients and writes the residual; decoding writes counts.
    floors = {"copy": 2, "encode": 3, f"decode of {NUM_RANKS}": 1}
    seconds = interleaved(
        {name: repeated(captured(work, device), REPEATS, device) for name, work in works.items()},
        num_rounds,
    )
    rates = {
        name: [floors[name] * FLOAT_BYTES * num_elements * REPEATS / each / 1e9 for each in taken]
        for name, taken in seconds.items()
    }
    found = []
    for name, values in rates.items():
        shares = [100 * rate / copy for rate, copy in zip(values, rates["copy"], strict=True)]
        found.append(Figure.of(f"density {density:g}: {name}", values, "GB/s"))
        found.append(Figure.of(f"density {density:g}: {name}, share of copy", shares, "%"))
    return found


def messages_work(
    num_elements: int, density: float, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the work to time; as none of it waits for the device, it can be captured."""
    from training.algorithms.gtc import cuda_encoding  # noqa: PLC0415

    task = GtcTask.of(num_elements, density, device)
    copy = torch.empty_like(task.gradients)
    counts = torch.zeros_like(copy, dtype=torch.int32)
    threshold = task.residual.new_tensor(task.gradient_threshold)
    first_block = torch.zeros((), dtype=torch.int32, device=device)
    capacity = capacity_for(round(density * num_elements), num_elements)

    def encode() -> Tensor:
        return cuda_encoding.take_message(
            task.residual, task.gradients, threshold, capacity, first_block
        )

    messages = encode().expand(NUM_RANKS, HEADER_WORDS + capacity).contiguous()

    def decode() -> None:
        cuda_encoding.add_messages(counts.zero_(), messages)

    return {
        "copy": lambda: copy.copy_(task.gradients),
        "encode": encode,
        f"decode of {NUM_RANKS}": decode,
    }
