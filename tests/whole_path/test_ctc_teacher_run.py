"""A CTC recognizer labels a run: trained here in seconds, mapped to senones, asked by a server.

The jobs run in this process, and their Spark tasks in a plain loop; the teacher's server is real.
"""

import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.kbest import select_kbest
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import TARGETS_FOLDER, UNLABELLED, features_step
from pipeline.shards import FeatureRow, TargetRow, read_features, read_targets
from pipeline.splicing import low_rate_alignment
from tests.job_programs import RunJob
from tests.small_corpus import plain_loop
from tests.whole_path.processes import TINY
from tests.whole_path.test_own_teacher_run import samples_by_id, write_kaldi_dir
from training.align.labelled import read_tree
from training.align.network_alignment import network_alignments
from training.decode.lexicon import parse_lexicon
from training.models.store import load_model
from training.settings.recipe import read_recipe
from training.targets.ctc_teacher import SenoneMap, at_low_rate, estimate

SIZES = {"labelled": (6, 16), "unlabelled": (2, 4), "heldout": (1, 3)}
NUM_EPOCHS = 20
FRAME_MS = 40.0
SAMPLES = 640
TOKENS = ("-", "see", "a", "ca", "b", "s", "bee", "sa", "ke")
PIECES = {
    "see": ("see",),
    "a": ("a",),
    "cab": ("ca", "b"),
    "cabs": ("ca", "b", "s"),
    "bee": ("bee",),
    "be": ("bee",),
    "sake": ("sa", "ke"),
}
"""The subwords of the corpus's words, by sound."""

MODULE = """
    from tests.whole_path.test_ctc_teacher_run import load_ctc

    def tones(device):
        return load_ctc({weights!r}, device)
"""


class Ctc(nn.Module):
    """Spectra of 40 ms in 80 bands, a bidirectional LSTM, tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(80, 48, bidirectional=True, batch_first=True)
        self.output = nn.Linear(96, len(TOKENS))

    def forward(self, samples: Tensor) -> Tensor:
        count = len(samples) // SAMPLES
        windows = samples[: count * SAMPLES].view(count, SAMPLES) * torch.hann_window(SAMPLES)
        bands = torch.fft.rfft(windows).abs()[:, 1:].view(count, 80, 4).mean(dim=2)
        hidden, _ = self.recurrent((bands + 0.1).log()[None])
        return self.output(hidden)[0]


def load_ctc(weights: str, device: torch.device):
    """What a user's module does: a function of utterances."""
    model = Ctc()
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.to(device).eval()
    return lambda utterances: [model(samples) for samples in utterances]


def train_ctc(texts: Mapping[str, str], samples: Mapping[str, np.ndarray], weights: Path) -> None:
    """Train on the labelled speakers' audio and words, by torch's own loss."""
    torch.manual_seed(0)
    model = Ctc()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    names = sorted(name for name in texts if name.startswith("labelled"))
    for _ in range(NUM_EPOCHS):
        for number in torch.randperm(len(names)).split(8):
            loss = torch.stack(
                [ctc_loss(model, texts[names[i]], samples[names[i]]) for i in number]
            )
            optimizer.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.save(model.state_dict(), weights)


def ctc_loss(model: Ctc, text: str, samples: np.ndarray) -> Tensor:
    said = [TOKENS.index(piece) for word in text.split() for piece in PIECES[word]]
    found = model(torch.from_numpy(samples)).log_softmax(dim=-1)
    lengths = torch.tensor([len(found)]), torch.tensor([len(said)])
    return functional.ctc_loss(found[:, None], torch.tensor([said]), *lengths)


def texts_of(kaldi_dir: Path) -> dict[str, str]:
    lines = (kaldi_dir / "text").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def unlabelled_features(store: ObjectStore, run_uri: str) -> list[FeatureRow]:
    outputs = read_manifest(store, run_uri, features_step(UNLABELLED)).outputs
    return [row for each in outputs for row in read_features(read_output(store, run_uri, each))]


def targets_of(store: ObjectStore, run_uri: str) -> dict[str, TargetRow]:
    outputs = read_manifest(store, run_uri, f"{TARGETS_FOLDER}/{UNLABELLED}").outputs
    rows = [row for each in outputs for row in read_targets(read_output(store, run_uri, each))]
    return {row.utterance_id: row for row in rows}


