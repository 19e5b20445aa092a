"""Measure the bytes of a finished run's lattices in their shard, and the time to pack and read.

python -m tests.benchmarks.lattice_storage --run DIR [--set KEY=VALUE ...] [--utterances N] [--json]

DIR is a run with a baseline, which decodes its labelled speech as `recorded` says. "Plain" are the
arrays as they are, level by level and arc by arc, which earlier shards held.
"""

import time

import numpy as np

from pipeline.shards import Lattice, LatticeRow, read_lattices, write_lattices
from pipeline.shards.lattices import check_lattice
from tests.benchmarks.decoding_rates import decoded_lattices, parsed
from tests.benchmarks.measure import Figure, interleaved, show

NUM_ROUNDS = 7


def main() -> None:
    """Measure and print."""
    arguments = parsed(__doc__.splitlines()[0])
    made = decoded_lattices(arguments)
    rows = [LatticeRow(f"u{number}", 1, number, each) for number, each in enumerate(made)]
    num_arcs = sum(len(each.sources) for each in made)
    arrays = [getattr(each, name) for each in made for name in Lattice.__slots__]
    data, plain = write_lattices(rows), [each.tobytes() for each in arrays]

    def read_plain() -> None:
        for each, raw in zip(arrays, plain, strict=True):
            np.frombuffer(raw, each.dtype)
        for lattice in made:
            check_lattice(lattice, "")

    spent = interleaved(
        {
            "write": lambda: write_lattices(rows),
            "read": lambda: read_lattices(data),
            "read, plain and without a file": read_plain,
        },
        NUM_ROUNDS,
        time.process_time,
    )
    sizes = {"bytes": len(data), "bytes, plain and without a file": sum(map(len, plain))}
    figures = [Figure.of(f"{n} an arc", [size / num_arcs], "B") for n, size in sizes.items()]
    figures += [
        Figure.of(f"{name}, an arc", [1e9 * each / num_arcs for each in some], "ns")
        for name, some in spent.items()
    ]
    show(f"{num_arcs} arcs of {len(made)} utterances", figures, arguments.json)


if __name__ == "__main__":
    main()
