"""Label files by Spark's tasks, which share the device pool's two servers.

Four tasks run at a time, two a device: they read and send while the servers compute.
"""

import sys
from dataclasses import replace
from pathlib import Path

from infra.cluster import load_cluster
from infra.devices.device_pool import DevicePool
from infra.spark.session import run_tasks, spark_session


def main() -> None:
    """Run one Spark task a file."""
    files, folder = Path(sys.argv[1]), sys.argv[2]
    from tests.benchmarks.device_pool.workload import BATCH_FRAMES, RECORDED  # noqa: PLC0415

    devices = ("cpu#0", "cpu#1")
    pool = DevicePool(RECORDED, {"folder": folder}, devices, BATCH_FRAMES, idle_timeout_s=5.0)

    def label(file: str) -> int:
        from tests.benchmarks.device_pool.bare_loop import label_file  # noqa: PLC0415

        return label_file(pool, file)

    paths = sorted(map(str, files.glob("*.parquet")))
    settings = {"spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[3])}
    demo = load_cluster("demo")
    cluster = replace(demo, master="local[4]", spark=demo.spark | settings)
    with spark_session("pool", cluster) as session:
        run_tasks(session, paths, label, "labels")


if __name__ == "__main__":
    main()
