"""Execute a notebook as a user does, on another run, and return all that it printed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LIMIT_S = 600
FOLDERS = ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
SHOWN = {
    "inspect_shards": ("effective speakers", 3),
    "kbest_mass": ("mean mass", 2),
    "trainer_tradeoffs": ("student: htm on ", 1),
    "errors": (" s of audio", 3),
}
"""Each notebook prints this text and draws so many pictures, on a whole run."""


def require_shown(name: str, run_uri: str, folder: Path) -> str:
    """Execute a notebook from a run's URI alone; require its text and its pictures.

    Files of its kernel lie in `folder`, not in the user's home. Returns all that it printed.
    """
    notebook = read_notebook(REPOSITORY / "notebooks" / f"{name}.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        for each in FOLDERS:
            patch.setenv(each, str(folder))
        printed = execute(notebook, f"RUN = {run_uri!r}")
    said, num_drawn = SHOWN[name]
    assert said in printed
    drawn = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(drawn) == num_drawn
    return printed


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Read a stored notebook."""
    notebook: nbformat.NotebookNode = nbformat.reads(path.read_text("utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def execute(notebook: nbformat.NotebookNode, setting: str) -> str:
    """Execute a notebook with this line at the end of its parameters; return what it printed."""
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    parameters.source += f"\n{setting}"
    resources = {"metadata": {"path": str(REPOSITORY)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
