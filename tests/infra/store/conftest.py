"""Give tests of the store a place for objects: local, or in a server."""

from pathlib import Path

import pytest

CEPH = pytest.param("ceph", marks=pytest.mark.cluster)


@pytest.fixture(params=["local", "s3", CEPH])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a place for objects: local, or in either server."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue(f'{request.param}_bucket')}/store"
