"""Measure the cost of a stream where 1, 10 or 100 streams share a core.

python -m tests.benchmarks.streams [--layers 5 --units 768 --senones 3183 --seconds 10]

CPU seconds of one thread: the filter bank of a stream, and the network of streams that advance
together, in pieces of 300 ms. The search depends on graph and beam: `megahour transcribe` times it.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from pipeline.filterbank import SAMPLE_RATE_HZ
from training.export.export_model import in_int8, streaming_graph
from training.export.recognizer import EnergyStream, StreamingModel
from training.models.lstm import LstmModel
from training.settings.models import LstmConfig

PIECE_S = 0.3
NUM_STREAMS = (1, 10, 100)


def networks(arguments: argparse.Namespace) -> dict[str, bytes]:
    """Return a network of random weights in both precisions: its cost is that of a trained one."""
    torch.manual_seed(0)
    config = LstmConfig(arguments.layers, arguments.units, False, 3, 0.0)
    graph = streaming_graph(LstmModel(config, arguments.senones).eval())
    return {"float32": graph.SerializeToString(), "int8": in_int8(graph)}


def filter_bank_s(samples: np.ndarray, piece: int) -> float:
    """Return the seconds of the filter bank of one stream."""
    stream = EnergyStream("fast")
    started = time.process_time()
    for first in range(0, len(samples), piece):
        stream.accept(samples[first : first + piece])
    return time.process_time() - started


def network_s(model: StreamingModel, num_streams: int, num_pieces: int) -> float:
    """Return the seconds of the network of all streams together, after a call to warm up."""
    generator = np.random.default_rng(0)
    energies = generator.normal(5, 3, size=(num_streams, 30, 64)).astype(np.float32)
    state = model.advance(energies, model.start(num_streams))[1]
    started = time.process_time()
    for _ in range(num_pieces):
        state = model.advance(energies, state)[1]
    return time.process_time() - started


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Time all numbers of streams in both precisions; real-time factors are of one stream."""
    samples = np.random.default_rng(1).normal(0, 0.05, round(arguments.seconds * SAMPLE_RATE_HZ))
    bank_s = filter_bank_s(samples.astype(np.float32), round(PIECE_S * SAMPLE_RATE_HZ))
    found: dict[str, object] = {"filter_bank": bank_s / arguments.seconds}
    num_pieces = max(1, round(arguments.seconds / PIECE_S))
    for precision, network in networks(arguments).items():
        model = StreamingModel(network)
        found[precision] = {
            str(number): network_s(model, number, num_pieces) / (number * num_pieces * PIECE_S)
            for number in NUM_STREAMS
        }
        found[f"{precision}_bytes"] = len(network)
    return found


def describe(found: dict[str, object]) -> str:
    """Format the real-time factors of a stream, and the streams that a core carries."""
    lines = [f"filter bank       {found['filter_bank']:.5f} of real time a stream"]
    for precision in ("float32", "int8"):
        factors = found[precision]
        assert isinstance(factors, dict)
        for number, factor in factors.items():
            lines.append(
                f"{precision:8} {number:>4} streams  {factor:.5f} ({1 / factor:.0f} a core)"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; --json FILE keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 5), ("units", 768), ("senones", 3183), ("seconds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(describe(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
