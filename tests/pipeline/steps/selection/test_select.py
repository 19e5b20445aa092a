"""Selection against its definition: whatever the buckets, objects and ranges of hashes."""

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.records import Tally
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import Manifest, Output
from pipeline.sampling import sampling_priority
from pipeline.settings import SelectionConfig
from pipeline.steps.hash_ranges import ENTRY_BYTES
from pipeline.steps.selection.select import file_statistics, metadata_uri, select_utterances
from tests.faults.bad_input import small_runs
from tests.faults.bad_input.small_runs import ledger, lines_of
from tests.small_corpus import local_store, serially

CONFIG = SelectionConfig(hours=0.0, file_hours=1.0, seed=3)
Record = dict[str, Any]
Buckets = Mapping[str, Sequence[Sequence[Record]]]
"""Metadata records, by bucket and object."""


def record(number: int, speaker: int, duration_ms: int = 2000, day: int = 1) -> Record:
    created_at = f"2026-{1 + day // 28:02d}-{1 + day % 28:02d}T12:00:00+00:00"
    changes = {"duration_s": duration_ms / 1000, "created_at": created_at}
    return small_runs.record(f"utt-{number}", f"spk-{speaker}", 0, **changes)


def write_buckets(store: ObjectStore, corpus_uri: str, buckets: Buckets) -> None:
    for bucket, objects in buckets.items():
        for number, records in enumerate(objects):
            key = f"date=2026-01-{number + 1:02d}/speaker_bucket={bucket}/part-00000.jsonl"
            store.put(join_uri(metadata_uri(corpus_uri, "unlabelled"), key), lines_of(records))


def select(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: SelectionConfig,
    distribute: Any = serially,
) -> Manifest:
    uri = metadata_uri(corpus_uri, "unlabelled")
    return select_utterances(store, run_uri, "unlabelled", uri, config, 1.0, distribute).manifest


