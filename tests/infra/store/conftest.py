"""Give tests of the store a place for objects: local, or in S3."""

from pathlib import Path

import pytest


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a place for objects: local, or in S3."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue('s3_bucket')}/store"
