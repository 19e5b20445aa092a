"""Objects refused for a while are read in their place; lost ones have rows; no access fails."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.store.object_store import Fetched, ObjectDenied, ObjectNotFound, ObjectStore, StoreError
from infra.store.objects import Admit, admit_all
from pipeline.runs.commit import read_commits
from pipeline.runs.manifest import Manifest, manifest_uri
from pipeline.settings import ExtractionConfig
from pipeline.steps import audio_reads
from pipeline.steps.features import extract_features
from tests.faults.bad_input.small_runs import ledger
from tests.four_steps import selected_corpus
from tests.long_speaker import serially_cut

STEP = "features/unlabelled"
FIRST, SECOND = "unlabelled-00-000", "unlabelled-01-001"

Refuse = Callable[[str, float], type[StoreError] | None]
"""Decides by the URI and the seconds that were waited what a GET is answered."""


def refuse_nothing(uri: str, seconds: float) -> None:
    del uri, seconds


class RefusingStore(ObjectStore):
    """RefusingStore refuses GETs of audio as `refuse` says, on a clock of the waits alone."""

    refuse: Refuse = staticmethod(refuse_nothing)
    seconds = 0.0

    def fetch(self, uri: str, admit: Admit = admit_all) -> Fetched:
        error = None if ".flac" not in uri else RefusingStore.refuse(uri, RefusingStore.seconds)
        if error is not None:
            raise error(f"{uri}: refused")
        return super().fetch(uri, admit)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Record the waits of decisions, which move the clock and take no time."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        RefusingStore.seconds += seconds

    # Of this module alone: threads of other tests sleep too.
    monkeypatch.setattr(audio_reads, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(RefusingStore, "seconds", 0.0)
    yield found
    RefusingStore.refuse = staticmethod(refuse_nothing)


@pytest.fixture
def run(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """Select two speakers of three utterances into one file."""
    store, run_uri, corpus_uri = selected_corpus(tmp_path, 2, 3)
    return RefusingStore(store.allowed_prefixes), run_uri, corpus_uri


def extract(
    run: tuple[ObjectStore, str, str], refuse: Refuse | None = None, shard_frames: int = 10**6
) -> Manifest:
    """Extract with a loss budget that forgives all; cut shards at `shard_frames`."""
    if refuse is not None:
        RefusingStore.refuse = staticmethod(refuse)
    store, run_uri, corpus_uri = run
    config = ExtractionConfig(gets_in_flight=2, seed=3)
    arguments = (store, run_uri, "unlabelled", corpus_uri, config, 1.0)
    return extract_features(*arguments, partial(serially_cut, shard_frames)).manifest


@pytest.fixture
def whole(run: tuple[ObjectStore, str, str]) -> Manifest:
    """Extract without refusals, and remove what that wrote."""
    manifest = extract(run)
    forget(run)
    return manifest


def forget(run: tuple[ObjectStore, str, str]) -> None:
    for found in run[0].list(f"{run[1]}/features"):
        run[0].delete(found.uri)


def until(seconds: float, error: type[StoreError], *names: str) -> Refuse:
    """Refuse objects with these names, or all, until so many seconds were waited."""

    def refuse(uri: str, waited: float) -> type[StoreError] | None:
        is_meant = not names or any(name in uri for name in names)
        return error if is_meant and waited < seconds else None

    return refuse


@pytest.mark.parametrize("error", [ObjectNotFound, ObjectDenied])
@pytest.mark.parametrize("shard_frames", [10**6, 100])
def test_what_comes_back_takes_its_place(
    run: tuple[ObjectStore, str, str], whole: Manifest, error: type[StoreError], shard_frames: int
) -> None:
    """The first and the fifth of six, refused for a second: byte for byte as without refusals."""
    expected = whole if shard_frames > 100 else extract(run, shard_frames=shard_frames)
    forget(run)
    found = extract(run, until(1.0, error, FIRST, SECOND), shard_frames)
    assert found.to_bytes() == expected.to_bytes()
    assert found.quarantined.utterances == 0


def test_an_object_is_lost_after_all_waits(
    run: tuple[ObjectStore, str, str], whole: Manifest, waits: list[float]
) -> None:
    """Back at the last second of three waits: read. Not back then: a row, and one set of waits."""
    total = sum(audio_reads.CONFIRMING_WAITS_S)
    assert extract(run, until(total, ObjectNotFound, FIRST)).to_bytes() == whole.to_bytes()
    forget(run)
    waits.clear()
    RefusingStore.seconds = 0.0
    lost = extract(run, until(total + 0.1, ObjectNotFound, FIRST, SECOND))
    rows = ledger(run[0], run[1], lost.ledgers)
    assert {(row["utterance_id"], row["reason"]) for row in rows} == {
        (FIRST, "missing_object"),
        (SECOND, "missing_object"),
    }
    assert lost.tally_out.utterances == 4
    assert waits == list(audio_reads.CONFIRMING_WAITS_S)


@pytest.mark.parametrize("first", [0, 3])
def test_access_that_fails_for_a_while_loses_nothing(
    run: tuple[ObjectStore, str, str], whole: Manifest, first: int
) -> None:
    """All GETs are denied for 20 s, from the first or from the fourth on: nothing is lost."""
    asked: list[str] = []

    def refuse(uri: str, seconds: float) -> type[StoreError] | None:
        asked.append(uri)
        return ObjectDenied if len(asked) > first and seconds < 20 else None

    assert extract(run, refuse).to_bytes() == whole.to_bytes()


@pytest.mark.parametrize("num_read", [0, 3])
def test_without_access_nothing_is_committed(
    run: tuple[ObjectStore, str, str], whole: Manifest, num_read: int
) -> None:
    """After 30 s of waits an error asks for the audio; with it the same command succeeds."""
    asked: list[str] = []

    def refuse(uri: str, seconds: float) -> type[StoreError] | None:
        del seconds
        asked.append(uri)
        return ObjectNotFound if len(asked) > num_read else None

    read_before = r", nor does .*-002\.flac, which did" if num_read else r""
    message = (
        rf"{6 - num_read} audio objects of one task are refused, and for 30 s no other of its "
        rf"objects answers{read_before}\): is the audio mounted, moved, or closed"
    )
    with pytest.raises(StoreError, match=message):
        extract(run, refuse)
    assert RefusingStore.seconds == audio_reads.PATIENCE_S
    assert read_commits(run[0], run[1], STEP) == []
    assert not run[0].exists(manifest_uri(run[1], STEP))
    assert extract(run, until(0, ObjectNotFound)).to_bytes() == whole.to_bytes()


def test_refusals_that_change_are_not_believed(
    run: tuple[ObjectStore, str, str], whole: Manifest
) -> None:
    """Denied, absent, denied in turn says nothing: it is asked for until patience ends, or read."""
    kinds: list[type[StoreError]] = [ObjectNotFound, ObjectDenied]

    def refuse(uri: str, seconds: float) -> type[StoreError] | None:
        kinds.reverse()
        return kinds[0] if FIRST in uri and seconds < 25 else None

    assert extract(run, refuse).to_bytes() == whole.to_bytes()
    forget(run)
    RefusingStore.seconds = -1e9
    with pytest.raises(StoreError, match="1 audio objects of one task are refused"):
        extract(run, refuse)


def test_the_second_reading_decides_at_once(
    run: tuple[ObjectStore, str, str], whole: Manifest
) -> None:
    """While one object is read again, another is refused for a second, and read then."""

    def refuse(uri: str, seconds: float) -> type[StoreError] | None:
        is_refused = (FIRST in uri and seconds < 1) or (SECOND in uri and 1 <= seconds < 2)
        return ObjectDenied if is_refused else None

    assert extract(run, refuse).to_bytes() == whole.to_bytes()
