"""Export writes an archive that transcribe reads; both explain what they cannot do."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.names import HELDOUT
from tests.job_programs import RunJob
from tests.small_corpus import tone, wav
from tests.training.export.heard_run import SETTINGS, write_heard_run
from tests.whole_path.processes import TINY

ROOT = Path(__file__).parents[2]
Run = tuple[ObjectStore, str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_heard_run(tmp_path_factory.mktemp("heard"))


@pytest.fixture
def options(run: Run) -> list[str]:
    sets = [part for each in (*SETTINGS, f'corpus.uri="{run[2]}"') for part in ("--set", each)]
    return ["--recipe", str(TINY), "--run", run[1], *sets]


@pytest.fixture
def archive(run_job: RunJob, options: list[str], tmp_path: Path) -> Path:
    path = tmp_path / "student.zip"
    done = run_job("export", *options, "--out", str(path))
    assert done.code == 0, done.err
    return path


@pytest.mark.parametrize("more", [(), ("--int8",)])
def test_export_scores_what_it_wrote(
    run_job: RunJob, options: list[str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The JSON has precision, bytes, and the word errors of all held-out audio."""
    path = tmp_path / "model.zip"
    done = run_job("export", *options, "--out", str(path), "--score", "--json", *more)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["precision"] == ("int8" if more else "float32")
    assert answer["bytes"] == path.stat().st_size
    score = answer["score"]
    assert (score["utterances"], score["refused"], score["reference_words"]) == (6, 0, 14)
    assert score["word_error_rate"] == pytest.approx(100 * score["errors"] / 14)


@pytest.mark.parametrize(
    ("more", "code", "need"),
    [
        (("--model", "teacher", "--out", "x.zip"), 1, "teacher cannot be exported: it is bidirect"),
        (("--model", "parrot", "--out", "x.zip"), 2, "--model parrot: need one of baseline, "),
        (("--out", "/nowhere/x.zip"), 2, "--out /nowhere/x.zip: /nowhere is no folder"),
    ],
)
def test_what_cannot_be_exported_is_explained(
    run_job: RunJob, options: list[str], more: tuple[str, ...], code: int, need: str
) -> None:
    """A bidirectional teacher, an unknown model and a folder that is not there."""
    done = run_job("export", *options, *more)
    assert done.code == code
    assert need in done.err
    assert "Traceback" not in done.err


def test_files_and_pipes_have_the_same_words(
    run_job: RunJob, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A WAV file, the same WAV on standard input, and raw samples end with equal words."""
    samples = tone(3, 1.2)
    file = tmp_path / "said.wav"
    file.write_bytes(wav(samples))
    common = ("--model", str(archive), "--json", "--pause-s", "0")
    finals = []
    for source, data in ((str(file), b""), ("-", file.read_bytes()), ("-", file.read_bytes()[44:])):
        stream = SimpleNamespace(buffer=io.BytesIO(data))
        monkeypatch.setattr(sys, "stdin", stream)
        done = run_job("transcribe", source, *common, "--piece-ms", "40")
        assert done.code == 0, done.err
        *transcripts, cost = map(json.loads, done.out.splitlines())
        finals.append([each["words"] for each in transcripts if each["is_final"]])
        assert cost["audio_s"] == pytest.approx(1.2)
        assert cost["real_time_factor"] > 0
        assert cost["look_ahead_s"] == pytest.approx(0.03)
    assert finals[0] == finals[1] == finals[2]
    assert finals[0]


def test_people_read_words_and_costs(run_job: RunJob, archive: Path, tmp_path: Path) -> None:
    """Final words go to standard output, words so far and costs to standard error."""
    file = tmp_path / "said.wav"
    file.write_bytes(wav(tone(3, 1.2)))
    done = run_job("transcribe", str(file), "--model", str(archive))
    assert done.code == 0
    (final,) = done.out.splitlines()
    assert final.split()[0] == "0.00"
    assert "1.2 s of speech, real-time factor" in done.err
    assert "ms for the look-ahead" in done.err


@pytest.mark.parametrize(
    ("data", "need"),
    [
        (b"", "0.0 s of speech"),
        (b"RIFF\0\0\0\0AVI ", "RIFF without WAVE"),
        (b"fLaC\0\0\0\x22", "a stream that begins with b'fLaC': give the file's name"),
        (b".snd\0\0\0\x18", "an AU file: convert it"),
        (b"\0\0\0\x1cftypM4A ", "an MP4 file: convert it"),
        (wav(tone(1, 0.1))[:30], "a WAV format of 10 bytes: need 16"),
        (wav(tone(1, 0.1))[:24] + b"\x40\x1f\0\0" + wav(tone(1, 0.1))[28:], "8000 Hz: need 16 kHz"),
        (wav(tone(1, 0.1))[:22] + b"\2\0" + wav(tone(1, 0.1))[24:], "2 channels: need 16 kHz"),
    ],
)
def test_streams_of_another_form_are_refused(
    run_job: RunJob, archive: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, need: str
) -> None:
    """The message says what to record with; an empty stream has no words, and is no error."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    done = run_job("transcribe", "-", "--model", str(archive))
    assert done.code == (1 if data else 0)
    assert need in done.err
    assert "Traceback" not in done.err


def test_a_closed_standard_input_is_named(
    run_job: RunJob, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a service without one."""
    monkeypatch.setattr(sys, "stdin", None)
    done = run_job("transcribe", "-", "--model", str(archive))
    assert (done.code, "standard input is closed" in done.err) == (2, True)


def test_bad_usage_of_transcribe_is_explained(
    run_job: RunJob, archive: Path, tmp_path: Path
) -> None:
    """A missing file, a file that is no archive, and a piece of no time."""
    none = run_job("transcribe", str(tmp_path / "none.wav"), "--model", str(archive))
    assert (none.code, "none.wav" in none.err) == (1, True)
    other = run_job("transcribe", "-", "--model", str(TINY))
    assert (other.code, "need an archive of megahour export" in other.err) == (2, True)
    piece = run_job("transcribe", "-", "--model", str(archive), "--piece-ms", "0")
    assert (piece.code, "0: need 10..60000" in piece.err.replace(",", "")) == (2, True)


def test_a_microphone_without_its_package_has_a_remedy(
    run_job: RunJob, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sounddevice the message names it, and the pipe that needs no package."""
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    done = run_job("transcribe", "MIC", "--model", str(archive))
    assert done.code == 2
    assert "pip install sounddevice, or pipe: arecord -f S16_LE -r 16000 -c 1 |" in done.err


@pytest.mark.parametrize("form", ["kaldi", "shar"])
def test_shards_are_exported_once(
    run_job: RunJob, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The held-out subset has features; a folder with files is refused, and named.

    Where standard error is no terminal, progress is lines.
    """
    folder = str(tmp_path / "out")
    more = ("--subset", HELDOUT, "--format", form, "--out", folder, "--json")
    monkeypatch.setattr("infra.log_lines.PROGRESS_INTERVAL_S", 0.0)
    done = run_job("export_shards", *options, *more)
    assert done.code == 0, done.err
    assert re.search(rf"Z export_shards: export features/{HELDOUT}: (\d) of \1 shards,", done.err)
    answer = json.loads(done.out)
    assert (answer["source"], answer["utterances"]) == (f"features/{HELDOUT}", 6)
    again = run_job("export_shards", *options, *more)
    assert again.code == 2
    assert f"--out {folder}: has files already" in again.err
