"""A store that says of objects that they are absent or denied, though they are not, loses none."""

import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.steps import audio_reads
from tests.faults.bad_input.small_runs import extract, ledger, select
from tests.faults.failing_store.proxied import Server, StartProxy
from tests.small_corpus import local_store, write_corpus

NUM_SPEAKERS, NUM_EACH = 3, 11
STEPS = ("selection/unlabelled", "features/unlabelled")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Select and extract on local paths."""
    store, run_uri, corpus_uri = local_store(tmp_path_factory.mktemp("local"))
    write_corpus(store, corpus_uri, "unlabelled", NUM_SPEAKERS, NUM_EACH)
    select(store, run_uri, corpus_uri)
    extract(store, run_uri, corpus_uri)
    return {step: read_manifest(store, run_uri, step) for step in STEPS}


@pytest.fixture
def quick_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide after three short waits, with patience for thirty."""
    monkeypatch.setattr(audio_reads, "CONFIRMING_WAITS_S", (0.02,) * 3)
    monkeypatch.setattr(audio_reads, "PATIENCE_S", 0.6)


@pytest.fixture
def in_s3(server: Server) -> tuple[ObjectStore, str, str]:
    store, corpus_uri = ObjectStore((server.uri,)), join_uri(server.uri, "corpus")
    write_corpus(store, corpus_uri, "unlabelled", NUM_SPEAKERS, NUM_EACH)
    return store, join_uri(server.uri, "run"), corpus_uri


@pytest.mark.usefixtures("quick_decisions")
def test_refusals_here_and_there_change_no_byte(
    server: Server,
    start_proxy: StartProxy,
    in_s3: tuple[ObjectStore, str, str],
    undisturbed: dict[str, Manifest],
) -> None:
    """One GET, HEAD or LIST in ten is answered 404 or 403: metadata, shards, manifests, audio."""
    proxy = start_proxy(server.endpoint, 0.1, "not_found", "denied", seed=2)
    select(*in_s3)
    extract(*in_s3)
    store, run_uri, _ = in_s3
    assert {step: read_manifest(store, run_uri, step) for step in STEPS} == undisturbed
    assert proxy.num_faults > 0


@pytest.mark.usefixtures("quick_decisions")
@pytest.mark.parametrize("kind", ["not_found", "denied"])
def test_a_while_of_refusals_changes_no_byte(
    server: Server,
    start_proxy: StartProxy,
    in_s3: tuple[ObjectStore, str, str],
    undisturbed: dict[str, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """From the fifth object on, 90 GETs in a row are refused, and audio is asked for again."""
    store, run_uri, corpus_uri = in_s3
    select(*in_s3)
    proxy = start_proxy(server.endpoint, 0.0, kind, limit=90)
    decode = audio_reads.AudioObjects.read

    def read(self: audio_reads.AudioObjects):
        for number, found in enumerate(decode(self)):
            proxy.rate = 1.0 if number == 4 else proxy.rate
            yield found

    monkeypatch.setattr(audio_reads.AudioObjects, "read", read)
    extract(store, run_uri, corpus_uri)
    assert read_manifest(store, run_uri, STEPS[1]) == undisturbed[STEPS[1]]
    assert proxy.injected["GET", kind] == 90


@pytest.mark.usefixtures("quick_decisions")
def test_what_is_truly_missing_is_one_row(in_s3: tuple[ObjectStore, str, str]) -> None:
    """Its neighbours answer, so it is lost, and all others are there."""
    store, run_uri, corpus_uri = in_s3
    select(*in_s3)
    store.delete(f"{corpus_uri}/audio/unlabelled-01-004.flac")
    manifest = extract(store, run_uri, corpus_uri)
    (row,) = ledger(store, run_uri, manifest.ledgers)
    assert (row["utterance_id"], row["reason"]) == ("unlabelled-01-004", "missing_object")
    assert manifest.tally_out.utterances == NUM_SPEAKERS * NUM_EACH - 1
