"""Print, as a Spark program, from where its driver and its executors import our code and NumPy."""

import argparse
import json
import os
import sys

import numpy

import infra
import jobs.cli.command_line
import pipeline
from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session


def import_places(_: int) -> list[str]:
    """Return the files of our packages and of NumPy, OpenBLAS's threads, and the Python."""
    from pipeline.steps import features  # noqa: PLC0415

    modules = (pipeline, infra, features, numpy)
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    return [*(str(module.__file__) for module in modules), threads, sys.executable]


def main() -> None:
    """Print the places of the driver and of eight tasks, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", required=True)
    cluster = load_cluster(parser.parse_args().cluster)
    with spark_session("places", cluster) as session:
        tasks = run_tasks(session, list(range(8)), import_places, "places")
    print(
        json.dumps({"driver": [pipeline.__file__, jobs.cli.command_line.__file__], "tasks": tasks})
    )


if __name__ == "__main__":
    main()
