"""Metadata in folders of other days is not read, and what is selected is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.store.object_store import ObjectInfo, ObjectStore, join_uri
from pipeline.audit.verify import verify_run
from pipeline.filters import SelectionFilters
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import bucket_of
from pipeline.steps.selection.buckets import within_dates
from pipeline.steps.selection.select import metadata_uri
from tests.pipeline.steps.selection.test_select import CONFIG, record, select, write_buckets
from tests.small_corpus import local_store

SECOND = SelectionFilters(created_from="2026-01-02", created_before="2026-01-03")
READS_ALL = replace(CONFIG, filters=SECOND)
READS_A_DAY = replace(READS_ALL, date_folders=True)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """Two buckets of three days; `write_buckets` has the n-th day in the n-th object."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    days = [[record(10 * day + each, each, day=day) for each in range(4)] for day in range(3)]
    others = [[record(99 - day, 7, day=day)] for day in range(3)]
    write_buckets(store, corpus_uri, {"00": days, "01": others})
    return store, run_uri, corpus_uri


def files_of(corpus: tuple[ObjectStore, str, str], manifest: Manifest) -> list[bytes]:
    return [read_output(corpus[0], corpus[1], each) for each in manifest.outputs]


def test_objects_of_other_days_are_not_opened(corpus: tuple[ObjectStore, str, str]) -> None:
    """They may hold anything; the files are those of a selection that read all."""
    store, run_uri, corpus_uri = corpus
    everything = select(store, join_uri(run_uri, "whole"), corpus_uri, READS_ALL)
    expected = files_of((store, join_uri(run_uri, "whole"), corpus_uri), everything)
    base = metadata_uri(corpus_uri, "unlabelled")
    for found in store.list(base):
        if "/date=2026-01-02/" not in found.uri:
            store.put(found.uri, b"no metadata")
    manifest = select(store, run_uri, corpus_uri, READS_A_DAY)
    assert files_of(corpus, manifest) == expected
    assert manifest.tally_in.utterances == manifest.tally_out.utterances == 5


def test_a_corpus_below_dated_folders_has_its_own() -> None:
    """A folder above it says nothing, and "no day", 9999-12-31, is a day."""
    base = "s3://bucket/date=2020-01-01/speaker_bucket=07/corpus/metadata/unlabelled"
    days = {"2026-01-02": True, "2026-01-03": False, "9999-12-31": False}
    names = {f"date={day}/speaker_bucket=03/part.jsonl": is_read for day, is_read in days.items()}
    listing = {"bucket-03": [ObjectInfo(f"{base}/{name}", 1, "") for name in (*names, "no.jsonl")]}
    (kept,) = within_dates(listing, base, SECOND).values()
    read = [f"{base}/{name}" for name, is_read in names.items() if is_read]
    assert [each.uri for each in kept] == [*read, f"{base}/no.jsonl"]
    assert bucket_of(read[0]) == "bucket-03"


def test_verify_expects_no_other_day(corpus: tuple[ObjectStore, str, str]) -> None:
    """Late data for a day that was read is a finding, for another day it is none."""
    store, run_uri, corpus_uri = corpus
    select(store, run_uri, corpus_uri, READS_A_DAY)
    base = metadata_uri(corpus_uri, "unlabelled")
    for day, expected in (("01", 0), ("02", 1)):
        late = join_uri(base, f"date=2026-01-{day}/speaker_bucket=00/late.jsonl")
        store.put(late, b"")
        found = verify_run(store, run_uri, corpus_uri, lambda *_: None).findings
        assert [each.object for each in found] == [late] * expected


def test_days_without_a_folder_are_refused(corpus: tuple[ObjectStore, str, str]) -> None:
    """The message names the bounds and the folders; folders that name no day are read."""
    store, run_uri, corpus_uri = corpus
    early = SelectionFilters(created_before="2025-12-31")
    with pytest.raises(ValueError, match=r"before = '2025-12-31': no metadata is in a date="):
        select(store, run_uri, corpus_uri, replace(READS_A_DAY, filters=early))
    base = metadata_uri(corpus_uri, "unlabelled")
    for name in ("date=2026-13-01/a.jsonl", "undated/b.jsonl"):
        store.put(join_uri(base, name), b"")
    manifest = select(store, run_uri, corpus_uri, READS_A_DAY)
    assert len(manifest.inputs) == 2 + 2
