"""Synthesize speech with espeak-ng, by ctypes: 16 kHz samples with the times of their phones.

espeak-ng's English mnemonics are mapped to 45 phones with ASCII names. The packages of the `demo`
extra are imported here, only to synthesize speech or simulate placements.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import Float32
from scipy.signal import firwin, resample_poly

from infra.extras import how_to_install
from pipeline.filterbank import SAMPLE_RATE_HZ


def import_espeakng_loader() -> ModuleType:
    """Import the loader of espeak-ng's library, or raise ImportError with a remedy."""
    return _import("espeakng_loader")


def import_pyroomacoustics() -> ModuleType:
    """Import the room simulator and hold it to one thread, or raise ImportError with a remedy."""
    simulator = _import("pyroomacoustics")
    # Its threads' partial sums would make the last bits depend on the number of cores.
    simulator.constants.set("num_threads", 1)
    return simulator


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        needed = "the synthetic corpus and simulated placements need it"
        raise ImportError(f"{name}: {needed}: {how_to_install(['demo'])}") from error


SILENCE = "SIL"

# Rhotic and centring vowels (AR OR EHR IHR) stay single phones, as espeak-ng sounds them as one.
_MNEMONICS = {
    SILENCE: "_ _: _! _|",
    "AA": "A: 0 O2 A~",
    "AE": "a aa",
    "AH": "V",
    "AO": "O: O",
    "AR": "A@",
    "AW": "aU",
    "AX": "@ @- @2 @5 a#",
    "AY": "aI aI2 aI@ aI3",
    "B": "b",
    "CH": "tS",
    "D": "d d#",
    "DH": "D",
    "EH": "E E2 e",
    "EHR": "e@",
    "ER": "3: 3 VR IR",
    "EY": "eI",
    "F": "f",
    "G": "g",
    "HH": "h",
    "IH": "I I2 I#",
    "IHR": "i@ i@3",
    "IY": "i: i i2",
    "JH": "dZ",
    "K": "k x",
    "L": "l l# @L",
    "M": "m m-",
    "N": "n n-",
    "NG": "N",
    "OR": "O@ o@ U@",
    "OW": "oU",
    "OY": "OI",
    "P": "p",
    "R": "r r-",
    "S": "s",
    "SH": "S",
    "T": "t t2 t# t[ ?",
    "TH": "T",
    "UH": "U",
    "UW": "u: u",
    "V": "v",
    "W": "w w#",
    "Y": "j",
    "Z": "z z#",
    "ZH": "Z",
}
PHONES = tuple(_MNEMONICS)
_NAMES = {mnemonic: name for name, some in _MNEMONICS.items() for mnemonic in some.split()}
_STRESS_MARKS = str.maketrans("", "", "',%=;")


def phone_name(mnemonic: str) -> str | None:
    """Name the phone of an espeak-ng mnemonic; None if it is only a stress or palatal mark.

    Raises ValueError for a mnemonic that the inventory lacks.
    """
    bare = mnemonic.translate(_STRESS_MARKS)
    if bare and bare not in _NAMES:
        raise ValueError(f"espeak-ng phoneme {mnemonic!r}: not in jobs/synthesis/speech.py, add it")
    return _NAMES.get(bare)


_ESPEAK_RATE_HZ = 22_050
_UP, _DOWN = 320, 441

# Values of espeak-ng's speak_lib.h.
_OUTPUT_SYNCHRONOUS = 2
_PHONEME_EVENTS = 1
_DONT_EXIT = 0x8000
_PHONEME_EVENT = 7
_RATE, _PITCH, _PITCH_RANGE = 1, 3, 4
_UTF8 = 1
_PHONEME_SEPARATOR = "|"


class _EventId(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    ]


