"""The notebook of shards runs from top to bottom on what the real writers wrote."""

from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from infra.store.object_store import ObjectStore
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.kbest import select_kbest
from pipeline.normalization import CausalMean
from pipeline.records import Tally
from pipeline.runs.commit import step_context, write_manifest
from pipeline.runs.manifest import Manifest
from pipeline.shards import FeatureRow, TargetRow, write_features, write_targets
from pipeline.splicing import splice

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "notebooks" / "inspect_shards.ipynb"
SECONDS = (2.0, 1.2)


@pytest.fixture
def rows() -> list[FeatureRow]:
    """Two utterances of one speaker: noise through the real front end."""
    noise = np.random.default_rng(17)
    mean = CausalMean()
    energies = [
        mean.subtract(log_mel_energies(noise.normal(0, 0.1, int(16_000 * s)).astype(np.float32)))
        for s in SECONDS
    ]
    return [
        FeatureRow(
            utterance_id=f"utterance-{number}",
            speaker_id="speaker",
            duration_ms=round(1000 * SECONDS[number]),
            created_at=f"2019-05-0{number + 1}T12:00:00+00:00",
            audio_uri=f"audio/{number}.flac",
            audio_etag="",
            text=None,
            placement=None,
            features=frames.astype(np.float16),
        )
        for number, frames in enumerate(energies)
    ]


def write_step(run: Path, step: str, data: bytes, tally: Tally) -> None:
    """Store one shard and its manifest as a step does."""
    context = step_context(ObjectStore((str(run),)), str(run), step, {}, {})
    output = context.put_output("000000", ".parquet", data, tally)
    manifest = Manifest(step, {}, {}, (output,), tally_in=tally, tally_out=tally)
    write_manifest(context, manifest)


def write_run(run: Path, rows: list[FeatureRow], has_targets: bool) -> None:
    """A run of one feature shard and, if asked for, its targets of a random teacher."""
    tally = Tally(len(rows), sum(row.duration_ms for row in rows))
    write_step(run, "features/unlabelled", write_features(rows), tally)
    if not has_targets:
        return
    random = np.random.default_rng(17)
    shapes = [(len(splice(row.features, 1)), 50) for row in rows]
    logits = [random.normal(0, 3, shape).astype(np.float32) for shape in shapes]
    targets = [
        TargetRow(row.utterance_id, 1, select_kbest(teacher, k=20))
        for row, teacher in zip(rows, logits, strict=True)
    ]
    write_step(run, "targets/unlabelled", write_targets(targets), tally)


@pytest.fixture(autouse=True)
def jupyter_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels leave their files in the test's directory, not in the user's home."""
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def read_notebook() -> nbformat.NotebookNode:
    """The notebook as it is stored."""
    text = NOTEBOOK.read_text("utf-8")
    notebook: nbformat.NotebookNode = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def execute(run: Path) -> tuple[str, int]:
    """Run the notebook on `run`; all that it printed, and the number of its pictures."""
    notebook = read_notebook()
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    parameters.source = f"RUN = {str(run)!r}"
    resources = {"metadata": {"path": str(REPOSITORY)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return printed, sum("image/png" in output.get("data", {}) for output in outputs)


def test_shows_features_and_targets(tmp_path: Path, rows: list[FeatureRow]) -> None:
    """All cells run, print the shard's facts and draw four pictures."""
    write_run(tmp_path / "run", rows, has_targets=True)
    printed, num_pictures = execute(tmp_path / "run")
    assert "features/unlabelled" in printed
    assert "utterances: 2, speakers: 1" in printed
    num_low_rate_frames = sum((len(row.features) - 1) // 3 for row in rows)
    assert f"k = 20, {num_low_rate_frames} low-rate frames" in printed
    assert num_pictures == 4


def test_says_when_there_are_no_targets(tmp_path: Path, rows: list[FeatureRow]) -> None:
    """A run before target generation is shown as far as it goes."""
    write_run(tmp_path / "run", rows, has_targets=False)
    printed, num_pictures = execute(tmp_path / "run")
    assert "no targets yet" in printed
    assert num_pictures == 3


def test_stored_clean() -> None:
    """The notebook keeps no outputs and defines no functions of its own."""
    notebook = read_notebook()
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert not any("def " in cell.source or "lambda" in cell.source for cell in code)