@contextmanager
def selected(
    buckets: Buckets, config: SelectionConfig, range_bytes: int = 2**31
) -> Iterator[tuple[Manifest, list[Record]]]:
    """The manifest, and the records of all selection files."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.steps.selection.deduplicate._RANGE_BYTES", range_bytes)
        store, run_uri, corpus_uri = local_store(Path(folder))
        write_buckets(store, corpus_uri, buckets)
        manifest = select(store, run_uri, corpus_uri, config)
        yield manifest, ledger(store, run_uri, manifest.outputs)


def defined(buckets: Buckets, config: SelectionConfig) -> dict[str, Record]:
    """Return what selection must select, by utterance id, from one record after the other."""
    filters, eligible = config.filters, {}
    for _, objects in sorted(buckets.items()):
        own: dict[str, Record] = {}
        for each in (each for records in objects for each in records):
            is_long = each["duration_s"] >= filters.min_duration_s
            if is_long and (not filters.locales or each["locale"] in filters.locales):
                own.setdefault(each["utterance_id"], each)
        for utterance_id, each in capped(own, config).items():
            eligible.setdefault(utterance_id, each)
    result, total_ms = {}, 0
    for utterance_id in by_priority(eligible, config):
        if config.budget_ms and total_ms >= config.budget_ms:
            break
        result[utterance_id] = eligible[utterance_id]
        total_ms += round(eligible[utterance_id]["duration_s"] * 1000)
    return result


def by_priority(records: Mapping[str, Record], config: SelectionConfig) -> list[str]:
    return sorted(records, key=lambda each: sampling_priority(config.seed, each))


def capped(records: Mapping[str, Record], config: SelectionConfig) -> dict[str, Record]:
    cap_ms = config.filters.max_speaker_ms
    total_ms: dict[str, int] = defaultdict(int)
    kept = {}
    for utterance_id in by_priority(records, config):
        each = records[utterance_id]
        total_ms[each["speaker_id"]] += round(each["duration_s"] * 1000)
        if not cap_ms or total_ms[each["speaker_id"]] <= cap_ms:
            kept[utterance_id] = each
    return kept


@st.composite
def corpora(draw: st.DrawFn, num_ids: int = 40) -> Buckets:
    """Up to five buckets of one to three objects; utterance ids repeat, speakers are whole."""
    buckets: dict[str, list[list[Record]]] = {
        f"{bucket:02d}": [[] for _ in range(draw(st.integers(1, 3)))]
        for bucket in range(draw(st.integers(1, 5)))
    }
    bucket_of = [draw(st.sampled_from(sorted(buckets))) for _ in range(6)]
    for number in draw(st.lists(st.integers(0, num_ids - 1), min_size=1, max_size=40)):
        speaker = draw(st.integers(0, 5))
        each = record(number, speaker, draw(st.integers(1, 20_000)))
        each["locale"] = draw(st.sampled_from(["en-US", "de-DE"]))
        draw(st.sampled_from(buckets[bucket_of[speaker]])).append(each)
    return buckets


@given(corpora(), st.data(), st.sampled_from([500, 2**31]))
@settings(max_examples=60, deadline=None)
def test_selection_is_what_its_definition_says(
    buckets: Buckets, data: st.DataObject, range_bytes: int
) -> None:
    """Against the definition, record by record: filters, duplicates, cap and budget together."""
    filters = SelectionFilters(
        locales=data.draw(st.sampled_from([(), ("en-US",)])),
        min_duration_s=data.draw(st.sampled_from([0.0, 3.0])),
        max_speaker_hours=data.draw(st.sampled_from([0.0, 15 / 3600])),
    )
    config = replace(CONFIG, filters=filters, file_hours=10 / 3600)
    all_ms = sum(round(each["duration_s"] * 1000) for each in defined(buckets, config).values())
    if not all_ms:
        return
    config = replace(config, hours=data.draw(st.integers(0, all_ms)) / 3_600_000)
    expected = defined(buckets, config)
    with selected(buckets, config, range_bytes) as (manifest, records):
        assert {each["utterance_id"]: each for each in records} == expected
        assert len(records) == len(expected)
        everything = [each for objects in buckets.values() for some in objects for each in some]
        total_ms = sum(round(each["duration_s"] * 1000) for each in everything)
        assert manifest.tally_in == Tally(len(everything), total_ms)
        reasons = manifest.statistics["unselected"].values()
        assert sum(reason["utterances"] for reason in reasons) == manifest.unselected.utterances
        assert sum(reason["duration_ms"] for reason in reasons) == manifest.unselected.duration_ms
        assert all(reason["utterances"] >= 0 for reason in reasons)


def test_files_hold_whole_speakers_in_stream_order() -> None:
    """Eight buckets together make some fifty files within 5 %, though one makes only six."""
    generator = np.random.default_rng(0)
    buckets: dict[str, list[list[Record]]] = {f"{each:02d}": [[]] for each in range(8)}
    for number, duration_ms in enumerate(generator.integers(300, 9_000, 3000).tolist()):
        speaker, day = number % 400, number * 7 % 40
        buckets[f"{speaker % 8:02d}"][0].append(record(number, speaker, duration_ms, day))
    with selected(buckets, replace(CONFIG, file_hours=0.08)) as (manifest, chosen):
        files = manifest.statistics["files"]
    assert files["num_files"] == len(manifest.outputs) > 40
    assert files["lone_speakers"] == [] or files["imbalance"] > 1.05
    order = [each["speaker_id"] for each in chosen]
    assert len([speaker for speaker, _ in groupby(order)]) == len(set(order))
    for _, own in groupby(chosen, lambda each: each["speaker_id"]):
        stream = [each["created_at"] for each in own]
        assert stream == sorted(stream)


@pytest.mark.parametrize(
    ("durations_ms", "alone_ms", "imbalance", "lone_speakers"),
    [
        ((), {}, 1.0, []),
        ((105, 95), {"b": 105, "a": 95}, 1.05, []),
        ((106, 94), {"b": 106, "a": 94}, 1.06, ["b"]),
        ((150, 150, 60, 40), {"b": 150, "a": 150}, 1.5, ["a", "b"]),
        ((4_000, 3_000, 1_000), {"a": 4_000}, 1.5, ["a"]),
    ],
)
def test_a_speaker_is_lone_beyond_1_05_of_the_mean(
    durations_ms: Sequence[int],
    alone_ms: Mapping[str, int],
    imbalance: float,
    lone_speakers: Sequence[str],
) -> None:
    """105 % of the mean is still within; names are in order; hours have six digits."""
    outputs = tuple(Output(f"{each}", 1, "", 1, ms) for each, ms in enumerate(durations_ms))
    tally = Tally.of(outputs)
    made = Manifest("selection/x", {}, {}, outputs, tally_in=tally, tally_out=tally)
    assert file_statistics(made, alone_ms) == {
        "num_files": len(durations_ms),
        "mean_hours": round(tally.hours / max(1, len(durations_ms)), 6),
        "imbalance": imbalance,
        "lone_speakers": lone_speakers,
    }


def test_an_utterance_in_two_buckets_is_kept_by_the_first(tmp_path: Path) -> None:
    """By name, selected or not; the other row is in the ledger and all counts balance."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    buckets = {
        "01": [[record(number, 1, 3000) for number in range(20)]],
        "00": [[record(number, 0, 2000) for number in range(10, 30)]],
    }
    write_buckets(store, corpus_uri, buckets)
    manifest = select(store, run_uri, corpus_uri, replace(CONFIG, hours=20 / 3600))
    assert ledger_reasons(manifest.ledgers) == {"duplicate_utterance": 10}
    assert manifest.quarantined == Tally(10, 30_000)
    assert manifest.tally_in == Tally(40, 100_000)
    lost = [row["utterance_id"] for row in ledger(store, run_uri, manifest.ledgers)]
    assert sorted(lost) == sorted(f"utt-{number}" for number in range(10, 20))


