"""The lexicon beside transcripts: what ingest and check say of it, and when it may be corrected."""

from pathlib import Path

import pytest

from infra.store.object_store import join_uri
from pipeline.runs.manifest import manifest_uri, read_manifest
from pipeline.runs.names import BOOTSTRAP_STEP
from tests.job_programs import RunJob, Said
from tests.jobs.ingestion.conftest import append, write
from tests.jobs.ingestion.manifest_corpus import Corpus, manifest_of, row
from tests.small_corpus import flac, tone
from tests.whole_path.processes import TINY

pytestmark = pytest.mark.usefixtures("without_spark")

UTTERANCES = ("HELLO WORLD", "HELLO [noise]", "DON\u2019T", "CAFE\u0301", *["HELLO"] * 16)
LEXICON = ["HELLO HH AH L OW", "WORLD W ER L D", "DON'T D OW N T", "CAF\u00c9 K AE F EY"]
NAMED = "'DON\u2019T' (it has \"DON'T\"), '[noise]'"
SAID = f"lexicon.txt lacks 2 words, in 2 of 20 labelled utterances: {NAMED}; "
HELDOUT = "lexicon.txt lacks 1 word, in 1 of 2 heldout utterances: 'WASP'; they count as errors"


@pytest.fixture
def given(corpus: Corpus) -> list[str]:
    """Options of three manifests and a lexicon; all that is labelled is of one second."""
    (corpus.audio / "ann.flac").write_bytes(flac(tone(1, 1.0)))
    folder = corpus.audio.parent
    write(folder, "words.txt", LEXICON)
    texts = {"labelled": UTTERANCES, "dev": ["HELLO"] * 20, "heldout": ["WASP", "HELLO"]}
    options = ["--format", "table", "--lexicon", str(folder / "words.txt")]
    for subset, some in texts.items():
        rows = [
            row("ann.flac", 1.0, utterance_id=f"{subset}-{n}", text=text)
            for n, text in enumerate(some)
        ]
        options += ["--manifest", f"{subset}={manifest_of(corpus, f'{subset}.jsonl', rows)}"]
    return options


def both(corpus: Corpus, given: list[str], *options: str) -> list[Said]:
    return [corpus.job(name, *given, *options) for name in ("check", "ingest")]


def test_unknown_words_are_said_before_anything_is_read(corpus: Corpus, given: list[str]) -> None:
    """By check and by ingest, with another spelling of the word; NFD is no other spelling."""
    for said in both(corpus, given, "--set", "loss_budget=0.1"):
        assert said.code == 0, said.err
        assert f"{SAID}these utterances will not be aligned" in said.err
        assert (
            "lacks 1 word, in 1 of 2 heldout utterances: 'WASP'; they count as errors" in said.err
        )
        assert "dev utterances" not in said.err
    (record,) = [each for each in corpus.records("labelled") if each.utterance_id == "labelled-3"]
    assert record.text == "CAF\u00c9"
    assert read_manifest(corpus.store, corpus.run_uri, "ingest").quarantined.utterances == 0


def test_a_lexicon_of_other_words_is_refused_first(corpus: Corpus, given: list[str]) -> None:
    """Nothing is stored; with spoken noise in place of the words it is accepted."""
    checked, ingested = both(corpus, given, "--set", "loss_budget=0.09")
    assert (checked.code, ingested.code) == (2, 3)
    for said in (checked, ingested):
        assert f"{SAID}the loss budget is 9.00%: correct lexicon.txt or the tr" in said.err
    assert not Path(corpus.run_uri, "corpus").exists()
    said = corpus.job("check", *given, "--set", "corpus.unknown_words='letters'")
    assert said.code == 0, said.err
    assert "their letters make pronunciations" in said.err
    for said in both(corpus, given, "--set", "corpus.unknown_words='spn'"):
        assert said.code == 0, said.err
        assert "they are aligned as SPN" in said.err


