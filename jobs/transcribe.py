"""Transcribe files, standard input or a microphone as speech arrives.

arecord -f S16_LE -r 16000 -c 1 | megahour transcribe - --model student.zip
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from jaxtyping import Float32

from infra.settings import ConfigurationError, Range, printable
from jobs.cli.arguments import Parser, number_in
from pipeline.audio.decode import decode_audio
from pipeline.audio.errors import AudioError
from pipeline.audio.wav import pcm_pieces, samples_of
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.settings import RATES_HZ, AudioConversion

STANDARD_INPUT, MICROPHONE = "-", "MIC"
PIECE_MS, PAUSE_S = Range(10, 60_000), Range(0.03, 60, zero="none")
PIPE = "arecord -f S16_LE -r 16000 -c 1 | megahour transcribe - ..."
LIVE_PAUSE_S = 1.0
"""A stream without end is cut into utterances at pauses of a second; a file is one utterance."""

_ANY_FORM = AudioConversion(RATES_HZ, "mean")

Samples = Float32[np.ndarray, " samples"]


def main() -> None:
    """Parse the command line and transcribe; exit with 0, 1, 2 or 130."""
    arguments = transcribe_arguments()
    try:
        transcribe(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ConfigurationError, ImportError, AudioError, OSError, ValueError) as error:
        print(f"transcribe: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ConfigurationError | ImportError) else 1)
    sys.exit(0)


def transcribe(arguments: argparse.Namespace) -> None:
    """Print words as they are recognized, and at the end what they cost."""
    # After the command line: --help needs no extra.
    from training.export.archive import read_archive  # noqa: PLC0415
    from training.export.recognizer import ROW_S, Recognizer, StreamingModel  # noqa: PLC0415

    exported = read_archive(Path(arguments.model))
    is_file = arguments.source not in (STANDARD_INPUT, MICROPHONE)
    pause_s = arguments.pause_s
    if pause_s is None:
        pause_s = 0.0 if is_file else LIVE_PAUSE_S
    recognizer = Recognizer(exported, StreamingModel(exported.network), pause_s)
    printer = Printer(arguments.json)
    audio_s = 0.0
    seconds: list[float] = []  # of each piece, from its last sample to its words
    piece_s = arguments.piece_ms / 1000
    if pause_s:  # one within a piece would go unnoticed
        piece_s = min(piece_s, max(pause_s / 3, ROW_S))
    for samples in pieces(arguments.source, round(piece_s * SAMPLE_RATE_HZ)):
        started = time.perf_counter()
        printer.show(recognizer.accept(samples))
        seconds.append(time.perf_counter() - started)
        audio_s += len(samples) / SAMPLE_RATE_HZ
    started = time.perf_counter()
    printer.show(recognizer.finish())
    seconds.append(time.perf_counter() - started)
    cost = {
        "audio_s": round(audio_s, 3),
        "real_time_factor": sum(seconds) / audio_s if audio_s else 0.0,
        "latency_median_s": float(np.median(seconds)),
        "latency_95_s": float(np.quantile(seconds, 0.95)),
        "look_ahead_s": exported.settings.delay * ROW_S,
    }
    printer.end(cost)


def pieces(source: str, piece_samples: int) -> Iterator[Samples]:
    """Yield 16 kHz mono samples of a source, piece by piece."""
    if source == STANDARD_INPUT:
        if sys.stdin is None:
            raise ConfigurationError(f"standard input is closed: pipe audio: {PIPE}")
        # What another program writes, to its end, which Ctrl-C makes too where it records.
        with first_interrupt():
            yield from pcm_pieces(sys.stdin.buffer, piece_samples)
    elif source == MICROPHONE:
        yield from microphone_pieces(piece_samples)
    else:
        samples = decode_audio(Path(source).read_bytes(), _ANY_FORM)
        for first in range(0, len(samples), piece_samples):
            yield samples[first : first + piece_samples]


def microphone_pieces(piece_samples: int) -> Iterator[Samples]:
    """Yield what the default microphone records, until Ctrl-C."""
    try:
        sounddevice = import_module("sounddevice")
    except (ImportError, OSError) as error:  # OSError where PortAudio is missing
        raise ConfigurationError(
            f"MIC needs sounddevice and PortAudio ({printable(str(error))}): pip install "
            f"sounddevice, or pipe: {PIPE}"
        ) from error
    form: dict[str, Any] = {"samplerate": SAMPLE_RATE_HZ, "channels": 1, "dtype": "int16"}
    try:
        with first_interrupt() as interrupted, sounddevice.RawInputStream(**form) as stream:
            has_lost = False
            while not interrupted.is_set():
                data, is_late = stream.read(piece_samples)
                if is_late and not has_lost:
                    print("transcribe: too slow: samples are lost", file=sys.stderr, flush=True)
                has_lost |= is_late
                yield samples_of(bytes(data))
    except sounddevice.PortAudioError as error:
        raise ConfigurationError(
            f"MIC: {printable(str(error))}: choose an input that records at 16 kHz as your "
            f"system's default, of those that python -m sounddevice lists, or pipe: {PIPE}"
        ) from error


@contextmanager
def first_interrupt() -> Iterator[Event]:
    """Set an event at the first Ctrl-C, so that a live stream's last words are still printed."""
    interrupted = Event()

    def set_once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupted.set()

    before = signal.signal(signal.SIGINT, set_once)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Printer:
    """Printer writes final words to standard output, and words so far to standard error.

    With `as_json` both are lines of JSON on standard output.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: Sequence[str] = ()

    def show(self, transcript: Any) -> None:  # noqa: ANN401 - a Transcript, whose module needs ONNX
        """Print words that changed, or that are final."""
        is_news = transcript.words != self._shown or (transcript.is_final and transcript.words)
        self._shown = () if transcript.is_final else transcript.words
        if not is_news:
            return
        if self._as_json:
            print(json.dumps(asdict(transcript)), flush=True)
            return
        place = f"{transcript.start_s:8.2f} {transcript.end_s:8.2f}"
        stream = sys.stdout if transcript.is_final else sys.stderr
        mark = "" if transcript.is_final else "... "
        print(f"{place}  {mark}{' '.join(transcript.words)}", file=stream, flush=True)

    def end(self, cost: dict[str, float]) -> None:
        """Print the costs of the whole stream."""
        if self._as_json:
            print(json.dumps({"step": "transcribe", **cost}), flush=True)
            return
        print(
            f"{cost['audio_s']:.1f} s of speech, real-time factor "
            f"{cost['real_time_factor']:.3f}; from a piece's last sample to its words "
            f"{1000 * cost['latency_median_s']:.1f} ms (median), "
            f"{1000 * cost['latency_95_s']:.1f} ms (95 %); words wait "
            f"{1000 * cost['look_ahead_s']:.0f} ms for the look-ahead",
            file=sys.stderr,
            flush=True,
        )


def transcribe_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog="megahour transcribe",
        description="Recognize speech as it arrives, on one core, with a model of megahour export. "
        "Final words go to standard output with their start and end in seconds, words so far to "
        "standard error. At the end it prints latency and real-time factor. Ctrl-C ends a "
        "microphone's stream; given again, it interrupts.",
        epilog="Exit codes: 0 done, 1 bad audio or failed, 2 bad usage, model or microphone, 130 "
        "interrupted.",
    )
    add = parser.add_argument
    text = "audio file; - is standard input, raw 16 kHz 16-bit mono PCM or WAV; MIC the microphone"
    add("source", metavar="FILE|-|MIC", help=text)
    add("--model", required=True, metavar="FILE", help="archive of megahour export")
    text = f"length of the pieces in which audio is read, {PIECE_MS.need}; default 300"
    add("--piece-ms", type=number_in(PIECE_MS), default=300, metavar="MS", help=text)
    text = (
        f"pause that ends an utterance, {PAUSE_S.need}; default 0 for files, else {LIVE_PAUSE_S:g}"
    )
    add("--pause-s", type=number_in(PAUSE_S), metavar="SECONDS", help=text)
    add("--json", action="store_true", help="print all as lines of JSON on standard output")
    return parser.parse_args()


if __name__ == "__main__":
    main()
