"""Streams' means are kept for later runs, however they are cut, and whatever task is repeated."""

from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import join_uri
from pipeline.normalization.causal_mean import (
    STREAM,
    StreamMeans,
    latest_means,
    means_from_bytes,
    means_to_bytes,
)
from pipeline.runs.ledger import find_lost_rows, take_back
from pipeline.runs.manifest import read_output
from pipeline.steps import stream_means
from tests.pipeline.steps.increments.nights import SUBSET, Nights

SPEAKERS = ["ann", "bert", "clara", "doris"]


def kept(nights: Nights, name: str) -> StreamMeans:
    """Return all streams that a run's features keep."""
    outputs = nights.extract(name).stream_means
    read = (read_output(nights.store, nights.run_uri(name), each) for each in outputs)
    return latest_means([means_from_bytes(data) for data in read])


def means(hashes: list[int], counts: list[int]) -> StreamMeans:
    """Make streams whose sums are their counts."""
    found = np.empty(len(hashes), STREAM)
    found["hash"], found["count"], found["ended_us"] = hashes, counts, counts
    found["sum"] = np.array(counts, np.float64)[:, np.newaxis]
    return found


@pytest.mark.parametrize(
    ("ranges", "merged"), [((1, 4), 1), ((4, 1), 64), ((3, 5), 2), ((5, 3), 1)]
)
def test_nights_may_have_other_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: tuple[int, int], merged: int
) -> None:
    """As a chain grows, its streams are cut into more ranges; none is lost or doubled.

    How many of them a task merges changes nothing.
    """
    monkeypatch.setattr(stream_means, "MERGED_RANGES", merged)
    nights = Nights.at(str(tmp_path))
    numbers = iter((*ranges, 1))
    monkeypatch.setattr(stream_means, "num_means_ranges", lambda _: next(numbers))
    nights.add(1, SPEAKERS, num_each=1)
    nights.select("night-1")
    assert len(nights.extract("night-1").stream_means) == ranges[0]
    nights.add(2, ["ann", "emil"], num_each=1)
    nights.select("night-2", "night-1")
    assert len(nights.extract("night-2").stream_means) == ranges[1]
    nights.select("whole")
    whole, chain = kept(nights, "whole"), kept(nights, "night-2")
    np.testing.assert_array_equal(chain["hash"], whole["hash"])
    np.testing.assert_array_equal(chain["sum"], whole["sum"])
    np.testing.assert_array_equal(chain["ended_us"], whole["ended_us"])


@pytest.mark.usefixtures("quick_decisions")
def test_a_retried_task_is_in_the_means(tmp_path: Path) -> None:
    """After audio has come back, the means are those of a run that could read it at once."""
    nights = Nights.at(str(tmp_path))
    ids = nights.add(1, SPEAKERS)
    lost = join_uri(nights.corpus_uri, f"audio/{ids[1]}.flac")
    audio = nights.store.get(lost)
    nights.store.delete(lost)
    nights.select("run")
    assert nights.extract("run").quarantined.utterances == 1
    nights.store.put(lost, audio)
    step = f"features/{SUBSET}"
    rows = find_lost_rows(nights.store, nights.run_uri("run"), step, ["missing_object"])
    take_back(nights.store, nights.run_uri("run"), rows)
    nights.select("undisturbed")
    expected = kept(nights, "undisturbed")
    np.testing.assert_array_equal(kept(nights, "run")["count"], expected["count"])
    np.testing.assert_array_equal(kept(nights, "run")["sum"], expected["sum"])


def test_of_two_states_the_later_is_kept() -> None:
    """The parts come in the order of time; streams stay in the order of their hashes."""
    found = latest_means([means([1, 5, 9], [10, 50, 90]), means([5, 7], [55, 70])])
    assert found["hash"].tolist() == [1, 5, 7, 9]
    assert found["count"].tolist() == found["sum"][:, 0].tolist() == [10, 55, 70, 90]
    assert means_to_bytes(latest_means([])) == b""


def test_bytes_of_no_number_of_streams_are_refused() -> None:
    """The message has the length, and that of a stream."""
    data = means_to_bytes(means([1, 2], [3, 4]))
    assert len(data) == 2 * STREAM.itemsize
    assert means_to_bytes(means_from_bytes(data)) == data
    with pytest.raises(
        ValueError, match=rf"{len(data) - 1} bytes .* multiple of {STREAM.itemsize}"
    ):
        means_from_bytes(data[:-1])
