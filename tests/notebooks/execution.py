"""Execute a notebook as a user does, on another run, and return all that it printed."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LIMIT_S = 600


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Read a stored notebook."""
    notebook: nbformat.NotebookNode = nbformat.reads(path.read_text("utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def execute(notebook: nbformat.NotebookNode, *settings: str) -> str:
    """Execute a notebook with these lines at the end of its parameters; return what it printed."""
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    parameters.source = "\n".join((parameters.source, *settings))
    resources = {"metadata": {"path": str(REPOSITORY)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def num_pictures(notebook: nbformat.NotebookNode, kind: str = "image/png") -> int:
    """Count the outputs of a kind of an executed notebook."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum(kind in output.get("data", {}) for output in outputs)
