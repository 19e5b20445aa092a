"""Write a small corpus of tones in noise, in the store's own layout, for tests of the steps."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.engine import Distribute

T = TypeVar("T")
R = TypeVar("R")
SAMPLE_RATE = 16_000


def serially(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[R]:
    """Run tasks one after the other, by no function of the product's, whose lines tests count."""
    del description
    return [function(each) for each in elements]


@contextmanager
def plain_loop(_: object) -> Iterator[Distribute]:
    """Run a job's tasks one after the other, in the place of Spark."""
    yield serially


def killed_at(call: int) -> Distribute:
    """Run tasks one after the other, over all of a step's waves, until a call kills the driver."""
    calls = count(1)

    def killing(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[R]:
        del description
        results = []
        for element in elements:
            if next(calls) == call:
                raise KeyboardInterrupt
            results.append(function(element))
        return results

    return killing


def encode(
    samples: np.ndarray,
    container: str = "WAV",
    subtype: str | None = "PCM_16",
    sample_rate: int = SAMPLE_RATE,
) -> bytes:
    """Encode `samples` by libsndfile."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format=container, subtype=subtype)
    return buffer.getvalue()


def flac(samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> bytes:
    """Encode `samples` as 16-bit FLAC."""
    return encode(samples, "FLAC", sample_rate=sample_rate)


def wav(samples: np.ndarray) -> bytes:
    """Encode `samples` as a 16-bit WAV."""
    return encode(samples)


def tone(number: int, duration_s: float) -> np.ndarray:
    """Make a tone in noise, different for each `number`."""
    generator = np.random.default_rng(number)
    time = np.arange(round(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    return 0.1 * np.sin(2 * np.pi * (200 + 40 * number) * time) + 0.01 * generator.normal(
        size=len(time)
    )


def write_corpus(
    store: ObjectStore, corpus_uri: str, subset: str, num_speakers: int, num_each: int
) -> list[dict[str, object]]:
    """Write `num_speakers` x `num_each` utterances of 0.5 to 1.5 s, audio and metadata."""
    records = []
    for speaker in range(num_speakers):
        for number in range(num_each):
            utterance_id = f"{subset}-{speaker:02d}-{number:03d}"
            duration_s = 0.5 + (speaker * num_each + number) % 11 / 10
            uri = f"audio/{utterance_id}.flac"
            store.put(join_uri(corpus_uri, uri), flac(tone(speaker + number, duration_s)))
            records.append(
                {
                    "utterance_id": utterance_id,
                    "speaker_id": f"{subset}-speaker-{speaker:02d}",
                    "duration_s": duration_s,
                    "created_at": f"2026-01-01T00:{number:02d}:00+00:00",
                    "locale": "en-US",
                    "audio_uri": uri,
                }
            )
    write_metadata(store, corpus_uri, subset, records)
    return records


def write_versions(store: ObjectStore, corpus_uri: str, durations_s: Mapping[str, float]) -> None:
    """Write unlabelled utterances of one speaker, named for what they are versions of.

    A name is that of what was said and that of the placement, such as "ann-DP3".
    """
    (record,) = write_corpus(store, corpus_uri, "unlabelled", num_speakers=1, num_each=1)
    records = []
    for number, (name, duration_s) in enumerate(durations_s.items()):
        uri = f"audio/{name}.flac"
        store.put(join_uri(corpus_uri, uri), flac(tone(number, duration_s)))
        own = {"utterance_id": name, "audio_uri": uri, "duration_s": duration_s}
        records.append({**record, **own, "placement": name.partition("-")[2]})
    write_metadata(store, corpus_uri, "unlabelled", records)


def write_metadata(
    store: ObjectStore, corpus_uri: str, subset: str, records: Sequence[object]
) -> None:
    """Write the metadata lines of one bucket; a text is a line as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    folder = join_uri(corpus_uri, "metadata", subset, "date=2026-01-01", "speaker_bucket=00")
    store.put(join_uri(folder, "part-00000.jsonl"), "".join(f"{line}\n" for line in lines).encode())


def local_store(folder: Path) -> tuple[ObjectStore, str, str]:
    """Make a store on local paths, with a run and its corpus."""
    run_uri = str(folder / "run")
    return ObjectStore((run_uri,)), run_uri, join_uri(run_uri, "corpus")


def write_kaldi_tables(directory: Path, lexicon: str) -> None:
    """Write the tables of three speakers with an utterance each, whose audio is not there."""
    speakers = {"ann": "labelled", "bob": "unlabelled", "eve": "heldout"}
    tables = {
        "wav.scp": [f"{name}-1 audio/{name}-1.flac" for name in speakers],
        "utt2spk": [f"{name}-1 {name}" for name in speakers],
        "text": [f"{name}-1 A B" for name in speakers],
        "lexicon.txt": lexicon.splitlines(),
        **{f"{subset}.speakers": [name] for name, subset in speakers.items()},
    }
    for name, lines in tables.items():
        (directory / name).write_text("".join(f"{line}\n" for line in lines))
