"""The notebook of shards shows what the real writers wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.kbest import select_kbest
from pipeline.normalization import CausalMean
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest
from pipeline.shards import FeatureRow, TargetRow, write_features, write_targets
from pipeline.splicing import splice
from tests.notebooks.execution import FOLDERS, REPOSITORY, read_notebook

pytestmark = pytest.mark.chaos

NOTEBOOK = REPOSITORY / "notebooks" / "inspect_shards.ipynb"
SECONDS = (2.0, 1.2)
DRAWN = """
import json
drawn = [
    {
        "labels": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()],
        "images": [[image.get_array().tolist(), image.get_extent()] for image in axes.images],
        "lines": {line.get_label(): line.get_xydata().T.tolist() for line in axes.lines},
        "bars": [[bar.get_x(), bar.get_width(), bar.get_height()] for bar in axes.patches],
    }
    for number in plt.get_fignums()
    for axes in plt.figure(number).axes
]
with open("{path}", "w") as file:
    json.dump(drawn, file)
"""
"""The data of all axes, once the figures are kept: a last cell of the notebook."""


@dataclass(frozen=True)
class Shown:
    """Shown holds all that the notebook printed, and the data of its axes, in order."""

    printed: str
    axes: list[dict[str, Any]]

    def labels(self) -> list[list[str]]:
        """Return the title, and the names of x and y, of all axes."""
        return [each["labels"] for each in self.axes]


@pytest.fixture
def spoken() -> list[np.ndarray]:
    """Return the energies of two utterances of one speaker: noise through the real front end."""
    noise = np.random.default_rng(17)
    return [
        log_mel_energies(noise.normal(0, 0.1, int(16_000 * s)).astype(np.float32)) for s in SECONDS
    ]


@pytest.fixture
def rows(spoken: list[np.ndarray]) -> list[FeatureRow]:
    """Return the same, less the causal mean."""
    mean = CausalMean()
    energies = [mean.subtract(utterance) for utterance in spoken]
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


def logits_of(rows: list[FeatureRow]) -> list[np.ndarray]:
    """Return a random teacher's logits of each low-rate frame."""
    random = np.random.default_rng(17)
    shapes = [(len(splice(row.features, 1)), 50) for row in rows]
    return [random.normal(0, 3, shape).astype(np.float32) for shape in shapes]


def write_run(run: Path, rows: list[FeatureRow], logits: list[np.ndarray]) -> None:
    """Write a run of one feature shard and, if there are logits, of its targets."""
    tally = Tally(len(rows), sum(row.duration_ms for row in rows))
    write_step(run, "features/unlabelled", write_features(rows), tally)
    if not logits:
        return
    targets = [
        TargetRow(row.utterance_id, 1, select_kbest(teacher, k=20))
        for row, teacher in zip(rows, logits, strict=True)
    ]
    write_step(run, "targets/unlabelled", write_targets(targets), tally)


