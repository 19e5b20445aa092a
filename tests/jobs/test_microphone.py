"""Live speech is heard until Ctrl-C: from a pipe, and by sounddevice and PortAudio.

ALSA plays the part of the device: its default input reads a file of samples, as fast as it is read.
"""

import ctypes.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.test_export import archive, options, run
from tests.small_corpus import SAMPLE_RATE, tone

__all__ = ["archive", "options", "run"]

LACKS_PORTAUDIO = ctypes.util.find_library("portaudio") is None
needs_portaudio = pytest.mark.skipif(LACKS_PORTAUDIO, reason="tests/install_packages.sh")

ROOT = Path(__file__).parents[2]
DEVICE = """\
pcm.default {{ type file; slave.pcm {{ type null }}; file /dev/null; infile "{}"; format raw }}
"""
NO_DEVICE = "pcm.none { type hw; card 99 }\n"
SILENCE_S = 3600


def pcm(samples: np.ndarray) -> bytes:
    return np.round(samples * 32767).astype("<i2").tobytes()


def transcribing(source: str, archive: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and its environment."""
    program = str(ROOT / "jobs" / "transcribe.py")
    command = [sys.executable, program, source, "--model", str(archive), "--json"]
    return command, {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def listening(archive: Path, devices: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Transcribe what the default input hears, where ALSA has these devices alone."""
    configuration = archive.with_name("alsa.conf")
    configuration.write_text(devices)
    with started("MIC", archive, ALSA_CONFIG_PATH=str(configuration)) as process:
        yield process


@contextmanager
def started(source: str, archive: Path, **variables: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the program, and kill it at the end."""
    command, environment = transcribing(source, archive)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env={**environment, **variables}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_interrupted_pipe_is_heard_to_its_end(archive: Path) -> None:
    """Ctrl-C ends the recorder; its reader prints the words that are left, and the costs."""
    with started("-", archive) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pcm(tone(3, 1.2)) + bytes(2 * 2 * SAMPLE_RATE))
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdin.write(pcm(tone(3, 1.2)))
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait() == 0, rest
    *transcripts, cost = map(json.loads, rest.splitlines())
    assert transcripts[-1]["is_final"]
    assert cost["audio_s"] == pytest.approx(4.4)


@pytest.mark.cluster
@needs_portaudio
def test_a_microphone_is_heard_until_it_is_interrupted(archive: Path, tmp_path: Path) -> None:
    """Then its words are those of the same samples from a pipe, and the costs are printed."""
    speech = tmp_path / "speech.raw"
    speech.write_bytes(pcm(tone(3, 1.2)))
    os.truncate(speech, 2 * SILENCE_S * SAMPLE_RATE)  # a hole, which takes no room
    with listening(archive, DEVICE.format(speech)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        *heard, cost = map(json.loads, [first, *process.stdout])
        assert process.wait() == 0
    assert heard[-1]["is_final"]
    assert heard[-1]["words"]
    assert 0 < cost["audio_s"] < SILENCE_S

    with speech.open("rb") as file:
        data = file.read(2 * round(cost["audio_s"] * SAMPLE_RATE))
    command, environment = transcribing("-", archive)
    piped = subprocess.run(command, input=data, capture_output=True, check=True, env=environment)
    assert heard == [*map(json.loads, piped.stdout.splitlines())][:-1]


@pytest.mark.cluster
@needs_portaudio
def test_no_microphone_has_a_remedy(archive: Path) -> None:
    """The message says how to choose an input where ALSA has none; the exit code is 2."""
    with listening(archive, NO_DEVICE) as process:
        said = process.communicate()[1].decode()
    assert process.returncode == 2, said
    assert "transcribe: MIC: " in said
    assert "or pipe: arecord -f S16_LE -r 16000 -c 1 |" in said
    assert "Traceback" not in said