def test_lists_of_duplicates_grow_with_the_duplicates_alone(tmp_path: Path) -> None:
    """Eight bytes each, however many buckets hold the same records, and an entry a bucket."""
    num_bytes = {}
    for num_buckets in (2, 8):
        store, run_uri, corpus_uri = local_store(tmp_path / f"of-{num_buckets}")
        names = range(num_buckets)
        # Each record is in the bucket that follows its own, too.
        buckets = {
            f"{name:02d}": [
                [record(number, name) for number in range(name, 96, num_buckets)],
                [record(n, 100 + name) for n in range(names[name - 1], 96, num_buckets)],
            ]
            for name in names
        }
        write_buckets(store, corpus_uri, buckets)
        assert select(store, run_uri, corpus_uri, CONFIG).quarantined.utterances == 96
        listed = [each for each in store.list(run_uri) if each.uri.endswith(".duplicates")]
        num_bytes[num_buckets] = sum(each.num_bytes for each in listed)
    assert num_bytes == {each: 8 * 96 + ENTRY_BYTES * each for each in (2, 8)}


def test_reasons_for_leaving_out_are_counted() -> None:
    """One of each filter, the cap, and the budget: to the utterance and millisecond."""
    records = [record(number, 0, 1000) for number in range(10)]
    records += [record(number, 1, 1000) for number in range(10, 14)]
    others = [record(number, 2, 7000) for number in range(20, 24)]
    others[0]["locale"] = "fr-FR"
    others[1]["duration_s"] = 0.2
    others[2]["created_at"] = "2025-12-31T23:59:59+00:00"
    others[3]["created_at"] = "2026-01-01T00:59:59+01:00"
    filters = SelectionFilters(
        locales=("en-US",),
        min_duration_s=0.5,
        created_from="2026-01-01",
        max_speaker_hours=6.5 / 3600,
    )
    config = replace(CONFIG, hours=7 / 3600, filters=filters)
    with selected({"00": [records], "01": [others]}, config) as (manifest, chosen):
        counts = {
            reason: (tally["utterances"], tally["duration_ms"])
            for reason, tally in manifest.statistics["unselected"].items()
        }
    assert counts == {
        "locale": (1, 7000),
        "duration_s": (1, 200),
        "created_at": (2, 14_000),
        "max_speaker_hours": (4, 4000),
        "over_budget": (3, 3000),
    }
    assert len(chosen) == manifest.tally_out.utterances == 7


