"""Every stored notebook is clean, and reads a run in S3."""

from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execution import NOTEBOOKS, SHOWN, read_notebook, require_shown
from tests.small_run import make_run, upload_run


def test_all_notebooks_are_there() -> None:
    """The four that the guide names."""
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_clean(path: Path) -> None:
    """The notebook keeps no outputs, starts from a run, and defines no functions of its own."""
    notebook = read_notebook(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert not any("def " in cell.source or "lambda" in cell.source for cell in code)
    (parameters,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert 'RUN = "../runs/demo"' in parameters.source
    assert notebook.metadata == {}


def test_shards_of_a_run_in_s3(s3_bucket: str, tmp_path: Path) -> None:
    """The kernel has the standard AWS settings of its environment; all cells run, no path is local.

    It prints what steps the run has.
    """
    _, local_uri = make_run(tmp_path)
    uri = f"s3://{s3_bucket}/runs/small"
    upload_run(local_uri, uri)
    assert "features/unlabelled" in require_shown("inspect_shards", uri, tmp_path / "jupyter")


def test_targets_of_a_run_on_local_paths(tmp_path: Path) -> None:
    """The mass of each k comes from target shards, the placement from one column of features."""
    _, local_uri = make_run(tmp_path)
    printed = require_shown("kbest_mass", local_uri, tmp_path / "jupyter")
    assert "k = 4\nk =   1: mean mass 0." in printed
