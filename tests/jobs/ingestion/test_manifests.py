"""Manifests of other tools become metadata, and their audio stays where it is."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from pipeline.runs.manifest import read_manifest, sha256
from pipeline.steps.ingestion import manifest_rows
from pipeline.steps.ingestion.tables import Nemo
from tests.jobs.ingestion.manifest_corpus import Corpus, write_lines
from tests.small_corpus import flac, tone, wav

RATE = 16_000
STORED = "language_model.txt.gz"


pytestmark = pytest.mark.usefixtures("without_spark")


def test_nemo(corpus: Corpus) -> None:
    """Objects and segments; transcripts of unlabelled speech are dropped; counts balance."""
    (corpus.audio / "a.wav").write_bytes(wav(tone(1, 3)))
    rows: list[object] = [
        {"audio_filepath": "audio/a.wav", "duration": 3.0, "text": "a b", "speaker": 7},
        {"audio_filepath": "audio/a.wav", "duration": 1.5, "offset": 0.5, "text": "b"},
        {"audio_filepath": "/etc/a.wav", "duration": 1.5},
        {"audio_filepath": "audio/../../a.wav", "duration": 1.5},
        {"audio_filepath": "audio/a.wav", "duration": -1},
        {"audio_filepath": "audio/a.wav", "duration": 1, "offset": -2},
        {"duration": 1},
        "no JSON",
    ]
    manifest = corpus.ingest("--manifest", write_lines(corpus.audio.parent / "m.jsonl", rows))
    whole, segment = sorted(corpus.records(), key=lambda record: record.part is not None)
    assert (whole.speaker_id, whole.duration_s, whole.part) == ("7", 3.0, None)
    assert whole.audio_uri == str(corpus.audio / "a.wav")
    assert segment.part is not None
    assert (segment.part.fields(), segment.text) == ({"start_s": 0.5}, None)
    assert segment.created_at == "1970-01-01T00:00:00.500+00:00"
    reasons = sorted(row["reason"] for row in corpus.ledger())
    expected = ["bad_duration", "bad_field", "malformed_json", "missing_field"]
    assert reasons == [*expected, "outside_prefixes", "outside_prefixes"]
    assert manifest.tally_in.utterances == len(rows)
    assert manifest.tally_out.utterances == 2
    assert manifest.quarantined.utterances == 6
    assert sorted(each.name for each in corpus.audio.iterdir()) == ["a.wav"]


def test_pieces_hold_each_line_once(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the bytes are divided, each line is read once, also one with another's end."""
    rows = [
        {"audio_filepath": f"audio/{number:04}{'x' * (number % 7)}.wav", "duration": 1}
        for number in range(40)
    ]
    path = corpus.audio.parent / "m.jsonl"
    write_lines(path, rows)
    first_lines = path.read_bytes().index(b"\n") + 1
    read = set()
    for step in (1, 7, first_lines, first_lines - 1, first_lines + 1, 10_000):
        monkeypatch.setattr(manifest_rows, "PIECE_BYTES", step)
        form = Nemo()
        pieces = list(form.pieces(corpus.store, str(path)))
        uris = [
            row.fields["audio_uri"] for piece in pieces for row in form.rows(corpus.store, piece)
        ]
        assert uris == [row["audio_filepath"] for row in rows]
        read.add(len(pieces))
    assert len(read) > 3