@pytest.fixture(autouse=True)
def jupyter_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of kernels in the test's directory, not in the user's home."""
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def execute(run: Path) -> Shown:
    """Run the notebook on `run`; keep its figures for a last cell that reads them."""
    notebook = read_notebook(NOTEBOOK)
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    parameters.source += f"\n%config InlineBackend.close_figures = False\nRUN = {str(run)!r}"
    path = run / "drawn.json"
    last = nbformat.v4.new_code_cell(DRAWN.replace("{path}", str(path)))  # type: ignore[no-untyped-call]
    notebook.cells.append(last)
    resources = {"metadata": {"path": str(REPOSITORY)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return Shown(printed, json.loads(path.read_text()))


FEATURE_LABELS = [
    ["utterance-0", "time, s", "mel bin"],
    ["", "", "log energy minus causal mean"],
    ["the causal mean, minus that of the first frame", "time, s", ""],
    ["log energy of bin 5, the first 5 s", "time, s", ""],
    ["", "duration, s", "utterances"],
    ["", "shard, by length", "hours"],
]
TARGET_LABELS = [
    ["", "retained mass", "low-rate frames"],
    ["", "confidence of the best senone", "low-rate frames"],
]


@pytest.fixture
def shown(tmp_path: Path, rows: list[FeatureRow]) -> Shown:
    """Run the notebook on a run with targets."""
    write_run(tmp_path / "run", rows, logits_of(rows))
    return execute(tmp_path / "run")


def test_shows_features_and_targets(
    shown: Shown, spoken: list[np.ndarray], rows: list[FeatureRow]
) -> None:
    """The text states the shard's facts; each picture draws what its axes are called."""
    num_low_rate_frames = sum((len(row.features) - 1) // 3 for row in rows)
    assert "features/unlabelled" in shown.printed
    assert "1 of 1 shards of features/unlabelled" in shown.printed
    assert "utterances: 2, speakers: 1" in shown.printed
    assert f"k = 20, {num_low_rate_frames} low-rate frames" in shown.printed
    assert "median 1.6 s, longest 2.0 s" in shown.printed
    assert shown.labels() == FEATURE_LABELS + TARGET_LABELS
    require_features(shown, rows)
    require_causal_mean(shown, spoken)
    require_histograms(shown, rows)


def require_features(shown: Shown, rows: list[FeatureRow]) -> None:
    """Require the longest utterance bin by bin over its seconds, to the bit."""
    ((drawn, extent),) = shown.axes[0]["images"]
    assert extent == [0, pytest.approx(0.01 * len(rows[0].features)), 0, NUM_BINS]
    assert np.array_equal(np.array(drawn), rows[0].features.T)


def require_causal_mean(shown: Shown, spoken: list[np.ndarray]) -> None:
    """Require the drift: the mean so far less the first frame, within float16."""
    stream = np.concatenate(spoken).astype(np.float64)
    means = np.cumsum(stream, axis=0) / np.arange(1, len(stream) + 1)[:, np.newaxis]
    lines = shown.axes[2]["lines"]
    assert list(lines) == ["bin 5", "bin 25", "bin 55"]
    for mel_bin in (5, 25, 55):
        time_s, drift = lines[f"bin {mel_bin}"]
        np.testing.assert_allclose(time_s, 0.01 * np.arange(1, len(stream)))
        np.testing.assert_allclose(drift, (means - stream[0])[1:, mel_bin], atol=5e-3)
    before, after = (np.array(line[1]) for line in shown.axes[3]["lines"].values())
    np.testing.assert_allclose(before, (stream - stream[0])[1:501, 5], atol=1e-2)
    np.testing.assert_allclose(after, (stream - means)[1:501, 5], atol=5e-3)


def require_histograms(shown: Shown, rows: list[FeatureRow]) -> None:
    """Require each utterance at its duration, each low-rate frame at the teacher's shares."""
    durations, masses, confidences = (
        {
            round(x + width / 2, 4): height
            for x, width, height in shown.axes[place]["bars"]
            if height
        }
        for place in (4, 6, 7)
    )
    assert durations == {1.21: 1, 1.99: 1}
    logits = np.concatenate(logits_of(rows)).astype(np.float64)
    shares = np.sort(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), axis=1)
    assert sum(masses.values()) == sum(confidences.values()) == len(shares)
    for found, expected in ((masses, shares[:, -20:].sum(axis=1)), (confidences, shares[:, -1])):
        mean = sum(share * count for share, count in found.items()) / len(shares)
        assert mean == pytest.approx(expected.mean(), abs=0.01)


def test_says_when_there_are_no_targets(tmp_path: Path, rows: list[FeatureRow]) -> None:
    """A run before target generation is shown as far as it goes."""
    write_run(tmp_path / "run", rows, [])
    shown = execute(tmp_path / "run")
    assert "no targets yet" in shown.printed
    assert shown.labels() == FEATURE_LABELS
