"""Run the compiled loops on vectors from malloc, for AddressSanitizer to watch.

`LD_PRELOAD=libasan.so python sanitized_loops.py LIBRARY`: an access beyond a vector ends it.
"""

import ctypes
import sys

HEADER_WORDS, GROUP, MAP = 2, 64, 1
NUM_PARAMETERS = (1, 31, 33, 64, 65, 95, 700)
INTERVALS = (1, 3, 64, 1000)
"""An element in so many reaches the threshold: messages are maps at first, then indices."""

_C = ctypes.CDLL(None)
_C.malloc.restype, _C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_C.free.argtypes = [ctypes.c_void_p]


def vector(kind: type, values: list[float]) -> ctypes.Array:
    """Allocate a vector of its own, whose neighbours nothing may touch."""
    address = _C.malloc(ctypes.sizeof(kind) * len(values))
    array = (kind * len(values)).from_address(address)
    array[:] = values
    return array


def exchange(library: ctypes.CDLL, size: int, interval: int) -> None:
    """Take a message of `size` elements, and add it to counts."""
    num_plane_words = (size + 31) // 32
    residual = vector(ctypes.c_float, [0.0] * size)
    signs = [(-1) ** number if number % interval == 0 else 0 for number in range(size)]
    gradients = vector(ctypes.c_float, [3.0 * sign for sign in signs])
    message = vector(ctypes.c_uint32, [0] * (HEADER_WORDS + 2 * num_plane_words + GROUP))
    counts = vector(ctypes.c_int32, [0] * size)
    num_words = library.take_message(residual, gradients, size, ctypes.c_float(2.0), message)
    body = message[HEADER_WORDS:num_words]
    if message[0] == MAP:
        planes = [body[:num_plane_words], body[num_plane_words:]]
        library.add_map(counts, size, *(vector(ctypes.c_uint32, plane) for plane in planes))
    else:
        words = vector(ctypes.c_uint32, body)
        assert library.add_indices(counts, size, words, len(body)) == len(body)
    assert list(counts) == signs


def main() -> None:
    """Exchange messages of every size and density."""
    library = ctypes.CDLL(sys.argv[1])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.take_message.argtypes = pointer, pointer, number, ctypes.c_float, pointer
    library.add_indices.argtypes = pointer, number, pointer, number
    library.add_map.argtypes = pointer, number, pointer, pointer
    library.take_message.restype = library.add_indices.restype = number
    for size in NUM_PARAMETERS:
        for interval in INTERVALS:
            exchange(library, size, interval)
    print("no error")


if __name__ == "__main__":
    main()
