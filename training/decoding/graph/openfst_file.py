"""Check the bytes of an OpenFst file before OpenFst reads them.

OpenFst trusts its counts: of 400 damaged graphs some never ended, and a label or a state that does
not exist is read beyond the end of an array.
"""

import math
import struct

import numpy as np

_KIND = struct.pack("<Ii6si8s", 0x7EB2FDD6, 6, b"vector", 8, b"standard")
_HEADER = struct.Struct("<iiQqqq")
_STATE = struct.Struct("<fq")
_ARC = np.dtype([("input", "<i4"), ("output", "<i4"), ("cost", "<f4"), ("target", "<i4")])
_VERSION, _NO_SYMBOLS = 2, 0


def require_graph(data: bytes, num_labels: int, num_words: int) -> None:
    """Raise ValueError unless the bytes are a whole graph whose arcs name what is there.

    Input labels go up to `num_labels`; output labels are 0 or below `num_words`.
    """
    begin = len(_KIND) + _HEADER.size
    if len(data) < begin or not data.startswith(_KIND):
        raise ValueError(f"{len(data)} bytes are no vector graph of OpenFst")
    version, flags, _, start, num_states, _ = _HEADER.unpack_from(data, len(_KIND))
    if (version, flags) != (_VERSION, _NO_SYMBOLS) or not 0 <= start < num_states:
        raise ValueError(f"a graph of version {version}, flags {flags} that starts at {start}")
    if num_states * _STATE.size > len(data):
        raise ValueError(f"{num_states} states in {len(data)} bytes")
    limits = {"input": num_labels + 1, "output": max(num_words, 1), "target": num_states}
    for state in range(num_states):
        begin = _after_state(data, begin, state, limits)
    if begin != len(data):
        raise ValueError(f"{len(data) - begin} bytes behind the last state")


def _after_state(data: bytes, begin: int, state: int, limits: dict[str, int]) -> int:
    """Return where the next state begins."""
    if begin + _STATE.size > len(data):
        raise ValueError(f"the graph ends before state {state}")
    final, num_arcs = _STATE.unpack_from(data, begin)
    begin += _STATE.size
    if math.isnan(final) or not 0 <= num_arcs <= (len(data) - begin) // _ARC.itemsize:
        raise ValueError(f"state {state} of cost {final} with {num_arcs} arcs")
    arcs = np.frombuffer(data, _ARC, num_arcs, begin)
    for name, limit in limits.items():
        if num_arcs and not 0 <= arcs[name].min() <= arcs[name].max() < limit:
            raise ValueError(f"state {state} has an arc whose {name} is not below {limit}")
    if np.isnan(arcs["cost"]).any():
        raise ValueError(f"state {state} has an arc without a cost")
    return begin + arcs.nbytes
