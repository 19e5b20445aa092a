"""Every stored notebook is clean: no outputs, a parameter cell with the run, no functions."""

from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execution import NOTEBOOKS, SHOWN, read_notebook


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
