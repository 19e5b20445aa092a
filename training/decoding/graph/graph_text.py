"""Decoding graphs as text, for searches of other processes: AT&T's format of acceptors."""

import gzip

import kaldifst

from training.decoding.graph.hclg import DecodingGraph
from training.decoding.graph.transducer import arcs_of, final_costs_of


def encode_graph(graph: DecodingGraph) -> bytes:
    """Write the arcs, without words, as gzip of lines "source target label cost"; the start first.

    A cost has six decimal places.
    """
    arcs = sorted(arcs_of(graph.fst), key=lambda arc: arc.source != graph.fst.start)
    lines = [f"{a.source} {a.target} {a.input_label} {a.cost:.6f}" for a in arcs]
    lines += [f"{state} {cost:.6f}" for state, cost in final_costs_of(graph.fst).items()]
    # Without the time of day, so that equal graphs have equal bytes.
    return gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=6, mtime=0)


def decode_graph(data: bytes, num_senones: int) -> DecodingGraph:
    """Read what `encode_graph` wrote; the graph writes no words."""
    fst = kaldifst.compile(gzip.decompress(data).decode(), acceptor=True)
    return DecodingGraph(fst, (), num_senones)
