"""Share the environment in which the jobs' processes run."""

import pytest

from infra.spark.session import configure, spark_environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with a configured spark-submit, apart from the installed one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(tmp_path_factory.mktemp("spark-conf")))
        configure()
        return spark_environment()