def test_texts_beside_manifests_are_stored(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lexicon and language model are objects of the corpus; the manifest lists the latter."""
    folder = corpus.audio.parent
    (corpus.audio / "a.wav").write_bytes(wav(tone(1, 2)))
    rows = [{"audio_filepath": "audio/a.wav", "duration": 2.0, "text": "yes"}]
    model = gzip.compress(b"yes yes\n", mtime=0)
    (folder / "words.txt").write_text("yes Y EH S\n")
    (folder / "own.txt.gz").write_bytes(model)
    monkeypatch.chdir(folder)
    given = ("--manifest", f"labelled={write_lines(folder / 'm.jsonl', rows)}")
    texts = ("--lexicon", "words.txt", "--language-model", "own.txt.gz")
    manifest = corpus.ingest(*given, *texts)
    corpus_uri = f"{corpus.run_uri}/corpus"
    assert manifest.outputs[0].key == STORED
    assert "lexicon.txt" not in {*manifest.inputs, *(each.key for each in manifest.outputs)}
    assert corpus.store.get(f"{corpus_uri}/lexicon.txt") == b"yes Y EH S\n"
    assert corpus.store.get(f"{corpus_uri}/{STORED}") == model
    assert manifest.inputs[STORED] == sha256(model)
    assert manifest.tally_out.utterances == 1
    (folder / "own.txt.gz").write_bytes(gzip.compress(b"yes\n", mtime=0))
    other = ("--set", f'corpus.uri="{corpus_uri}"')
    corpus.run_uri = str(folder / "other")
    said = corpus.job("ingest", *other, *given, *texts)
    assert (said.code, f"{STORED} is from another corpus" in said.err) == (1, True)


def test_texts_of_a_directory_lie_in_it(corpus: Corpus) -> None:
    """The options for them are of manifests alone; a suffix of no language model is named."""
    texts = ("--lexicon", "words.txt")
    said = corpus.job("ingest", "--kaldi-dir", ".", *texts)
    assert said.code == 2
    assert "--kaldi-dir: with --manifest alone: --lexicon: put the files into" in said.err
    said = corpus.job("ingest", "--manifest", "m.jsonl", "--language-model", "own.bin")
    assert (said.code, "need a name that ends with one of .txt, " in said.err) == (2, True)


TABLE: Sequence[Mapping[str, Any]] = [
    {"path": "audio/a.wav", "client": "ann", "secs": 3.0, "said": "ja", "uid": "u1"},
    {"path": "audio/a.wav", "client": "ann", "secs": 1.0, "said": "no", "uid": "u2"},
]
COLUMNS = "audio_uri=path,speaker_id=client,duration_s=secs,text=said,utterance_id=uid"


def as_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(TABLE[0]))
        writer.writeheader()
        writer.writerows(TABLE)


def as_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in TABLE]), path, row_group_size=1)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.csv", as_csv),
        ("t.parquet", as_parquet),
        ("t.jsonl.gz", lambda path: write_lines(path, TABLE)),
    ],
)
def test_tables(corpus: Corpus, name: str, write: Callable[[Path], object]) -> None:
    """CSV, Parquet and JSON lines of equal rows give equal records of a labelled subset."""
    path = corpus.audio.parent / name
    (corpus.audio / "a.wav").touch()
    write(path)
    options = ("--manifest", f"labelled={path}", "--format", "table", "--columns", COLUMNS)
    corpus.ingest(*options, "--locale", "nl-NL")
    first, second = corpus.records("labelled")
    assert (first.utterance_id, first.speaker_id, first.duration_s) == ("u1", "ann", 3.0)
    assert (second.text, second.locale, second.duration_s) == ("no", "nl-NL", 1.0)
    assert [record.audio_uri for record in (first, second)] == [str(corpus.audio / "a.wav")] * 2


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_table_of_one_column(corpus: Corpus, name: str) -> None:
    """That of the audio is enough, though no delimiter shows that it is a table."""
    path = corpus.audio.parent / name
    (corpus.audio / "a.wav").write_bytes(wav(tone(1, 2)))
    path.write_text("audio_uri\naudio/a.wav\n")
    corpus.ingest("--manifest", str(path), "--format", "table")
    assert [record.duration_s for record in corpus.records()] == [2.0]


def test_a_table_is_read_as_it_is(corpus: Corpus) -> None:
    """A column that is not known is refused, and passed over where the option names it."""
    path = corpus.audio.parent / "t.tsv.csv"
    (corpus.audio / "a.wav").touch()
    path.write_text("audio_uri,duration_s,mood\naudio/a.wav,1.5,glad\n")
    options = ("--manifest", str(path), "--format", "table")
    said = corpus.job("ingest", *options)
    assert said.code == 1
    assert f"{path}: 'mood': not known, so not used" in said.err
    manifest = corpus.ingest(*options, "--ignore-columns", "mood")
    assert [record.duration_s for record in corpus.records()] == [1.5]
    assert manifest.config["ignore_columns"] == "mood"


def test_the_channel_that_rows_may_name_decides_the_step(corpus: Corpus) -> None:
    """So another recipe's channel does not take over the records of this one's."""
    (corpus.audio / "a.wav").touch()
    rows = [{"audio_filepath": "audio/a.wav", "duration": 1.0, "channel_selector": 1}]
    options = ("--manifest", write_lines(corpus.audio.parent / "m.jsonl", rows))
    manifest = corpus.ingest(*options, "--set", 'features.conversion.channel="1"')
    assert manifest.tally_out.utterances == 1
    said = corpus.job("ingest", *options, "--set", 'features.conversion.channel="0"')
    assert "was made from another recipe or other inputs" in said.err


def test_lhotse_cuts_and_supervisions(corpus: Corpus) -> None:
    """Cuts of a recording, and its supervisions, are the same segments; a mixture is none."""
    recording = {
        "id": "r",
        "sources": [{"type": "file", "channels": [0], "source": str(corpus.audio / "r.flac")}],
        "sampling_rate": RATE,
        "num_samples": 5 * RATE,
        "duration": 5.0,
    }
    supervision = {
        "id": "s1",
        "recording_id": "r",
        "start": 1.0,
        "duration": 2.0,
        "channel": 0,
        "text": "hi",
        "speaker": "ann",
        "language": "en",
    }
    cut = {"id": "s1", "start": 1.0, "duration": 2.0, "channel": 0, "type": "MonoCut"}
    cuts: list[object] = [
        {**cut, "supervisions": [{**supervision, "start": 0.0}], "recording": recording},
        {**cut, "id": "m", "type": "MixedCut", "tracks": []},
    ]
    folder = corpus.audio.parent
    (corpus.audio / "r.flac").touch()
    uri = write_lines(folder / "cuts.jsonl.gz", cuts)
    corpus.ingest("--manifest", f"heldout={uri}", "--format", "lhotse")
    (by_cut,) = corpus.records("heldout")
    assert [row["reason"] for row in corpus.ledger()] == ["bad_field"]
    recordings = write_lines(folder / "recordings.jsonl", [recording])
    uri = write_lines(folder / "s.jsonl", [supervision, {**supervision, "recording_id": "q"}])
    corpus.run_uri += "2"
    options = ("--format", "lhotse", "--recordings", recordings)
    corpus.ingest("--manifest", f"heldout={uri}", *options)
    assert corpus.records("heldout") == [by_cut]
    assert (by_cut.speaker_id, by_cut.text, by_cut.locale) == ("ann", "hi", "en")
    assert by_cut.part is not None
    assert by_cut.part.fields() == {"start_s": 1.0}


def test_kaldi_directory_with_segments(corpus: Corpus) -> None:
    """Each line of segments is a segment; commands and unknown recordings are ledger rows."""
    files = {
        "wav.scp": f"r {corpus.audio}/r.wav\nq sox x |\n",
        "segments": "u1 r 0.5 2.25\nu2 q 0 1\nu3 absent 0 1\nu4 r x 1\n",
        "utt2spk": "u1 ann\nu2 ann\nu3 ann\nu4 ann\n",
        "text": "u1 a b\n",
    }
    for name, text in {**files, "r.wav": ""}.items():
        (corpus.audio / name).write_text(text)
    corpus.ingest("--manifest", f"labelled={corpus.audio}", "--format", "kaldi")
    (record,) = corpus.records("labelled")
    assert (record.utterance_id, record.text, record.duration_s) == ("u1", "a b", 1.75)
    assert record.part is not None
    assert record.part.fields() == {"start_s": 0.5}
    reasons = {row["utterance_id"]: row["reason"] for row in corpus.ledger()}
    assert reasons == {"u2": "bad_field", "u3": "bad_field", "u4": "bad_duration"}


def test_librispeech(corpus: Corpus) -> None:
    """A transcript names FLACs beside it, whose headers say how long they last."""
    chapter = corpus.audio / "84" / "121"
    chapter.mkdir(parents=True)
    (chapter / "84-121.trans.txt").write_text("84-121-0000 HELLO YOU\n84-121-0001 GONE\n")
    (chapter / "84-121-0000.flac").write_bytes(flac(tone(1, 1.25)))
    corpus.ingest("--manifest", f"labelled={corpus.audio}", "--format", "librispeech")
    (record,) = corpus.records("labelled")
    assert (record.speaker_id, record.text, record.duration_s) == ("84", "HELLO YOU", 1.25)
    assert [row["reason"] for row in corpus.ledger()] == ["missing_object"]


def test_common_voice(corpus: Corpus) -> None:
    """Clips last as clip_durations.tsv says, or else as their bytes do; quotes are letters."""
    clips = corpus.audio / "clips"
    clips.mkdir()
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(2, 2.0), RATE, format="MP3")
    for name in ("a", "b"):
        (clips / f"{name}.mp3").write_bytes(buffer.getvalue())
    (corpus.audio / "train.tsv").write_text(
        'client_id\tpath\tsentence\tlocale\nx\ta.mp3\t"Hi\tnl\nx\tb.mp3\tyou\tnl\n'
    )
    (corpus.audio / "clip_durations.tsv").write_text("clip\tduration[ms]\tup\na.mp3\t1990\t2\n")
    given = ("--manifest", f"labelled={corpus.audio}/train.tsv", "--format", "common_voice")
    corpus.ingest(*given, "--ignore-columns", "up")
    first, second = corpus.records("labelled")
    assert (first.text, first.duration_s, first.locale) == ('"Hi', 1.99, "nl")
    assert 2.0 <= second.duration_s < 2.2


def test_again_and_elsewhere(corpus: Corpus) -> None:
    """A finished step is found; changed input or another corpus's metadata is refused."""
    path = corpus.audio.parent / "m.jsonl"
    (corpus.audio / "a").touch()
    options = ("--manifest", write_lines(path, [{"audio_filepath": "audio/a", "duration": 1}]))
    corpus.ingest(*options)
    before = {each.uri: each.etag for each in corpus.store.list(corpus.run_uri)}
    assert "nothing to do" in corpus.job("ingest", "--set", "loss_budget=0.9", *options).out
    assert before.items() <= {e.uri: e.etag for e in corpus.store.list(corpus.run_uri)}.items()
    write_lines(path, [{"audio_filepath": "audio/a", "duration": 2}])
    said = corpus.job("ingest", *options)
    assert said.code == 1
    assert "was made from another recipe or other inputs" in said.err
    first, corpus.run_uri = corpus.run_uri, corpus.run_uri + "2"
    said = corpus.job("ingest", "--set", f'corpus.uri="{first}/corpus"', *options)
    assert said.code == 1
    assert "is from another corpus than these manifests" in said.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--manifest", "best=/x"), "--manifest best=/x: need [SUBSET=]URI"),
        (("--manifest", "/x", "--columns", "text=a"), "need --format table"),
        (("--manifest", "/x", "--format", "table", "--columns", "words=a"), "--columns words=a"),
        (("--manifest", "/x", "--speaker-buckets", "0"), "--speaker-buckets: 0: need 1..100000"),
        (("--manifest", "/x", "--placements", "9"), "--placements: placements = 9: need 1..5"),
        (("--manifest", "/x", "--heldout-placements", "2"), "without --placements: give both"),
        (
            ("--manifest", "/x", "--format", "librispeech", "--ignore-columns", "a"),
            "--ignore-columns with --format librispeech",
        ),
        (("--kaldi-dir", "x", "--format", "nemo"), "--kaldi-dir: with --manifest alone: --format"),
        (("--kaldi-dir", "x", "--columns", "text=a"), "alone: --columns: leave out --columns"),
        (("--kaldi-dir", "x", "--ignore-columns", "a"), "alone: --ignore-columns: leave out"),
        (("--kaldi-dir", "x", "--recordings", "r"), "alone: --recordings: leave out"),
        (("--kaldi-dir", "x", "--speaker-buckets", "1"), "alone: --speaker-buckets: leave out"),
        (("--manifest", "/x", "--dev-share", "0.2"), "need --manifest labelled=URI, or leave it"),
        (
            ("--manifest", "labelled=/x", "--manifest", "dev=/y", "--dev-share", "0.2"),
            "leave out --dev-share, or --manifest dev=URI",
        ),
    ],
)
def test_mistakes_name_the_option(corpus: Corpus, options: Sequence[str], said: str) -> None:
    """Exit code 2, with the value and what is needed."""
    found = corpus.job("ingest", *options)
    assert found.code == 2
    assert said in found.err


