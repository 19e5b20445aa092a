"""Bad audio URIs of every kind have a row each in extraction, on local paths and in S3."""

import os
import socket
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from tests.faults.bad_input.small_runs import (
    Record,
    extract,
    features,
    ledger,
    lines_of,
    put_metadata,
    put_tone,
    record,
    select,
)
from tests.faults.failing_store.scripted_server import Request, Serve
from tests.small_corpus import flac, tone

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quick_decisions")]

# URIs by kind, with {corpus} and {outside} to be filled in, and the ledger's reason.
LOCAL = {
    "nothing there": ("audio/nowhere.flac", "missing_object"),
    "a directory": ("audio", "missing_object"),
    "the corpus itself": ("{corpus}", "missing_object"),
    "below a file": ("audio/neighbour/below.flac", "missing_object"),
    "a name of 300 letters": ("audio/" + "n" * 300, "missing_object"),
    "a path of 1,000 folders": ("d/" * 500 + "x", "missing_object"),
    "a terabyte": ("audio/terabyte", "too_large"),
    "a pipe": ("audio/pipe", "missing_object"),
    "a socket": ("audio/socket", "missing_object"),
    "a link to nothing": ("audio/dangling", "missing_object"),
    "a link to itself": ("audio/circle", "outside_prefixes"),
    "a link to a file outside": ("audio/link", "outside_prefixes"),
    "below a link to a directory outside": ("audio/folder/secret.flac", "outside_prefixes"),
    "a link to a device": ("audio/device", "outside_prefixes"),
    "a file outside": ("{outside}/secret.flac", "outside_prefixes"),
    "the password file": ("/etc/passwd", "outside_prefixes"),
    "the password file as a file URI": ("file:///etc/passwd", "outside_prefixes"),
    "a file URI with a host": ("file://host/etc/passwd", "outside_prefixes"),
    "a file URI with a NUL": ("file://{corpus}/a%00.flac", "outside_prefixes"),
    "two slashes": ("//etc/passwd", "outside_prefixes"),
    "a folder with the corpus's name and more": ("{corpus}-2/a.flac", "outside_prefixes"),
    "dots": ("../../../etc/passwd", "outside_prefixes"),
    "dots within": ("audio/../../secret.flac", "outside_prefixes"),
    "encoded dots": ("audio/%2e%2e/%2e%2e/secret.flac", "outside_prefixes"),
    "another bucket": ("s3://somebody-elses/a.flac", "outside_prefixes"),
    "a bucket's bad name": ("s3://b/a.flac", "outside_prefixes"),
    "http": ("http://169.254.169.254/latest/meta-data", "outside_prefixes"),
    "http with a password": ("https://user:hunter2@host/a.flac", "outside_prefixes"),
    "a home directory": ("~/secret.flac", "missing_object"),
    "a shell's variable": ("$HOME/secret.flac", "missing_object"),
}


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """Write a corpus with a neighbour's audio and files of many sorts that are not objects."""
    corpus, outside, audio = (tmp_path / name for name in ("corpus", "outside", "corpus/audio"))
    audio.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "corpus-2").mkdir()
    for secret in (outside / "secret.flac", tmp_path / "corpus-2" / "a.flac"):
        secret.write_bytes(flac(tone(1, 1.0)))
    os.mkfifo(audio / "pipe")
    with (audio / "terabyte").open("wb") as file:
        file.truncate(2**40)
    links = {"dangling": "nowhere", "circle": "circle", "link": outside / "secret.flac"}
    for name, target in {**links, "folder": outside, "device": "/dev/zero"}.items():
        (audio / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(audio / "socket"))
    run_uri = str(tmp_path / "run")
    return ObjectStore((str(corpus), run_uri)), run_uri, str(corpus)


