"""An increment selects from the metadata that no run of its chain has read, and from no other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from infra.store.object_store import join_uri
from pipeline.audit.verify import verify_run
from pipeline.filters import SelectionFilters
from pipeline.records import Tally
from pipeline.runs.increment import record_bases
from pipeline.runs.manifest import Manifest, Output, manifest_uri, own_outputs, read_output, sha256
from tests.four_steps import Distribute
from tests.pipeline.steps.increments.nights import SUBSET, Nights
from tests.small_corpus import serially

T = TypeVar("T")
R = TypeVar("R")
SPEAKERS = ["ann", "bert", "clara"]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """Return a corpus of one night, which the run night-1 has selected."""
    found = Nights.at(str(tmp_path))
    found.add(1, SPEAKERS)
    found.select("night-1")
    return found


def test_metadata_of_earlier_nights_are_not_read(nights: Nights) -> None:
    """Not one of their objects is opened: they may hold anything of their size."""
    ids = nights.add(2, SPEAKERS)
    for found in nights.store.list(join_uri(nights.corpus_uri, "metadata")):
        if "/date=2026-01-01/" in found.uri:
            nights.store.put(found.uri, b"\0" * found.num_bytes)
    manifest = nights.select("night-2", "night-1")
    assert nights.selected("night-2", manifest) == set(ids)
    assert manifest.tally_out.utterances == 18


def test_late_metadata_are_of_the_increment_in_which_they_arrive(nights: Nights) -> None:
    """Streams continue with their latest means; the utterances are counted and named as late."""
    nights.extract("night-1")
    nights.add(3, ["ann"])
    nights.select("night-3", "night-1")
    nights.extract("night-3")
    late = nights.add(2, ["ann", "doris"], part="late")
    nights.add(4, ["ann"])
    manifest = nights.select("night-4", "night-3")
    assert nights.selected("night-4", manifest) >= set(late)
    features = nights.extract("night-4")
    # Doris was not heard before, so that hers are late for nobody.
    assert features.statistics["num_late"] == 3
    assert features.statistics["late_ms"] == sum(round(1000 * (0.5 + n / 10)) for n in (2, 3, 4))
    assert features.tally_out.utterances == 9 + 3 + 6 + 3


def test_what_the_chain_has_selected_is_a_duplicate(nights: Nights) -> None:
    """A record of the same id in a later object is a ledger row, and the counts balance."""
    again = nights.record(1, "ann", 0)
    nights.add(2, SPEAKERS)
    nights.select("night-2", "night-1")
    new = [nights.record(3, "ann", number) for number in range(4)]
    nights.put(3, [again, *new])
    manifest = nights.select("night-3", "night-2")
    assert nights.selected("night-3", manifest) == {each["utterance_id"] for each in new}
    assert manifest.quarantined == Tally(1, round(again["duration_s"] * 1000))
    (ledger,) = own_outputs(manifest.ledgers)
    assert dict(ledger.reasons) == {"duplicate_utterance": 1}
    assert b"an earlier run selected" in read_output(
        nights.store, nights.run_uri("night-3"), ledger
    )


def test_a_changed_object_is_refused(nights: Nights) -> None:
    """The message names the object, both sizes and the remedy."""
    nights.add(1, SPEAKERS, num_each=4)
    with pytest.raises(
        ValueError, match=r"part-0\.jsonl has \d+ bytes, and had \d+ .* new objects"
    ):
        nights.select("night-2", "night-1")


@pytest.mark.parametrize(("day", "settings"), [(2, {}), (1, {"hours": 0.0})])
def test_metadata_that_are_not_listed_any_more_are_refused(
    nights: Nights, day: int, settings: dict[str, float]
) -> None:
    """Those that the first attempt found new; and with more hours, those that the base read."""
    base = nights.select("night-1b", hours=1e-4) and "night-1b" if settings else "night-1"
    nights.add(2, SPEAKERS)
    nights.select("night-2", base, **settings)
    lost = f"date=2026-01-0{day}/speaker_bucket=01/part-0.jsonl"
    nights.store.delete(join_uri(nights.corpus_uri, "metadata", SUBSET, lost))
    with pytest.raises(ValueError, match=rf"the listing lacks 1, such as {lost}: put back"):
        nights.select("night-2", base, **settings)


def test_what_arrives_during_an_increment_waits_for_the_next(nights: Nights) -> None:
    """A second attempt reads what the first one found, whatever has arrived meanwhile."""
    ids = nights.add(2, SPEAKERS)
    first = nights.select("night-2", "night-1")
    later = nights.add(2, ["doris"], part="later")
    assert nights.select("night-2", "night-1") == first
    manifest = nights.select("night-3", "night-2")
    assert nights.selected("night-2", first) == set(ids)
    assert nights.selected("night-3", manifest) == set(later)


def test_a_night_without_metadata_is_an_increment(nights: Nights) -> None:
    """Nothing is selected, extracted or lost; the union is the base."""
    nights.extract("night-1")
    manifest = nights.select("night-2", "night-1")
    assert own_outputs(manifest.outputs) == ()
    assert manifest.tally_out.utterances == 9
    assert nights.extract("night-2").tally_out.utterances == 9
    nights.add(3, SPEAKERS)
    nights.select("night-3", "night-2")
    nights.extract("night-3")
    nights.select("whole")
    nights.extract("whole")
    assert nights.features("night-3") == nights.features("whole")


def test_more_hours_resume_without_what_has_arrived_since(nights: Nights) -> None:
    """A killed increment that reads all again ends as it began; the next takes what is new."""
    root = nights.select("root", hours=3 / 3600)
    run_uri, more = nights.run_uri("more"), {"hours": 6 / 3600}
    record_bases(nights.store, run_uri, nights.run_uri("root"), "all")
    with pytest.raises(KeyboardInterrupt):
        nights.select("more", distribute=until("select from the buckets"), **more)
    whole = nights.select("whole", **more)
    later = nights.add(2, SPEAKERS)
    manifest = nights.select("more", **more)
    assert (manifest.tally_in, manifest.tally_out) == (whole.tally_in, whole.tally_out)
    assert manifest.unselected == whole.unselected
    before = nights.selected("root", root)
    assert nights.selected("more", manifest) == nights.selected("whole", whole) - before
    following = nights.select("next", "more", **more)
    assert nights.selected("next", following) <= set(later)
    assert following.tally_in.utterances == 18


def until(description: str) -> Distribute:
    """Return a loop over tasks that is killed at the second task of a pass."""

    def distribute(elements: Sequence[T], function: Callable[[T], R], name: str) -> list[R]:
        if name != description:
            return serially(elements, function, name)
        function(elements[0])
        raise KeyboardInterrupt

    return distribute


def test_the_same_hours_take_the_same_share(nights: Nights) -> None:
    """The base's last priority holds: the union is what it takes of all metadata, and no more."""
    half = {"hours": 5 / 3600}
    root = nights.select("root", **half)
    ids = nights.add(2, SPEAKERS)
    manifest = nights.select("second", "root", **half)
    last = root.statistics["last_priority"]
    assert manifest.statistics["last_priority"] == last
    everything = nights.select("everything", hours=manifest.tally_out.hours)
    assert everything.statistics["last_priority"] <= last
    assert everything.tally_out == manifest.tally_out
    assert nights.selected("second", manifest) < set(ids)


