"""A notebook reads a run in S3: its URI is all that a user sets."""

from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from tests.notebooks.execution import FOLDERS, REPOSITORY, execute, num_pictures, read_notebook
from tests.small_run import make_run


def test_shards_of_a_run_in_s3(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has the standard AWS settings of its environment; all cells run, no path is local.

    It prints what the same notebook prints of the local copy.
    """
    for folder in FOLDERS:
        monkeypatch.setenv(folder, str(tmp_path / "jupyter"))
    _, local_uri = make_run(tmp_path)
    uri = f"s3://{s3_bucket}/runs/small"
    store = ObjectStore((uri,))
    for path in Path(local_uri).rglob("*.*"):
        store.put(f"{uri}/{path.relative_to(local_uri).as_posix()}", path.read_bytes())
    said = {}
    for run in (uri, local_uri):
        notebook = read_notebook(REPOSITORY / "notebooks" / "inspect_shards.ipynb")
        said[run] = execute(notebook, f"RUN = {run!r}")
        assert num_pictures(notebook) == 5
    assert "features/unlabelled" in said[uri]
    assert "mean retained mass" in said[uri]
    assert said[uri] == said[local_uri]
