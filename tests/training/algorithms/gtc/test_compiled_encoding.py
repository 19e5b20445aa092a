"""Compare the compiled loops' messages with NumPy's."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.algorithms.gtc.test_encoding import DENSITIES, at_density
from training.algorithms.gtc import encoding as by_numpy
from training.algorithms.gtc.encoding import (
    Encoding,
    compiled_add_message,
    compiled_take_message,
    is_compiled,
)

SANITIZED = (
    "-O1 -g -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC"
)
# The sanitizer reserves 15 TB of addresses: an inherited limit of them would refuse it.
UNLIMITED = ("sh", "-c", 'ulimit -S -v unlimited; LD_PRELOAD=$0 "$@"')

pytestmark = pytest.mark.skipif(not is_compiled(), reason="there was no C compiler")


def counted(add: Callable[[Tensor, Tensor], None], num_elements: int, message: Tensor) -> Tensor:
    counts = torch.full((num_elements,), 7, dtype=torch.int32)
    add(counts, message)
    return counts


@given(st.integers(1, 700), st.sampled_from(DENSITIES), st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_bit_is_numpys(num_elements: int, density: float, seed: int, is_cut: bool) -> None:
    """Messages, residuals and counts are equal at each step, for models of whole groups or not."""
    residual, gradients, tau = at_density(num_elements, density, seed, torch.float32)
    if is_cut:
        gradients[num_elements // 2 :] = 0  # indices at first, a map from the middle on
    kept = residual.clone()
    for _ in range(3):
        message = compiled_take_message(residual, gradients, tau)
        expected = by_numpy.take_message(kept, gradients, tau)
        assert message.tolist() == expected.tolist()
        assert residual.numpy().tobytes() == kept.numpy().tobytes()
        counts = counted(compiled_add_message, num_elements, message)
        assert torch.equal(counts, counted(by_numpy.add_message, num_elements, message))


@pytest.mark.parametrize("density", [1e-3, 0.0626, 0.3])
def test_large_models_are_numpys_too(density: float) -> None:
    """A message that becomes a map only near the model's end holds all its earlier indices."""
    residual, gradients, tau = at_density(300_007, density, 5, torch.float32)
    kept = residual.clone()
    message = compiled_take_message(residual, gradients, tau)
    assert torch.equal(message, by_numpy.take_message(kept, gradients, tau))
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("density", [0.0, 1e-3, 0.5])
def test_a_gradient_that_is_not_finite_marks_every_later_message(
    broken: float, density: float
) -> None:
    """As in NumPy, this message and every later one are marked, and the element remains broken."""
    residual, gradients, tau = at_density(9000, density, 1, torch.float32)
    gradients[8999] = broken
    for _ in range(3):
        message = compiled_take_message(residual, gradients, tau)
        assert message[0] == Encoding.NOT_FINITE
        assert len(message) == 2
        assert not residual[8999].isfinite()
        gradients[8999] = 0.0
    assert torch.equal(counted(compiled_add_message, 9, message), torch.full((9,), 7))


@pytest.mark.parametrize(
    ("encoding", "body", "what"),
    [
        (Encoding.INDICES, [3, 10], "word 1 of the message"),
        (Encoding.INDICES, [-(2**31) + 10], "word 0 of the message"),
        (Encoding.MAP, [1], "a map of 1 words"),
        (Encoding.MAP, [0, 0, 0, 0], "a map of 4 words"),
    ],
)
def test_a_message_of_another_model_is_refused(
    encoding: Encoding, body: list[int], what: str
) -> None:
    """An index or a map beyond the model raises an error that names it."""
    message = torch.tensor([encoding, len(body), *body], dtype=torch.int32)
    refused = f"^{what} does not fit a model of 10 parameters: start all ranks"
    with pytest.raises(ValueError, match=refused):
        compiled_add_message(torch.zeros(10, dtype=torch.int32), message)


def test_no_byte_beyond_a_vector_is_touched(tmp_path: Path) -> None:
    """Neither AddressSanitizer nor UndefinedBehaviorSanitizer sees an error in the loops."""
    source = Path(by_numpy.__file__).with_name("threshold_encoding.c")
    library, program = tmp_path / "loops.so", Path(__file__).with_name("sanitized_loops.py")
    subprocess.run(["cc", *SANITIZED.split(), source, "-o", library], check=True)
    runtime = subprocess.check_output(["cc", "-print-file-name=libasan.so"], text=True).strip()
    result = subprocess.run(
        [*UNLIMITED, runtime, sys.executable, program, library],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "no error\n"), result.stderr


def test_maps_take_no_memory_once_they_are_made() -> None:
    """A thousand maps of 100 kB leave less than a tenth of their memory behind."""
    residual, gradients = torch.zeros(2, 400_000)
    statm = Path("/proc/self/statm")
    sizes = []
    for _ in range(2):
        for _ in range(500):
            gradients[::2] = 2.0
            assert compiled_take_message(residual, gradients, 2.0)[0] == Encoding.MAP
        sizes.append(int(statm.read_text().split()[1]) * resource.getpagesize())
    assert sizes[1] - sizes[0] < 5e6
