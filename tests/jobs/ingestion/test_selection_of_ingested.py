"""A selection reads all metadata that its run has ingested, or names what is not listed."""

import pytest

from pipeline.runs import commit, engine
from tests.jobs.ingestion.manifest_corpus import Corpus, ingest_tables, manifest_of, row

pytestmark = pytest.mark.usefixtures("without_spark")

NAMES = [f"s{number:02d}-0.wav" for number in range(6)]


@pytest.fixture
def ingested(corpus: Corpus) -> Corpus:
    """Ingest the records of six speakers, of each twice: with transcripts and without."""
    (corpus.audio / f"l{NAMES[0]}").touch()
    (corpus.audio / NAMES[0]).touch()
    given = {
        "labelled": manifest_of(corpus, "labelled.jsonl", [row(f"l{name}") for name in NAMES]),
        "unlabelled": manifest_of(corpus, "unlabelled.jsonl", [row(name) for name in NAMES]),
    }
    ingest_tables(corpus, given)
    return corpus


def objects(corpus: Corpus, subset: str) -> list[str]:
    found = corpus.store.list(f"{corpus.run_uri}/corpus/metadata/{subset}")
    return [each.uri for each in found]


@pytest.mark.parametrize("subset", ["labelled", "unlabelled"])
def test_objects_that_are_not_listed_are_counted_and_named(ingested: Corpus, subset: str) -> None:
    """Two of a subset, or all: the step ends before it has written anything."""
    uris = objects(ingested, subset)
    for first, lost in ((0, uris[:2]), (2, uris)):
        for uri in lost[first:]:
            ingested.store.delete(uri)
        said = ingested.job("select_utterances")
        assert said.code == 1
        counts = f"wrote {len(uris)} metadata objects, and the listing lacks {len(lost)} of them"
        assert counts in said.err
        assert f"such as {uris[0].partition(f'/{subset}/')[2]}: put back" in said.err
    assert not ingested.store.list(f"{ingested.run_uri}/selection/{subset}")


def test_an_object_of_another_size_is_named(ingested: Corpus) -> None:
    """Both sizes are."""
    uri = objects(ingested, "unlabelled")[0]
    ingested.store.put(uri, b"x")
    said = ingested.job("select_utterances")
    assert said.code == 1
    assert f"{uri} has 1 bytes, and ingest wrote 1" in said.err


def test_a_long_list_of_outputs_is_read_by_parts(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a large ingestion's manifest has it."""
    for module in (engine, commit):
        monkeypatch.setattr(module, "MAX_LISTED", 1)
    (corpus.audio / NAMES[0]).touch()
    given = {"unlabelled": manifest_of(corpus, "unlabelled.jsonl", [row(each) for each in NAMES])}
    assert ingest_tables(corpus, given).parts
    uris = objects(corpus, "unlabelled")
    corpus.store.delete(uris[0])
    said = corpus.job("select_utterances")
    assert f"wrote {len(uris)} metadata objects, and the listing lacks 1 of them" in said.err


def test_another_corpus_is_selected_as_it_is_listed(ingested: Corpus) -> None:
    """A run that ingested nothing knows of no object that should be there."""
    for uri in objects(ingested, "unlabelled")[:2]:
        ingested.store.delete(uri)
    there = f"corpus.uri={ingested.run_uri}/corpus"
    said = ingested.job("select_utterances", "--set", there, "--run", f"{ingested.run_uri}2")
    assert said.code == 0, said.err
