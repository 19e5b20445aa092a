"""Compile the Triton kernels for a GPU that need not be present; print their sizes.

`python -m tests.training.algorithms.gtc.compiled_kernels` prints JSON: for each kernel and type of
the parameters the number of loads of four words and the bytes of machine code.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from training.algorithms.gtc import cuda_encoding as kernels
from training.algorithms.gtc import cuda_encoding as launches

HOPPER = GPUTarget("cuda", 90, 32)
FLOATS = ("residual", "gradients", "threshold")
COUNTS = ("num_elements", "num_words", "num_blocks", "num_map_words", "capacity")
CONSTANTS = {"num_rows": launches.BLOCK_ROWS, "chunk_blocks": launches.COUNTS_AT_ONCE}


def type_of(name: str, real: str) -> str:
    """Return the type of a kernel's argument in Triton's notation."""
    if name in CONSTANTS:
        return "constexpr"
    if name in COUNTS:
        return "i32"
    return f"*{real}" if name in FLOATS else "*i32"


def compiled(kernel: triton.JITFunction, real: str, num_warps: int) -> dict[str, int]:
    """Compile a kernel with pointers at multiples of 16 bytes, as torch's are; measure it."""
    signature = {name: type_of(name, real) for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    constants = {places[name]: value for name, value in CONSTANTS.items() if name in places}
    aligned = {
        place: [["tt.divisibility", 16]]
        for name, place in places.items()
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    done = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    return {"wide_loads": done.asm["ptx"].count(".v4.b32"), "bytes": len(done.asm["cubin"])}


if __name__ == "__main__":
    warps = {kernels.accumulate: 8, kernels.choose: 4, kernels.take: 1, kernels.add_signs: 4}
    found = {
        f"{kernel.fn.__name__} {real}": compiled(kernel, real, num_warps)
        for kernel, num_warps in warps.items()
        for real in ("fp32", "fp64")
    }
    print(json.dumps(found))
