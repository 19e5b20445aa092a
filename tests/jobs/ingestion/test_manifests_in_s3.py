"""Other tools' layouts are ingested from S3, their audio is read there, and Spark runs the tasks.

Whole runs in S3 ingest NeMo's manifests and tables.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytest
import soundfile
from lhotse.audio import AudioSource

from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session
from infra.store.object_store import Fetched, ObjectStore, SizeBound
from jobs.cli import spark_steps
from pipeline.audio.decode import decode_audio
from pipeline.metadata import read_records
from pipeline.records import Tally, Utterance
from pipeline.runs.manifest import read_manifest, sha256
from pipeline.settings import ANY_AUDIO
from pipeline.steps.audio_reads import WantedAudio, read_audio
from tests.job_programs import RunJob
from tests.s3_server import CREDENTIALS
from tests.small_corpus import SAMPLE_RATE, flac, plain_loop, tone, wav
from tests.whole_path.processes import TINY

Samples = Mapping[str, np.ndarray]


@pytest.fixture
def on_spark(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the tasks of ingest in a session.

    Its workers get the place of S3 from it: another test may have begun its JVM without one.
    """

    def distribute(elements: Sequence[Any], function: Any, description: str) -> list[Any]:
        return run_tasks(session, elements, function, description)

    @contextmanager
    def in_session(job: object) -> Any:
        del job
        yield distribute

    monkeypatch.setattr(spark_steps, "distribute_on_spark", in_session)
    with spark_session("ingest from S3", load_cluster("demo")) as session:
        session.sparkContext.environment.update({**CREDENTIALS, "AWS_ENDPOINT_URL": s3_endpoint})
        yield


def recorded(folder: Path, name: str, seconds: float = 3.0) -> np.ndarray:
    """Write a recording into the folder; return its samples."""
    encoded = (wav if name.endswith(".wav") else flac)(tone(len(name), seconds))
    (folder / name).write_bytes(encoded)
    return decode_audio(encoded)


def part(samples: np.ndarray, start_s: float, end_s: float) -> np.ndarray:
    return samples[round(start_s * SAMPLE_RATE) : round(end_s * SAMPLE_RATE)]


def spoken(recording: lhotse.Recording) -> lhotse.SupervisionSegment:
    """Describe what is said from 0.5 to 1.75 s."""
    return lhotse.SupervisionSegment("s", recording.id, 0.5, 1.25, speaker="ann")


def cuts_of(recording: lhotse.Recording) -> lhotse.CutSet:
    """Make two cuts by lhotse: a part of the recording, and the whole."""
    whole = recording.to_cut()
    whole.supervisions = [spoken(recording)]
    (said,) = whole.trim_to_supervisions()
    return lhotse.CutSet.from_cuts([said.with_id("part"), recording.to_cut().with_id("whole")])


def recording_at(folder: Path, at: str) -> lhotse.Recording:
    """Describe the folder's recording by lhotse; its source is a URI below `at`."""
    recording = lhotse.Recording.from_file(folder / "r.wav")
    recording.sources = [AudioSource("url", [0], f"{at}/r.wav")]
    return recording


def write_cuts(folder: Path, at: str) -> Samples:
    """Cuts of a recording whose source is a URI."""
    samples = recorded(folder, "r.wav")
    cuts_of(recording_at(folder, at)).to_file(folder / "cuts.jsonl")
    return {"part": part(samples, 0.5, 1.75), "whole": samples}


def write_supervisions(folder: Path, at: str) -> Samples:
    """Supervisions, and in another object the recording, whose source is a URI."""
    samples = recorded(folder, "r.wav")
    recording = recording_at(folder, at)
    lhotse.RecordingSet.from_recordings([recording]).to_file(folder / "r.jsonl.gz")
    lhotse.SupervisionSet.from_segments([spoken(recording)]).to_file(folder / "s.jsonl")
    return {"s": part(samples, 0.5, 1.75)}


def write_shar(folder: Path, at: str) -> Samples:
    """A Shar of two shards, as lhotse's writer leaves it; the recordings themselves are gone."""
    del at
    samples = recorded(folder, "r.wav")
    cuts_of(lhotse.Recording.from_file(folder / "r.wav")).to_shar(
        folder, fields={"recording": "flac"}, shard_size=1
    )
    (folder / "r.wav").unlink()
    return {"part": part(samples, 0.5, 1.75), "whole": samples}


def write_kaldi(folder: Path, at: str) -> Samples:
    """Segments of a recording that wav.scp names by URI, and of one that it names by path."""
    by_uri, by_path = recorded(folder, "u.flac"), recorded(folder, "path.wav", 2.0)
    (folder / "wav.scp").write_text(f"u {at}/u.flac\np path.wav\n")
    (folder / "segments").write_text("u1 u 0.5 2.25\np1 p 0 1.5\n")
    (folder / "utt2spk").write_text("u1 ann\np1 ben\n")
    return {"u1": part(by_uri, 0.5, 2.25), "p1": part(by_path, 0, 1.5)}


def write_librispeech(folder: Path, at: str) -> Samples:
    """A chapter with its transcript."""
    del at
    chapter = folder / "84" / "121"
    chapter.mkdir(parents=True)
    (chapter / "84-121.trans.txt").write_text("84-121-0000 HELLO YOU\n")
    return {"84-121-0000": recorded(chapter, "84-121-0000.flac", 1.25)}