def test_a_lexicon_is_corrected_until_it_is_read(corpus: Corpus, given: list[str]) -> None:
    """Ingest's manifest remains; verify finds nothing. What has aligned ends it, with a remedy."""
    corpus.ingest(*given)
    uri = manifest_uri(corpus.run_uri, "ingest")
    before = corpus.store.get(uri)
    words = corpus.audio.parent / "words.txt"
    append(words.parent, "words.txt", "[noise] NSN")
    said = corpus.job("ingest", *given)
    assert said.code == 0, said.err
    assert "in 1 of 20 labelled utterances: 'DON" in said.err
    stored = join_uri(corpus.run_uri, "corpus/lexicon.txt")
    assert corpus.store.get(stored) == words.read_bytes()
    assert corpus.store.get(uri) == before
    assert corpus.job("verify").code == 0
    corpus.store.put(join_uri(corpus.run_uri, BOOTSTRAP_STEP, "a.commit.json"), b"{}")
    said = corpus.job("ingest", *given)
    assert (said.code, "lacks" in said.err) == (0, False)
    append(words.parent, "words.txt", "WASP W AA S P")
    for said in both(corpus, given):
        assert said.code != 0
        assert "lexicon.txt has other bytes than the lexicon given, by which " in said.err
        assert f"{BOOTSTRAP_STEP} is aligned: give the same, or use another --run" in said.err
    assert b"WASP" not in corpus.store.get(stored)


def test_a_lexicon_that_other_runs_may_read_is_not_replaced(
    corpus: Corpus, given: list[str]
) -> None:
    """The corpus outside of the run keeps the lexicon that it has."""
    shared = ("--set", f'corpus.uri="{corpus.audio.parent / "shared"}"')
    assert corpus.job("ingest", *given, *shared, "--set", "loss_budget=0.9").code == 0
    append(corpus.audio.parent, "words.txt", "WASP W AA S P")
    said = corpus.job("ingest", *given, *shared, "--set", "loss_budget=0.9")
    assert said.code == 1
    assert "other runs may have read it: give the same, use another corpus.uri" in said.err


def test_a_directorys_transcripts_are_compared(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path
) -> None:
    """Those of its labelled and held-out speakers; unlabelled text is nobody's transcript."""
    words = {"ann": "HELLO WASP", "bob": "BEE", "eve": "HELLO"}
    text = [f"{name}-{n} {words[name]}" for name in words for n in (1, 2)]
    write(kaldi_dir, "text", [*text[:1], "ann-2 WORLD", *text[2:]])
    given = ("--recipe", str(TINY), "--run", str(tmp_path / "run"), "--kaldi-dir", str(kaldi_dir))
    said = run_job("check", *given, "--set", "loss_budget=0.5")
    assert said.code == 0, said.err
    assert "lacks 1 word, in 1 of 2 labelled utterances: 'WASP'; these" in said.err
    assert "BEE" not in said.err


FAULTS = {
    "no phones": (b"NEW\n", "lexicon line 3: 'NEW' has no phones"),
    "Latin-1": (b"CAF\xe9 K AE F EY\n", "lexicon line 3 is not UTF-8: it has the byte 0xe9"),
    "probabilities": (b"NEW 0.5 N UW\n", "lexicon line 3: '0.5' after 'NEW' is a number"),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", ["check", "ingest"])
def test_a_directorys_faulty_lexicon_is_named_by_file_and_line(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """It is read as one beside manifests is, before anything is stored."""
    data, message = FAULTS[kind]
    with (kaldi_dir / "lexicon.txt").open("ab") as file:
        file.write(data)
    run = tmp_path / "run"
    said = run_job(name, "--recipe", str(TINY), "--run", str(run), "--kaldi-dir", str(kaldi_dir))
    assert said.code == 2
    assert f"{kaldi_dir}/lexicon.txt: {message}" in said.err
    assert not Path(run, "corpus").exists()


def test_a_directorys_lexicon_is_stored_without_a_byte_order_mark(
    run_job: RunJob, kaldi_dir: Path, tmp_path: Path
) -> None:
    """Nor is the mark a part of its first word."""
    lexicon = (kaldi_dir / "lexicon.txt").read_bytes()
    (kaldi_dir / "lexicon.txt").write_bytes(b"\xef\xbb\xbf" + lexicon)
    given = ("--recipe", str(TINY), "--run", str(tmp_path / "run"), "--kaldi-dir", str(kaldi_dir))
    said = run_job("ingest", *given)
    assert said.code == 0, said.err
    assert "lacks" not in said.err
    assert (tmp_path / "run" / "corpus" / "lexicon.txt").read_bytes() == lexicon
    (kaldi_dir / "lexicon.txt").unlink()
    assert "lexicon.txt: missing; a data directory needs text" in run_job("ingest", *given).err
