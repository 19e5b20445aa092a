"""Print one line of JSON under spark-submit, and fail if asked to."""

import json
import os
import signal
import sys
import threading
import time

from pyspark import SparkContext

from infra.cluster import load_cluster
from infra.log_lines import separate_standard_error
from infra.spark.session import run_tasks, spark_session

separate_standard_error()
with spark_session("program", load_cluster("demo")) as session:
    squares = run_tasks(session, [1, 2, 3], lambda value: value**2, "squares")
    process = getattr(SparkContext._gateway, "proc", None)
    result = {
        "conf": dict(session.sparkContext.getConf().getAll()),
        "squares": squares,
        "java_pid": process.pid if process else None,
        "java_home": session.sparkContext._jvm.System.getProperty("java.home"),
    }
    print(json.dumps(result), flush=True)
    if "fail" in sys.argv:
        print("asked to fail", file=sys.stderr)
        raise SystemExit(3)
    if "lose" in sys.argv:
        java = int(session.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
        threading.Timer(1.0, os.kill, (java, signal.SIGKILL)).start()
        run_tasks(session, [60.0], time.sleep, "naps")