_Samples = ctypes.POINTER(ctypes.c_short)
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, _Samples, ctypes.c_int, ctypes.POINTER(_Event))
# Kaiser window over ten zero crossings a side, as resample_poly's own, made once and in float32.
_LOW_PASS = firwin(20 * _DOWN + 1, 1 / _DOWN, window=("kaiser", 5.0)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PhoneSegment:
    """PhoneSegment is a phone with its times; a stop starts at its burst, as in espeak-ng."""

    phone: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Speech:
    """Speech holds 16 kHz samples in [-1, 1] and the phones that cover them without gaps."""

    samples: Float32[np.ndarray, " samples"]
    phones: tuple[PhoneSegment, ...]

    def padded(self, before_s: float, after_s: float) -> "Speech":
        """Add silence before and after the speech."""
        before, after = round(before_s * SAMPLE_RATE_HZ), round(after_s * SAMPLE_RATE_HZ)
        shift_s, num_samples = before / SAMPLE_RATE_HZ, before + len(self.samples) + after
        shifted = [(phone.phone, phone.start_s + shift_s) for phone in self.phones]
        starts = [(SILENCE, 0.0), *shifted, (SILENCE, shift_s + self.phones[-1].end_s)]
        end_s = num_samples / SAMPLE_RATE_HZ
        return Speech(np.pad(self.samples, (before, after)), cover(starts, end_s))


class SpeechSynthesizer:
    """SpeechSynthesizer is espeak-ng in this process, which has one voice and one state a process.

    Flutter and noise continue from utterance to utterance. The same bytes therefore come only from
    the same utterances, in the same order, since the process began.
    """

    def __init__(self) -> None:
        loader = import_espeakng_loader()
        self._library = ctypes.CDLL(loader.get_library_path())
        # espeak-ng looks for the folder espeak-ng-data below this path.
        parent = str(Path(loader.get_data_path()).parent).encode()
        flags = _PHONEME_EVENTS | _DONT_EXIT
        rate_hz = self._library.espeak_Initialize(_OUTPUT_SYNCHRONOUS, 0, parent, flags)
        if rate_hz != _ESPEAK_RATE_HZ:
            remedy = "reinstall espeakng-loader"
            raise RuntimeError(f"espeak-ng answers {rate_hz}, need {_ESPEAK_RATE_HZ} Hz: {remedy}")
        # No seed resets the flutter: 85 of 104 variants gave other samples in another order.
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._callback = _Callback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)
        self._blocks: list[np.ndarray] = []
        self._events: list[tuple[int, str]] = []

    def select_voice(
        self, voice: str, pitch: int = 50, rate_wpm: int = 175, pitch_range: int = 50
    ) -> None:
        """Speak from now on as `voice` (accent+variant); pitch and its range are 0..100."""
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"voice = {voice!r}: espeak-ng has no such voice")
        for parameter, value in ((_PITCH, pitch), (_RATE, rate_wpm), (_PITCH_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)

    def speak(self, text: str) -> Speech:
        """Synthesize a sentence at 16 kHz."""
        self._blocks, self._events = [], []
        data = text.encode() + b"\0"
        self._library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        integers = np.concatenate(self._blocks)
        # The ratio 320 / 441 takes 22,050 Hz to 16 kHz.
        samples = resample_poly(integers.astype(np.float32) / 32768, _UP, _DOWN, window=_LOW_PASS)
        return Speech(samples, self._segments(len(integers)))

    def pronounce(self, text: str) -> list[tuple[str, ...]]:
        """Return the phones of each word in this sentence; words that espeak-ng joins are one."""
        remaining = ctypes.c_char_p(text.encode())
        mode, words = ord(_PHONEME_SEPARATOR) << 8, []
        while remaining.value:
            clause = self._library.espeak_TextToPhonemes(ctypes.byref(remaining), _UTF8, mode)
            words += clause.decode().split()
        names = [map(phone_name, word.split(_PHONEME_SEPARATOR)) for word in words]
        return [tuple(name for name in word if name and name != SILENCE) for word in names]

    def _collect(self, samples: "ctypes._Pointer[ctypes.c_short]", num: int, events: object) -> int:
        if num > 0 and samples:
            self._blocks.append(np.ctypeslib.as_array(samples, (num,)).copy())
        index = 0
        while (event := events[index]).type != 0:  # type: ignore[index]
            if event.type == _PHONEME_EVENT:
                mnemonic = ctypes.string_at(ctypes.addressof(event) + _Event.id.offset, 8)
                self._events.append((event.sample, mnemonic.split(b"\0")[0].decode()))
            index += 1
        return 0

    def _segments(self, num_samples: int) -> tuple[PhoneSegment, ...]:
        named = [(phone_name(mnemonic), sample) for sample, mnemonic in self._events]
        starts = [(phone, sample / _ESPEAK_RATE_HZ) for phone, sample in named if phone]
        return cover([(SILENCE, 0.0), *starts], num_samples / _ESPEAK_RATE_HZ)


def cover(starts: Sequence[tuple[str, float]], end_s: float) -> tuple[PhoneSegment, ...]:
    """Make segments from their starts up to `end_s`; drop empty ones, join adjacent silences."""
    ends_s = [start_s for _, start_s in starts[1:]] + [end_s]
    segments: list[PhoneSegment] = []
    for (phone, start_s), stop_s in zip(starts, ends_s, strict=True):
        if min(stop_s, end_s) <= start_s:
            continue
        segment = PhoneSegment(phone, start_s, min(stop_s, end_s))
        if segments and phone == SILENCE == segments[-1].phone:
            segment = replace(segments.pop(), end_s=segment.end_s)
        segments.append(segment)
    return tuple(segments)
