"""Audio for teachers that hear it: the samples of each low-rate frame, of the right version."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from infra.store.object_store import ObjectStore, StoreError, join_uri
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.kbest import KBest, select_kbest
from pipeline.runs.manifest import Manifest, manifest_uri
from pipeline.runs.names import ALIGNMENT_STEP, UNLABELLED, features_step
from pipeline.settings import Offsets, TargetsConfig
from pipeline.steps import audio_reads
from pipeline.steps.audio_source import AudioSource, audio_frames
from pipeline.steps.targets import TeacherInput, generate_targets, tail_seed
from tests.faults.bad_input.small_runs import ledger
from tests.four_steps import four_steps, rows_of
from tests.small_corpus import flac, local_store, serially, tone, write_versions

SEED = 3
DURATIONS_S = {"ann-DP3": 0.63, "ann-DP1": 0.63, "ann-clean": 0.63, "bob-DP5": 0.6}
"""The utterances, of which ann's are versions of one."""

Run = tuple[ObjectStore, str, str]


class Listener:
    """Listener is a teacher that keeps the frames it hears, by the seed of the request."""

    def __init__(self) -> None:
        self.heard: dict[int, np.ndarray] = {}

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[KBest]:
        for each in inputs:
            assert each.seed not in self.heard
            self.heard[each.seed] = each.frames
            yield select_kbest(each.frames[:, :30].copy(), 4)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Features of the utterances in one shard, and a tree of senones."""
    monkeypatch.setattr(audio_reads, "CONFIRMING_WAITS_S", (0.01, 0.01))
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_versions(store, corpus_uri, DURATIONS_S)
    steps = four_steps(store, run_uri, corpus_uri)
    steps["selection"]()
    steps["features"]()
    tree = Manifest(ALIGNMENT_STEP, {}, {}, ())
    store.put(manifest_uri(run_uri, ALIGNMENT_STEP), tree.to_bytes())
    return store, run_uri, corpus_uri


def generate(
    run: Run, config: TargetsConfig, loss_budget: float = 0.0
) -> tuple[Manifest, Listener]:
    """Label by a teacher of the user's own that hears audio."""
    store, run_uri, corpus_uri = run
    listener, source = Listener(), AudioSource(store, corpus_uri)
    place = store, run_uri, config, listener, serially
    made = generate_targets(*place, models=(), loss_budget=loss_budget, source=source)
    return made.manifest, listener


def samples_of(run: Run, name: str) -> np.ndarray:
    data = run[0].get(join_uri(run[2], f"audio/{name}.flac"))
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_frame_has_the_samples_from_its_first_window_on(offset: int) -> None:
    """Frame t begins with the window of the 10 ms frame `offset` + 3t, and has 480 samples."""
    samples = tone(1, 0.52).astype(np.float32)
    energies = log_mel_energies(samples)
    frames = audio_frames(samples, len(energies), offset)
    assert frames.shape == ((len(energies) - offset) // 3, 480)
    for number, frame in enumerate(frames):
        window = log_mel_energies(frame[:400])
        np.testing.assert_allclose(window[0], energies[offset + 3 * number], atol=1e-4)
    assert len(samples) - offset * 160 - frames.size >= 240


@pytest.mark.parametrize("offsets", ["one", "all"])
def test_the_teacher_hears_the_audio_of_the_features(run: Run, offsets: Offsets) -> None:
    """Of each utterance at each of its offsets, as many frames as it has targets."""
    manifest, listener = generate(run, TargetsConfig(4, 100, SEED, offsets))
    assert manifest.inputs.keys() == {features_step(UNLABELLED), ALIGNMENT_STEP}
    targets, features = (rows_of(*run[:2], step) for step in ("targets", "features"))
    num_frames_of = {row.utterance_id: len(row.features) for row in features}
    assert {row.utterance_id for row in targets} == DURATIONS_S.keys()
    num_heard = 0
    for row in targets:
        samples = samples_of(run, row.utterance_id)
        for offset in range(3) if offsets == "all" else [row.offset]:
            heard = listener.heard[tail_seed(SEED, row.utterance_id, offset)]
            assert len(heard) == (num_frames_of[row.utterance_id] - offset) // 3
            expected = samples[160 * offset : 160 * offset + heard.size]
            np.testing.assert_array_equal(heard.ravel(), expected)
            num_heard += 1
    assert len(listener.heard) == num_heard


def test_the_clearest_versions_audio_is_heard(run: Run) -> None:
    """All of ann's versions have the targets of the clean one's audio, which is fetched once."""
    manifest, listener = generate(run, TargetsConfig(4, 100, SEED, "all", "clearest"))
    assert manifest.statistics["num_heard_elsewhere"] == 2
    heard = {tail_seed(SEED, name, o) for name in ("ann-clean", "bob-DP5") for o in range(3)}
    assert listener.heard.keys() == heard
    np.testing.assert_array_equal(
        listener.heard[tail_seed(SEED, "ann-clean", 0)].ravel(),
        samples_of(run, "ann-clean")[: 480 * 20],
    )


def test_audio_that_changed_or_is_gone_is_a_ledger_row(run: Run) -> None:
    """Targets of other audio would fit no features; the other utterances have theirs."""
    store, _, corpus_uri = run
    for name, number in (("ann-DP1", 9), ("bob-DP5", None)):
        path = Path(corpus_uri, "audio", f"{name}.flac")
        path.unlink()
        if number is not None:
            path.write_bytes(flac(tone(number, DURATIONS_S[name])))
    manifest, listener = generate(run, TargetsConfig(4, 100, SEED), loss_budget=0.9)
    assert len(listener.heard) == 2
    lines = ledger(store, run[1], manifest.ledgers)
    details = {each["utterance_id"]: each["detail"] for each in lines}
    assert {each["reason"] for each in lines} == {"teacher_failed"}
    assert "has changed since its features were extracted" in details.pop("ann-DP1")
    assert "missing_object" in details.pop("bob-DP5")
    assert details == {}
    assert manifest.tally_out.utterances == 2


def test_no_audio_at_all_fails_the_task(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus that is not mounted is no loss of data: nothing is committed."""
    monkeypatch.setattr(audio_reads, "PATIENCE_S", 0.05)
    for path in Path(run[2], "audio").iterdir():
        path.unlink()
    with pytest.raises(StoreError, match="is the audio mounted"):
        generate(run, TargetsConfig(4, 100, SEED), loss_budget=0.9)
    assert not Path(manifest_uri(run[1], "targets/unlabelled")).exists()