def write_common_voice(folder: Path, at: str) -> Samples:
    """Two clips, of which one has its duration in a table."""
    del at
    (folder / "clips").mkdir()
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(2, 2.0), SAMPLE_RATE, format="MP3")
    for name in ("a", "b"):
        (folder / "clips" / f"{name}.mp3").write_bytes(buffer.getvalue())
    rows = "client_id\tpath\tsentence\tlocale\nx\ta.mp3\thi\tnl\nx\tb.mp3\tyou\tnl\n"
    (folder / "train.tsv").write_text(rows)
    (folder / "clip_durations.tsv").write_text("clip\tduration[ms]\na.mp3\t2000\n")
    return dict.fromkeys(("a", "b"), decode_audio(buffer.getvalue(), ANY_AUDIO))


@pytest.mark.parametrize(
    ("form", "write", "name", "options"),
    [
        ("lhotse", write_cuts, "/cuts.jsonl", ()),
        ("lhotse", write_supervisions, "/s.jsonl", ("--recordings", "{at}/r.jsonl.gz")),
        ("shar", write_shar, "", ()),
        ("kaldi", write_kaldi, "", ()),
        ("librispeech", write_librispeech, "", ()),
        ("common_voice", write_common_voice, "/train.tsv", ()),
    ],
)
@pytest.mark.usefixtures("without_spark")
def test_audio_is_read_in_place(
    s3_bucket: str,
    tmp_path: Path,
    run_job: RunJob,
    form: str,
    write: Callable[[Path, str], Samples],
    name: str,
    options: Sequence[str],
) -> None:
    """Each record's audio is a part of an object beside the manifest; nothing is copied."""
    at, run_uri = f"s3://{s3_bucket}/{form}", f"s3://{s3_bucket}/run"
    folder = tmp_path / form
    folder.mkdir()
    expected = write(folder, at)
    store = ObjectStore((f"s3://{s3_bucket}/",))
    for path in (each for each in folder.rglob("*") if each.is_file()):
        store.put(f"{at}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    prefix = ("--set", f'corpus.audio_prefixes=["{at}"]')
    given = ("--manifest", f"{at}{name}", "--format", form)
    more = [option.format(at=at) for option in options]
    said = run_job("ingest", "--recipe", str(TINY), "--run", run_uri, *prefix, *given, *more)
    assert said.code == 0, said.err
    found = read_corpus(store, f"{run_uri}/corpus", at)
    assert found.keys() == expected.keys()
    for utterance_id, samples in expected.items():
        np.testing.assert_array_equal(found[utterance_id], samples, err_msg=utterance_id)
    stored = {each.uri for each in store.list(run_uri)}
    assert not any("/audio/" in uri for uri in stored)


def spoken_rows(store: ObjectStore, at: str) -> str:
    """Store twelve utterances, and a manifest that lists one more."""
    rows = []
    for number in range(12):
        store.put(f"{at}/s{number}.wav", wav(tone(number, 0.5)))
        said = {"audio_filepath": f"s{number}.wav", "duration": 0.5, "text": "yes"}
        rows.append({**said, "utterance_id": f"s{number}-1", "speaker": f"s{number}"})
    rows.append({**rows[0], "audio_filepath": "absent.wav", "utterance_id": "x"})
    store.put(f"{at}/m.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    return f"{at}/m.jsonl"


@pytest.mark.usefixtures("on_spark", "small_acoustics")
def test_placements_are_simulated_by_spark_tasks(
    s3_bucket: str, tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks read rooms from the corpus in S3, and store what one process stores on a disk."""
    found = []
    for place in (f"s3://{s3_bucket}", str(tmp_path)):
        store = ObjectStore((place,))
        uri, run_uri = spoken_rows(store, f"{place}/speech"), f"{place}/run"
        given = ("--set", "loss_budget=0.9", "--set", f'corpus.audio_prefixes=["{place}/speech"]')
        options = ("--manifest", f"labelled={uri}", "--dev-share", "0.3", "--placements", "2")
        said = run_job("ingest", "--recipe", str(TINY), "--run", run_uri, *given, *options)
        assert said.code == 0, said.err
        manifest = read_manifest(store, run_uri, "ingest")
        assert manifest.tally_in == manifest.tally_out + manifest.quarantined == Tally(26, 13_000)
        assert manifest.quarantined == Tally(2, 1000)
        outputs = list(manifest.outputs)
        for output in outputs:
            assert sha256(store.get(f"{run_uri}/corpus/{output.key}")) == output.sha256
        found.append(outputs)
        monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    assert found[0] == found[1]
    keys = [output.key for output in found[0]]
    assert sum(key.endswith(".flac") for key in keys) == 24
    assert sum(key.startswith("metadata/dev/") for key in keys) > 0


def read_corpus(store: ObjectStore, corpus_uri: str, at: str) -> Samples:
    """Read the metadata, and each record's samples from the object that it names below `at`."""
    samples = {}
    for each in store.list(f"{corpus_uri}/metadata/unlabelled"):
        for _, record in read_records(store.get(each.uri), each.uri):
            assert isinstance(record, Utterance), record
            assert record.audio_uri.startswith(f"{at}/")
            wanted = WantedAudio(record.audio_uri, SizeBound(), record.part, ANY_AUDIO)
            [audio] = read_audio(store, [wanted], 1)
            assert isinstance(audio, Fetched), audio
            samples[record.utterance_id] = decode_audio(audio.data, ANY_AUDIO)
    return samples
