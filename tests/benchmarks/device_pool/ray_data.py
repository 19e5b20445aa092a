"""Label files by Ray Data's map_batches with an actor pool of two."""

import sys
from pathlib import Path

import ray

from tests.benchmarks.device_pool.workload import RecordedFunction


class Labeller:
    """Labeller holds the teacher in an actor."""

    def __init__(self, folder: str) -> None:
        self._function = RecordedFunction("cpu", Path(folder))

    def __call__(self, batch):
        payloads = [bytes(each) for each in batch["payload"]]
        return {"targets": self._function.label(payloads)}


def main() -> None:
    """Read, label and count."""
    files, folder, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # Of four slots the actors take two, and reading what it needs.
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=10**9, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    actors = ray.data.ActorPoolStrategy(size=2)
    labelled = ray.data.read_parquet(files, override_num_blocks=8).map_batches(
        Labeller, fn_constructor_args=(folder,), batch_size=rows, compute=actors, num_cpus=1
    )
    assert labelled.materialize().count() > 0


if __name__ == "__main__":
    main()
