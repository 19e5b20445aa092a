"""The compiled filter bank has the bits of NumPy's, on any CPU, and touches no other memory."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compiled_library import declared
from pipeline.filterbank import log_mel
from pipeline.filterbank.log_mel import (
    compiled_log_mel_energies,
    fast_log_mel_energies,
    natural_log,
)

SOURCE = Path(log_mel.__file__).with_name("filter_bank.c")
needs_compiler = pytest.mark.skipif(not log_mel.is_compiled(), reason="there was no C compiler")

# Two pages of which the second cannot be read: the samples end where it begins.
PROGRAM = """
import ctypes, mmap, sys
import numpy as np
from pipeline.filterbank.log_mel import compiled_log_mel_energies
size = 16 * mmap.PAGESIZE
memory = mmap.mmap(-1, size + mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0) == 0
for num_samples in (400, 559, 560, 1679, 1680, 5000):
    samples = np.frombuffer(memory, np.float32, num_samples, size - 4 * num_samples)
    compiled_log_mel_energies(samples)
print("no error")
"""


def noise(num_samples: int, level: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (level * generator.standard_normal(num_samples)).astype(np.float32)


def test_the_loop_is_compiled_where_there_is_a_compiler() -> None:
    """An error in the C file fails here."""
    assert log_mel.is_compiled() or shutil.which("cc") is None


@needs_compiler
@settings(max_examples=40)
@given(
    st.integers(400, 40_000),
    st.sampled_from([0.0, 1e-30, 1e-8, 1e-4, 0.1, 1.0, 1e4]),
    st.integers(0, 1000),
)
def test_both_have_the_same_bits(num_samples: int, level: float, seed: int) -> None:
    """At any length, of silence, of subnormal samples and of samples beyond full scale."""
    samples = noise(num_samples, level, seed)
    expected = fast_log_mel_energies(samples)
    assert compiled_log_mel_energies(samples).tobytes() == expected.tobytes()


def test_logarithms_are_those_of_float64() -> None:
    """Within a unit of the last place, or 1e-7 near 1, over all energies of 16-bit samples."""
    values = np.geomspace(2.0**-23, 1e13, 200_003, dtype=np.float32)[np.newaxis]
    expected = np.log(values.astype(np.float64))
    unit = np.spacing(np.abs(expected).astype(np.float32))
    assert np.all(np.abs(natural_log(values) - expected) <= np.maximum(unit, 1e-7))


@needs_compiler
@pytest.mark.parametrize("options", ["-O0", "-O3 -march=x86-64", "-O3 -march=x86-64-v3"])
def test_any_cpu_has_the_same_bits(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds for other vectors, and for none, compute what the installed one does."""
    samples = noise(9000, 0.1, 2)
    expected = compiled_log_mel_energies(samples)
    library = tmp_path / "filter_bank.so"
    flags = [*options.split(), "-ffp-contract=off", "-DFOR_EACH_CPU=", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(library)], check=True)
    monkeypatch.setattr(log_mel, "_C", declared(ctypes.CDLL(str(library)), log_mel.FUNCTIONS))
    assert compiled_log_mel_energies(samples).tobytes() == expected.tobytes()


@needs_compiler
def test_no_sample_beyond_the_last_is_read() -> None:
    """Samples may end where memory does."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no error\n"), done.stderr