def test_a_corpus_of_parts_is_extracted_and_verified(corpus: Corpus) -> None:
    """Segments go through selection and extraction; `verify` sees a change."""
    recording = corpus.audio / "r.wav"
    recording.write_bytes(wav(tone(1, 6)))
    rows = [
        {"audio_filepath": "audio/r.wav", "duration": 1.0, "offset": number} for number in range(5)
    ]
    rows.append({"audio_filepath": "audio/r.wav", "duration": 1.0, "offset": 30})
    corpus.ingest("--manifest", write_lines(corpus.audio.parent / "m.jsonl", rows))
    settings = ("--set", "loss_budget=0.9")
    for job in ("select_utterances", "extract_features"):
        said = corpus.job(job, *settings)
        assert said.code == 0, said.err
    manifest = read_manifest(corpus.store, corpus.run_uri, "features/unlabelled")
    assert (manifest.tally_out.utterances, manifest.quarantined.utterances) == (5, 1)
    found = corpus.job("verify", *settings, "--json")
    assert json.loads(found.out)["findings"] == []
    data = bytearray(recording.read_bytes())
    data[44 + 2 * RATE] ^= 1  # within the second segment
    recording.write_bytes(data)
    found = corpus.job("verify", *settings, "--json")
    (finding,) = json.loads(found.out)["findings"]
    assert "as features/unlabelled read it" in json.dumps(finding)
