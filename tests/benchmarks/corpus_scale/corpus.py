"""Write a corpus of tiny utterances: segments of recordings, members of tars, or files.

Audio is a small pool under many names, so that disks hold a million utterances. Every name is an
object of its own to the store, which knows no links.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jobs.planning.measurement import speech_like
from tests.small_corpus import SAMPLE_RATE, flac, wav
from tests.training.decode.toy_language import LEXICON_TXT
from tests.whole_path.test_own_teacher_run import SENTENCES, spoken

Form = Literal["segments", "members", "files"]

UTTERANCES_A_RECORDING = 50
"""All of one speaker."""
NUM_IN_POOL = 16
RECORDS_AN_OBJECT = 100_000
TRANSCRIBED = {"labelled": (3, 10), "heldout": (1, 3)}
"""Speakers and utterances of each, however large the corpus is."""
NUM_DAYS = 7

DURATIONS_S = tuple(0.2 + 0.02 * number for number in range(11))
MEAN_S = sum(DURATIONS_S) / len(DURATIONS_S)


@dataclass(frozen=True)
class Recording:
    """Recording is an object of the pool, with where its utterances lie in it."""

    path: Path
    parts: tuple[dict[str, Any], ...]


def write_corpus(folder: Path, num_utterances: int, form: Form) -> None:
    """Write manifests of the three subsets, and their audio, below `folder`."""
    (folder / "audio").mkdir(parents=True)
    (folder / "lexicon.txt").write_text(LEXICON_TXT)
    for subset, sizes in TRANSCRIBED.items():
        write_manifest(folder / f"{subset}.jsonl", transcribed(folder, subset, *sizes))
    pool = make_pool(folder / "pool", form)
    found = untranscribed(folder, num_utterances, pool)
    (folder / "unlabelled").mkdir()
    for number in range(-(-num_utterances // RECORDS_AN_OBJECT)):
        path = folder / "unlabelled" / f"part-{number:05d}.jsonl"
        write_manifest(path, islice(found, RECORDS_AN_OBJECT))


def write_manifest(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def transcribed(
    folder: Path, subset: str, num_speakers: int, num_each: int
) -> Iterator[dict[str, Any]]:
    """Write the audio of a few sentences, and yield their records."""
    for speaker in range(num_speakers):
        for number in range(num_each):
            text = SENTENCES[(number + speaker) % len(SENTENCES)]
            samples = spoken(text, 100 * speaker + number)
            name = f"{subset}-{speaker}-{number}"
            (folder / "audio" / f"{name}.flac").write_bytes(flac(samples))
            yield {
                **common(name, f"{subset}-{speaker}", number),
                "duration_s": len(samples) / SAMPLE_RATE,
                "audio_uri": str(folder / "audio" / f"{name}.flac"),
                "text": text,
            }


def common(name: str, speaker: str, number: int, day: int = 1) -> dict[str, Any]:
    created_at = f"2026-01-{day:02d}T12:00:{number:02d}+00:00"
    return {
        "utterance_id": name,
        "speaker_id": speaker,
        "created_at": created_at,
        "locale": "en-US",
    }


def make_pool(folder: Path, form: Form) -> list[Recording]:
    """Write the objects that all names share."""
    folder.mkdir()
    durations = [DURATIONS_S[each % len(DURATIONS_S)] for each in range(UTTERANCES_A_RECORDING)]
    if form == "files":
        return [file_of(folder, number) for number in range(NUM_IN_POOL * len(DURATIONS_S))]
    make = tar_of if form == "members" else wav_of
    return [make(folder, number, durations) for number in range(NUM_IN_POOL)]


def file_of(folder: Path, number: int) -> Recording:
    duration_s = DURATIONS_S[number % len(DURATIONS_S)]
    path = folder / f"{number}.flac"
    path.write_bytes(flac(speech_like(number, duration_s)))
    return Recording(path, ({"duration_s": duration_s},))


def wav_of(folder: Path, number: int, durations: list[float]) -> Recording:
    path = folder / f"{number}.wav"
    path.write_bytes(wav(speech_like(number, sum(durations))))
    starts = np.cumsum([0.0, *durations[:-1]]).round(6).tolist()
    parts = [
        {"duration_s": each, "start_s": start}
        for each, start in zip(durations, starts, strict=True)
    ]
    return Recording(path, tuple(parts))


def tar_of(folder: Path, number: int, durations: list[float]) -> Recording:
    path, parts = folder / f"{number}.tar", []
    with tarfile.open(path, "w") as archive:
        for place, duration_s in enumerate(durations):
            data = flac(speech_like(1000 * number + place, duration_s))
            member = tarfile.TarInfo(f"{place}.flac")
            member.size = len(data)
            begin = archive.offset + tarfile.BLOCKSIZE
            archive.addfile(member, io.BytesIO(data))
            part = {"duration_s": duration_s, "member_offset": begin, "member_bytes": len(data)}
            parts.append(part)
    return Recording(path, tuple(parts))


def untranscribed(
    folder: Path, num_utterances: int, pool: list[Recording]
) -> Iterator[dict[str, Any]]:
    """Yield the records of so many utterances; their speakers have days of their own."""
    named = islice(linked_parts(folder, pool), num_utterances)
    for number, (path, part) in enumerate(named):
        speaker, of_speaker = divmod(number, UTTERANCES_A_RECORDING)
        day = 1 + speaker % NUM_DAYS
        found = common(f"utt-{number:09d}", f"spk-{speaker:07d}", of_speaker, day)
        yield {**found, **part, "audio_uri": str(path)}


def linked_parts(folder: Path, pool: list[Recording]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give the pool's objects one name after another, without end; yield their utterances."""
    for number, recording in enumerate(cycle(pool)):
        path = folder / "audio" / f"{number // 1000:05d}" / f"{number:09d}{recording.path.suffix}"
        path.parent.mkdir(exist_ok=True)
        os.link(recording.path, path)
        for part in recording.parts:
            yield path, part