def test_filters_and_budget_are_for_the_unlabelled_subset(tmp_path: Path) -> None:
    """Labelled speech is rare and taken whole."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    config = replace(CONFIG, hours=1 / 3600, filters=SelectionFilters(locales=("xx",)))
    uri = metadata_uri(corpus_uri, "labelled")
    key = "date=2026-01-01/speaker_bucket=00/part-00000.jsonl"
    store.put(join_uri(uri, key), lines_of([record(number, 0) for number in range(5)]))
    manifest = select_utterances(store, run_uri, "labelled", uri, config, 0.0, serially).manifest
    assert manifest.tally_out == manifest.tally_in == Tally(5, 10_000)


def test_filters_that_leave_nothing_are_refused() -> None:
    """The message says which filter left out how many."""
    config = replace(CONFIG, filters=SelectionFilters(locales=("xx",)))
    message = r"filters leave none of 2 records \(left out by {'locale': 2}\): loosen"
    with (
        pytest.raises(ValueError, match=message),
        selected({"00": [[record(1, 1), record(2, 2)]]}, config),
    ):
        pass


def test_too_large_a_budget_names_the_hours_there_are() -> None:
    """The hours are those that filters and duplicates leave."""
    config = replace(CONFIG, hours=2.0)
    hour = [record(number, 0, 1_800_000) for number in (1, 2)]
    twice = {"00": [hour], "01": [[{**hour[0], "speaker_id": "spk-1"}]]}
    message = r"budget = 2\.00 h: need at most 1\.00 h"
    with pytest.raises(ValueError, match=message), selected(twice, config):
        pass


def test_the_driver_gets_nothing_by_utterance(tmp_path: Path) -> None:
    """Tasks return as much for 2,000 records as for 20, in as many objects."""
    sizes = []
    for num_each in (5, 500):
        store, run_uri, corpus_uri = local_store(tmp_path / str(num_each))
        records = [
            [record(4 * each + number, number) for each in range(num_each)] for number in range(4)
        ]
        write_buckets(store, corpus_uri, {f"{each:02d}": [records[each]] for each in range(4)})
        received: dict[str, int] = {}

        def weighing(elements, function, description, received=received):
            results = serially(elements, function, description)
            received[description] = len(pickle.dumps(results))
            return results

        select(store, run_uri, corpus_uri, replace(CONFIG, hours=20 / 3600), weighing)
        sizes.append(received)
    assert sizes[0].keys() == sizes[1].keys()
    for description, size in sizes[0].items():
        assert sizes[1][description] <= 1.02 * size + 50, description


def test_metadata_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    """A record that appears between two passes would be in no count."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_buckets(store, corpus_uri, {"00": [[record(1, 1)]]})

    def meddling(elements, function, description):
        if description == "index the buckets":
            write_buckets(store, corpus_uri, {"00": [[record(1, 1), record(2, 2)]]})
        return serially(elements, function, description)

    with pytest.raises(ValueError, match=r"part-00000.jsonl.* changed during the selection"):
        select(store, run_uri, corpus_uri, CONFIG, meddling)


def test_indexing_resumes_where_it_stopped(tmp_path: Path) -> None:
    """Surveyed buckets are not read again, and the manifest is that of an undisturbed run."""
    runs = [local_store(tmp_path / name) for name in ("broken", "whole")]
    for store, _, corpus_uri in runs:
        write_buckets(
            store, corpus_uri, {f"{each:02d}": [[record(each, each)]] for each in range(6)}
        )
    indexed = Counter[str]()

    def breaking(elements, function, description):
        if description == "index the buckets":
            indexed.update(element.bucket.name for element in elements)
            if len(elements) == 6:
                serially(elements[:4], function, description)
                raise KeyboardInterrupt
        return serially(elements, function, description)

    with pytest.raises(KeyboardInterrupt):
        select(*runs[0], CONFIG, breaking)
    made = select(*runs[0], CONFIG, breaking)
    assert sorted(indexed.values()) == [1, 1, 1, 1, 2, 2]
    assert made.to_bytes() == select(*runs[1], CONFIG).to_bytes()


def test_scratch_is_apart_from_what_the_manifest_names(tmp_path: Path) -> None:
    """All that no manifest or commit of the step names lies below `scratch/`, for `verify`."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    write_buckets(store, corpus_uri, {"00": [[record(1, 1)]], "01": [[record(2, 2)]]})
    manifest = select(store, run_uri, corpus_uri, replace(CONFIG, hours=3 / 3600))
    step = join_uri(run_uri, "selection/unlabelled")
    stored = (*manifest.outputs, *manifest.id_index)
    named = {join_uri(run_uri, output.key) for output in stored}
    others = {found.uri.removeprefix(f"{step}/") for found in store.list(step)}
    others -= {uri.removeprefix(f"{step}/") for uri in named}
    assert {each.split("/")[0] for each in others} == {"scratch", "commits", "manifest.json"}
