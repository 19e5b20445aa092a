"""Label files by Spark's predict_batch_udf in two Python workers.

Its results are numbers, so targets are dropped, and their lengths returned.
"""

import sys
from pathlib import Path

import numpy as np
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql.types import LongType

from infra.cluster import load_cluster
from infra.spark.session import spark_session


def main() -> None:
    """Read, label and count."""
    files, folder, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def make_predict():
        from tests.benchmarks.device_pool.workload import RecordedFunction  # noqa: PLC0415

        function = RecordedFunction("cpu", Path(folder))

        def predict(payloads: np.ndarray) -> np.ndarray:
            return np.array([len(each) for each in function.label(list(map(bytes, payloads)))])

        return predict

    label = predict_batch_udf(make_predict, return_type=LongType(), batch_size=rows)
    with spark_session("udf", load_cluster("demo")) as session:
        found = session.read.parquet(files).repartition(8).select(label("payload").alias("targets"))
        found.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
