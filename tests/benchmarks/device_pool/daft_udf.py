"""Label files by a stateful Daft class in two processes."""

import sys
from pathlib import Path

import daft

from tests.benchmarks.device_pool.workload import RecordedFunction


@daft.cls(max_concurrency=2, use_process=True)
class Labeller:
    """Labeller holds the teacher in a process."""

    def __init__(self, folder: str) -> None:
        self._function = RecordedFunction("cpu", Path(folder))

    @daft.method.batch(return_dtype=daft.DataType.binary(), batch_size=int(sys.argv[3]))
    def label(self, payloads):
        return self._function.label(payloads.to_pylist())


def main() -> None:
    """Read, label and count."""
    files, folder = sys.argv[1:3]
    found = daft.read_parquet(f"{files}/*.parquet")
    labelled = found.select(Labeller(folder).label(daft.col("payload")))
    assert labelled.collect().count_rows() > 0


if __name__ == "__main__":
    main()