def share_right(store: ObjectStore, run_uri: str, kaldi_dir: Path, overrides: list[str]) -> float:
    """How often the best target is the senone of the aligner, which is told what was said."""
    recipe = read_recipe(str(TINY), overrides)
    texts = texts_of(kaldi_dir)
    rows = [
        replace(row, text=texts[row.utterance_id]) for row in unlabelled_features(store, run_uri)
    ]
    aligner = load_model(store, run_uri, "aligner", recipe.models.of("aligner"))
    lexicon = parse_lexicon((kaldi_dir / "lexicon.txt").read_text())
    tree = read_tree(store, run_uri)
    truth = network_alignments(rows, aligner, lexicon, tree, recipe.evaluation.acoustic_scale)
    right = frames = 0
    for name, row in targets_of(store, run_uri).items():
        senones = low_rate_alignment(truth[name], row.offset)
        right += int((row.kbest.senones[:, 0] == senones).sum())
        frames += len(senones)
    return right / frames


@torch.no_grad()
def require_targets_of_map(
    targets: Mapping[str, TargetRow], samples: Mapping[str, np.ndarray], folder: Path
) -> None:
    """Each frame's k best are those of the stored map, of what the model hears from the offset."""
    model = load_ctc(str(folder / "ctc.pt"), torch.device("cpu"))
    loaded = SenoneMap.from_bytes((folder / "map.npz").read_bytes())
    assert len(targets) == 8
    for name, row in targets.items():
        num_frames = len(row.kbest.log_z)
        heard = torch.from_numpy(samples[name][160 * row.offset :][: 480 * num_frames])
        posteriors = at_low_rate(model([heard])[0].softmax(dim=1), num_frames, FRAME_MS)
        expected = select_kbest(loaded.logits(posteriors).numpy(), 8)
        assert (row.kbest.senones == expected.senones).mean() > 0.99
        np.testing.assert_allclose(row.kbest.log_z, expected.log_z, atol=4e-3)


def test_a_ctc_recognizer_labels_the_unlabelled_speech(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets are the map's k best of its posteriors, and far better than the commonest senone."""
    kaldi_dir, run_uri = write_kaldi_dir(tmp_path / "kaldi", SIZES), str(tmp_path / "run")
    train_ctc(texts_of(kaldi_dir), samples_by_id(kaldi_dir), tmp_path / "ctc.pt")
    source = textwrap.dedent(MODULE).format(weights=str(tmp_path / "ctc.pt"))
    (tmp_path / "my_ctc.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    map_file = tmp_path / "map.npz"
    overrides = [
        *(
            "bootstrap.num_iterations=12",
            "aligner.num_epochs=8",
            "alignment.rounds=1",
            "bootstrap.max_hours=0",
        ),
        "student.trainer={name = 'synchronous'}",
        "teacher.trainer={name = 'synchronous'}",
        "targets.teacher.factory='training.targets.ctc_teacher:ctc_teacher'",
        "targets.teacher.settings.posteriors='my_ctc:tones'",
        f"targets.teacher.settings.senone_map='{map_file}'",
        f"targets.teacher.settings.frame_ms={FRAME_MS}",
    ]
    options = ("--recipe", str(TINY), "--run", run_uri, "--json")
    options += tuple(part for each in overrides for part in ("--set", each))

    def job(name: str, *more: str) -> dict:
        said = run_job(name, *options, *more)
        assert said.code == 0, f"{name}: {said.err}"
        return json.loads(said.out)

    job("ingest", "--kaldi-dir", str(kaldi_dir))
    aligned = "bootstrap", *("train_aligner", "realign") * 2
    for name in ("select_utterances", "extract_features", *aligned):
        job(name)
    fit = estimate(str(TINY), run_uri, overrides=overrides)[str(map_file)]
    assert fit.prior_accuracy < 0.25
    assert fit.frame_accuracy > 0.65
    job("generate_targets")
    store = ObjectStore((run_uri,))
    require_targets_of_map(targets_of(store, run_uri), samples_by_id(kaldi_dir), tmp_path)
    # The aligner's silence alone is a fifth, and the labels hear no transcript.
    assert share_right(store, run_uri, kaldi_dir, overrides) > 0.65
