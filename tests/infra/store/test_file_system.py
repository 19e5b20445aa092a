"""pandas and pyarrow read a run by the example of docs/stores.md, on local paths and in S3."""

import re
from pathlib import Path

import numpy as np
import pytest
from pyarrow.parquet import read_table
from s3fs import S3File

from infra.store.file_system import file_system
from infra.store.object_store import ObjectStore, PrefixError
from pipeline.shards import FeatureRow, write_features
from tests.small_run import make_run, outputs, upload_run

PAGE = Path(__file__).parents[3] / "docs" / "stores.md"


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    _, local_uri = make_run(tmp_path)
    if request.param == "local":
        return local_uri
    uri = f"s3://{request.getfixturevalue('s3_bucket')}/small"
    upload_run(local_uri, uri)
    return uri


def test_the_example_of_the_page_runs(run_uri: str) -> None:
    """Hours of speakers are those of the manifest; a table has all rows of its shard."""
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, object] = {}
    exec(re.sub(r'^run = ".*?"', f"run = {run_uri!r}", example, flags=re.M), names)
    shards = outputs(ObjectStore((run_uri,)), run_uri, "features")
    assert names["spoken"].duration_ms.sum() == sum(each.duration_ms for each in shards) > 0
    assert set(names["spoken"].columns) == {"speaker_id", "duration_ms"}
    assert names["first"].num_rows == shards[0].utterances


def test_only_the_named_columns_are_fetched(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 MB of features, the footer and a column that lies between."""
    energies = np.zeros((1500, 64), np.float16)
    rows = [FeatureRow(f"u{n}", "s", 15_000, "", "a", "", None, None, energies) for n in range(20)]
    uri = f"s3://{s3_bucket}/shard"
    ObjectStore((uri,)).put(uri, write_features(rows))
    fetched, fetch = [], S3File._fetch_range

    def counted(file: S3File, start: int, end: int) -> bytes:
        fetched.append(end - start)
        return fetch(file, start, end)

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    table = read_table(uri, filesystem=file_system(uri), columns=["utterance_id"])
    assert table["utterance_id"].to_pylist() == [row.utterance_id for row in rows]
    assert 0 < sum(fetched) < 100_000


def test_a_run_that_grows_is_listed_anew(run_uri: str) -> None:
    """Names are never those of an earlier look."""
    files = file_system(run_uri)
    before = files.ls(f"{run_uri}/features", detail=False)
    ObjectStore((run_uri,)).put(f"{run_uri}/features/later/x", b"1")
    assert len(files.ls(f"{run_uri}/features", detail=False)) == len(before) + 1


def test_other_schemes_are_refused() -> None:
    """As jobs refuse them."""
    with pytest.raises(PrefixError, match="unknown scheme gs://"):
        file_system("gs://bucket/run")
