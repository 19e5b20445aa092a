"""A later `created_before` admits what lies beyond its base's, and nothing is lost."""

from pathlib import Path
from typing import Never

import pytest

from infra.store.object_store import join_uri
from pipeline.audit.verify import verify_run
from pipeline.filters import SelectionFilters
from pipeline.runs.manifest import own_outputs
from tests.pipeline.steps.increments.nights import Nights

SPEAKERS = ["ann", "bert", "clara"]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """Return a corpus of one night, which no run has selected."""
    found = Nights.at(str(tmp_path))
    found.add(1, SPEAKERS)
    return found


def before_day(day: int) -> dict[str, object]:
    """Return the setting of a selection that ends before a day."""
    return {"filters": SelectionFilters(created_before=f"2026-01-{day:02d}")}


def test_dates_beyond_the_filter_wait(nights: Nights) -> None:
    """With date folders a day after created_before is read by the increment that admits it."""
    nights.add(2, SPEAKERS)
    ids = nights.add(3, SPEAKERS)
    nights.select("root", date_folders=True, **before_day(2))
    nights.select("second", "root", date_folders=True, **before_day(3))
    manifest = nights.select("third", "second", date_folders=True, **before_day(4))
    assert nights.selected("third", manifest) == set(ids)
    assert manifest.tally_in.utterances == manifest.tally_out.utterances == 27


def test_another_attempt_has_the_firsts_dates(nights: Nights) -> None:
    """What it read is recorded: days that only the second attempt admits would be left out."""
    nights.select("root", date_folders=True, **before_day(2))
    nights.add(2, SPEAKERS)
    nights.add(3, SPEAKERS)

    def fails(*_: object) -> Never:
        raise OSError("spark did not start")

    with pytest.raises(OSError, match="spark did not start"):
        nights.select("second", "root", fails, date_folders=True, **before_day(3))
    with pytest.raises(ValueError, match=r"'2026-01-03'.*'2026-01-04'.*set what it had"):
        nights.select("second", "root", date_folders=True, **before_day(4))
    again = nights.select("second", "root", date_folders=True, **before_day(3))
    assert again.tally_out.utterances == 18


def test_a_later_end_brings_back_what_was_read_too_early(nights: Nights) -> None:
    """Without date folders a run reads records of later days, and leaves them for the next ones."""
    nights.add(2, SPEAKERS)
    ids = nights.add(3, SPEAKERS)
    nights.select("root", **before_day(2))
    # The second night has the root's end, and nothing of its own to leave out.
    nights.select("second", "root", **before_day(2))
    third = nights.select("third", "second", **before_day(3))
    assert third.tally_out.utterances == 18
    manifest = nights.select("fourth", "third", **before_day(4))
    assert nights.selected("fourth", manifest) == set(ids)
    assert manifest.tally_in == manifest.tally_out == nights.select("whole").tally_out
    found = verify_run(nights.store, nights.run_uri("fourth"), nights.corpus_uri, lambda *_: None)
    assert found.findings == ()


def test_a_record_in_the_folder_of_an_earlier_day_is_not_lost(nights: Nights) -> None:
    """Its folder was read when it was beyond the end; the increment that admits it reads again."""
    nights.put(1, [nights.record(2, "ann", 0)], part="ahead")
    nights.select("root", date_folders=True, **before_day(2))
    manifest = nights.select("second", "root", date_folders=True, **before_day(3))
    assert nights.selected("second", manifest) == {"ann-02-0"}
    assert manifest.tally_in.utterances == manifest.tally_out.utterances == 10


def test_a_later_end_keeps_the_share(nights: Nights) -> None:
    """With the base's hours its last priority decides on what a later end admits."""
    nights.add(2, SPEAKERS)
    half = {"hours": 3 / 3600}
    root = nights.select("root", **half, **before_day(2))
    manifest = nights.select("second", "root", **half, **before_day(3))
    assert manifest.statistics["last_priority"] == root.statistics["last_priority"]
    everything = nights.select("everything", hours=manifest.tally_out.hours)
    assert everything.tally_out == manifest.tally_out
    assert own_outputs(manifest.outputs)


def test_an_end_that_leaves_nothing_out_reads_nothing_again(nights: Nights) -> None:
    """Objects of earlier nights are not opened where the dates left none of their records out."""
    nights.select("root", **before_day(2))
    ids = nights.add(2, SPEAKERS)
    for found in nights.store.list(join_uri(nights.corpus_uri, "metadata")):
        if "/date=2026-01-01/" in found.uri:
            nights.store.put(found.uri, b"\0" * found.num_bytes)
    manifest = nights.select("second", "root", **before_day(3))
    assert nights.selected("second", manifest) == set(ids)


def test_more_hours_with_an_earlier_end_are_refused(nights: Nights) -> None:
    """Records beyond it are selected, and would count as left out, too."""
    nights.select("root", hours=3 / 3600, **before_day(3))
    with pytest.raises(ValueError, match=r"created_before = '2026-01-02' .* need '2026-01-03'"):
        nights.select("more", "root", hours=4 / 3600, **before_day(2))