def require_rows(
    store: ObjectStore, run_uri: str, corpus_uri: str, expected: dict[str, tuple[str, str]]
) -> list[Record]:
    """Extract one utterance of each URI beside a good one; require a row each with its reason."""
    neighbour = record("neighbour", "speaker", 0)
    put_tone(store, corpus_uri, neighbour, 1)
    records = [
        record(f"{number}", "speaker", 1, audio_uri=uri)
        for number, (uri, _) in enumerate(expected.values())
    ]
    put_metadata(store, corpus_uri, lines_of([neighbour, *records]))
    selected = select(store, run_uri, corpus_uri)
    manifest = extract(store, run_uri, corpus_uri)
    rows = ledger(store, run_uri, manifest.ledgers)
    found = {row["utterance_id"]: row["reason"] for row in rows}
    reasons = [reason for _, reason in expected.values()]
    assert found == {str(number): reason for number, reason in enumerate(reasons)}
    assert selected.tally_out == manifest.tally_out + manifest.quarantined
    assert list(features(store, run_uri, manifest)) == ["neighbour"]
    for row in rows:
        assert len(row["detail"]) <= 300
        assert row["num_bytes"] == 0
        assert "hunter2" not in str(row)
    return rows


def test_bad_uris_on_local_paths(corpus: tuple[ObjectStore, str, str]) -> None:
    """Nothing outside the corpus is opened, no pipe or device is waited for, each has its row."""
    store, run_uri, corpus_uri = corpus
    outside = str(Path(corpus_uri).parent / "outside")
    filled = {
        kind: (uri.replace("{corpus}", corpus_uri).replace("{outside}", outside), reason)
        for kind, (uri, reason) in LOCAL.items()
    }
    require_rows(store, run_uri, corpus_uri, filled)


def test_bad_uris_in_s3(s3_bucket: str) -> None:
    """Missing and long keys, a bucket without a key, `..` and other buckets have their rows."""
    corpus_uri, run_uri = f"s3://{s3_bucket}/corpus", f"s3://{s3_bucket}/run"
    expected = {
        "missing": ("audio/nowhere.flac", "missing_object"),
        "a folder": ("audio", "missing_object"),
        "the bucket": (f"s3://{s3_bucket}", "missing_object"),
        "the bucket and a slash": (f"s3://{s3_bucket}/", "missing_object"),
        "a long key": ("audio/" + "k" * 1015, "outside_prefixes"),
        "a long key of few letters": ("audio/" + "\N{SNOWMAN}" * 400, "outside_prefixes"),
        "dots": (f"s3://{s3_bucket}/corpus/../run/a", "outside_prefixes"),
        "encoded dots": ("audio/%2e%2e/a.flac", "outside_prefixes"),
        "another bucket": ("s3://somebody-elses/a.flac", "outside_prefixes"),
        "a local file": ("/etc/passwd", "outside_prefixes"),
        "a question mark": ("audio/a?versionId=1", "missing_object"),
        "more bytes than two seconds can have": ("audio/large", "too_large"),
        "strange letters": ("audio/\N{RIGHT-TO-LEFT OVERRIDE}#%zz+ &=", "missing_object"),
    }
    store = ObjectStore((f"s3://{s3_bucket}",))
    store.put(f"{corpus_uri}/audio/large", bytes(2**24 + 2 * 16_000 * 8 + 1))
    require_rows(store, run_uri, corpus_uri, expected)


def forbid(request: Request) -> None:
    """Refuse each object, in a bucket that is there."""
    if request.method == "HEAD":
        request.answer()
    else:
        request.answer(
            b"<Error><Code>AccessDenied</Code><Message>test-secret</Message></Error>", "403 X"
        )


def test_forbidden_audio_has_its_row(corpus: tuple[ObjectStore, str, str], serve: Serve) -> None:
    """Denied permission costs the utterance, not the step; the server's own text stays out."""
    serve(forbid)
    local, run_uri, corpus_uri = corpus
    store = ObjectStore((*local.allowed_prefixes, "s3://bucket"))
    expected = {"forbidden": ("s3://bucket/forbidden.flac", "access_denied")}
    (row,) = require_rows(store, run_uri, corpus_uri, expected)
    assert "test-secret" not in row["detail"]
    assert "refused (403 AccessDenied)" in row["detail"]
