"""Run one step that never ends by itself, as jobs/run.py runs a step of its kind.

As the step, it says "ready" in each of two workers.
"""

import sys
import time
from pathlib import Path

import jobs.run
from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session
from jobs.run import Launch, exit_with, launches, run_steps

STEPS = {"python": "report", "Spark": "select_utterances", "torchrun": "train_student"}
HERE = Path(__file__)


def wait(_: int = 0) -> None:
    """Say so on standard error and wait."""
    # In one piece: unbuffered, print() writes the end of the line by itself.
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    time.sleep(300)


def main(kind: str) -> None:
    """Launch the step of this kind."""
    jobs.run.JOBS = HERE.parent
    (prefix,) = [
        each.prefix for each in launches(["--kaldi-dir", "data"], 2, 2) if each.step == STEPS[kind]
    ]
    exit_with(lambda: run_steps([Launch(HERE.stem, prefix)], ["--step", kind]))


if __name__ == "__main__":
    if "--step" not in sys.argv:
        main(sys.argv[1])
    elif "Spark" in sys.argv:
        with spark_session("waiting", load_cluster("demo")) as session:
            run_tasks(session, [1, 2], wait, "waiting")
    else:
        wait()
