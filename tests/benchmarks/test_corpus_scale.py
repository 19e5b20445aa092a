"""The corpus that grows is what its records say, and faster growth than the corpus's is marked."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import soundfile

from tests.benchmarks.corpus_scale.corpus import NUM_DAYS, Form, write_corpus
from tests.benchmarks.corpus_scale.table import growth
from tests.benchmarks.processes import ProcessWatch
from tests.small_corpus import SAMPLE_RATE

NUM_UTTERANCES = 2_130


def heard(record: dict[str, Any]) -> float:
    """The seconds of the audio that a record names."""
    data = Path(record["audio_uri"]).read_bytes()
    if "member_bytes" in record:
        begin = record["member_offset"]
        data = data[begin : begin + record["member_bytes"]]
    samples, rate = soundfile.read(io.BytesIO(data))
    assert rate == SAMPLE_RATE
    if "start_s" in record:
        begin = round(record["start_s"] * rate)
        samples = samples[begin : begin + round(record["duration_s"] * rate)]
    return len(samples) / rate


@pytest.mark.parametrize("form", get_args(Form))
def test_each_form_has_the_utterances_that_are_asked_for(tmp_path: Path, form: Form) -> None:
    """Ids differ, a speaker's day is one, and audio of the stated length is where it should be."""
    write_corpus(tmp_path, NUM_UTTERANCES, form)
    lines = (tmp_path / "unlabelled" / "part-00000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({each["utterance_id"] for each in records}) == len(records) == NUM_UTTERANCES
    days = {(each["speaker_id"], each["created_at"][:10]) for each in records}
    assert len(days) == len({speaker for speaker, _ in days}) == 43
    assert len({day for _, day in days}) == NUM_DAYS
    for each in records[::100]:
        assert heard(each) == pytest.approx(each["duration_s"], abs=1 / SAMPLE_RATE)
    per_object = 1 if form == "files" else 50
    assert len({each["audio_uri"] for each in records}) == -(-NUM_UTTERANCES // per_object)
    # A million utterances share the bytes of a few.
    inodes = {os.stat(each["audio_uri"]).st_ino for each in records}  # noqa: PTH116
    assert len(inodes) <= 176


def line(utterances: int, cpu_s: float, requests: int) -> dict[str, Any]:
    step = {"step": "a", "cpu_s": {"driver": cpu_s}, "peak_mb": {"driver": 100.0}}
    step |= {"requests": requests, "bytes_read": 0, "bytes_written": utterances}
    return {"utterances": utterances, "steps": [step]}


def test_what_grows_faster_than_the_corpus_is_marked() -> None:
    """A constant start is left out; the cost of one more utterance is compared."""
    runs = [line(10_000, 20.0, 190), line(1_000, 11.0, 100), line(100_000, 110.0, 1_990)]
    cpu, requests, _, written = list(growth(runs))[2:]
    assert cpu == "| a | CPU, us | 1,000 | 1,000 | 1.00 | 100, 100, 100 |"
    assert requests.endswith("| 0.01 | 0.02 | **2.00** |  |")
    assert written.endswith("| 1 | 1 | 1.00 |  |")


def test_a_process_is_watched_by_what_it_does() -> None:
    """Processor time and peak memory of a child's child are counted, under its kind."""
    program = "data = b'x' * 100_000_000; sum(range(10_000_000))"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    watch = ProcessWatch(lambda command: "outer" if "subprocess" in command else "inner")
    with watch.watching():
        subprocess.run([sys.executable, "-c", inner], check=True)
    assert watch.seconds_of("inner") > watch.seconds_of("outer")
    assert watch.peak_of("inner") > 95 > watch.peak_of("outer") > 0