def test_what_earlier_nights_ingested_is_verified_as_theirs(nights: Nights) -> None:
    """A corpus of several nights has objects of all their ingests, and another is found."""
    store, corpus, known = nights.store, nights.corpus_uri, set[str]()
    for name, extends in (("night-1", ""), ("night-2", "night-1")):
        if extends:
            nights.add(2, SPEAKERS)
            nights.select(name, extends)
        new = [found for found in store.list(corpus) if found.uri not in known]
        known |= {found.uri for found in new}
        keys = {found.uri: found.uri.removeprefix(f"{corpus}/") for found in new}
        ingested = tuple(
            Output(key, len(store.get(uri)), sha256(store.get(uri)), 0, 0)
            for uri, key in keys.items()
        )
        manifest = Manifest("ingest", {}, {}, ingested)
        store.put(manifest_uri(nights.run_uri(name), "ingest"), manifest.to_bytes())
    assert verify_run(store, nights.run_uri("night-2"), corpus, lambda *_: None).findings == ()
    store.put(join_uri(corpus, "notes.txt"), b"mine")
    (finding,) = verify_run(store, nights.run_uri("night-2"), corpus, lambda *_: None).findings
    assert finding.object == join_uri(corpus, "notes.txt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hours": 1 / 3600}, r"selection.hours = 0.000277778: need 0, as the base has"),
        ({"seed": 4}, r"selection/unlabelled was made with other settings: seed: 3 -> 4"),
        (
            {"filters": SelectionFilters(locales=("de",))},
            r"filters.locales: \[\] -> \[de\]|filters.locales",
        ),
        ({"filters": SelectionFilters(max_speaker_hours=1.0)}, r"max_speaker_hours"),
    ],
)
def test_other_settings_are_refused(
    nights: Nights, settings: dict[str, object], message: str
) -> None:
    """The message names the setting, both values and a remedy."""
    with pytest.raises(ValueError, match=message):
        nights.select("night-2", "night-1", **settings)


def test_chains_without_sense_are_refused(nights: Nights) -> None:
    """A run extends one finished run beside it, once, and never itself."""
    store, uri = nights.store, nights.run_uri
    with pytest.raises(ValueError, match="cannot be its own base"):
        record_bases(store, uri("night-1"), uri("night-1"), "all")
    with pytest.raises(ValueError, match=r"need a run in .*, beside .*night-2"):
        record_bases(store, uri("night-2"), join_uri(nights.corpus_uri, "night-1"), "all")
    store.put(join_uri(uri("night-1"), "steps/select_utterances.json"), b"{}")
    with pytest.raises(ValueError, match=r"night-1 has begun without --extends"):
        record_bases(store, uri("night-1"), uri("night-0"), "all")
    record_bases(store, uri("night-2"), uri("night-1"), "all")
    with pytest.raises(
        ValueError, match=r"night-2 has begun with --extends .*night-1.*another --run"
    ):
        record_bases(store, uri("night-2"), uri("night-0"), "all")
    with pytest.raises(ValueError, match=r"night-1 extends .*night-2 extends .*night-1: a cycle"):
        record_bases(store, uri("night-1"), uri("night-2"), "all")
    with pytest.raises(ValueError, match=r"night-0/selection/unlabelled/manifest.json is missing"):
        nights.select("night-3", "night-0")


def test_a_speaker_of_the_bases_held_out_subset_is_refused(nights: Nights) -> None:
    """An increment compares what is new with the subsets that it takes over."""
    nights.select_heldout("night-1", nights.record(1, "doris", 0))
    nights.add(2, ["ann", "doris"])
    night_1, night_2 = map(nights.run_uri, ("night-1", "night-2"))
    record_bases(nights.store, night_2, night_1, "all")
    nights.inherit(night_2, night_1, "selection/heldout")
    with pytest.raises(ValueError, match=r"shares 1 speaker\(s\) with selection/heldout.*'doris'"):
        nights.select("night-2", "night-1")
