from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.packing import MAX_IMBALANCE, group_buckets, pack_speakers, runs_by_bytes

HOUR_MS = 3_600_000
SPEAKERS = st.dictionaries(st.text(max_size=4), st.integers(1, 30 * HOUR_MS), max_size=40)
FILE_HOURS = st.floats(0.1, 20)


def loads_of(files: Sequence[Sequence[str]], durations: Mapping[str, int]) -> list[int]:
    return [sum(durations[speaker] for speaker in file) for file in files]


@given(SPEAKERS, FILE_HOURS)
def test_every_speaker_is_in_one_file(durations: dict[str, int], file_hours: float) -> None:
    """Speakers are whole, once each, and no file is empty."""
    files = pack_speakers(durations, file_hours)
    assert sorted(speaker for file in files for speaker in file) == sorted(durations)
    assert all(files)


@given(SPEAKERS, FILE_HOURS)
def test_no_file_exceeds_the_mean_by_a_speaker(
    durations: dict[str, int], file_hours: float
) -> None:
    """The greedy bound: the last speaker went to a file that was below the mean of the shared."""
    target_ms = file_hours * HOUR_MS
    files = pack_speakers(durations, file_hours)
    shared = [file for file in files if durations[file[0]] <= target_ms]
    loads_ms = loads_of(shared, durations)
    for file, load_ms in zip(shared, loads_ms, strict=True):
        assert load_ms <= mean(loads_ms) + min(durations[speaker] for speaker in file)


@given(SPEAKERS, FILE_HOURS)
def test_speakers_longer_than_a_file_are_alone(
    durations: dict[str, int], file_hours: float
) -> None:
    """They come first, the longest before the others; beside them no file is overfilled."""
    target_ms = file_hours * HOUR_MS
    files = pack_speakers(durations, file_hours)
    lone = [file for file in files if durations[file[0]] > target_ms]
    assert files[: len(lone)] == lone
    assert all(len(file) == 1 for file in lone)
    shared = files[len(lone) :]
    if lone and shared:
        assert mean(loads_of(shared, durations)) <= target_ms * (1 + 1 / 80) + 1


def test_a_lone_speaker_leaves_the_others_files_as_long_as_asked_for() -> None:
    """200 hours of which one speaker has 100: 20 files of five hours, not 39 of two and a half."""
    durations = {f"spk-{number:03}": HOUR_MS for number in range(100)} | {"long": 100 * HOUR_MS}
    lone, *others = pack_speakers(durations, 5.0)
    assert lone == ["long"]
    assert [len(file) for file in others] == [5] * 20


@pytest.mark.parametrize(
    ("hours", "alone", "num_files"),
    [
        *((1, 0, 1), (7, 0, 1), (8, 0, 2), (12, 0, 2), (13, 0, 3)),
        *((100, 6, 21), (101, 6, 21), (102, 6, 22), (3, 6, 2)),
    ],
)
def test_the_number_of_files_is_rounded(hours: int, alone: int, num_files: int) -> None:
    """As many files of five hours as come nearest to the hours, and at least one.

    Beside a speaker that is longer than a file, the others exceed theirs by 1.25 % at most.
    """
    durations = {f"spk-{number:03}": HOUR_MS for number in range(hours)}
    durations |= {"long": alone * HOUR_MS} if alone else {}
    assert len(pack_speakers(durations, 5.0)) == num_files


def test_the_longest_speaker_goes_first_to_the_shortest_file() -> None:
    """Speakers and files of equal length in their order; one as long as a file is not yet alone."""
    hours = {"d": 1, "a": 4, "c": 2, "b": 2, "e": 1}
    durations = {name: each * HOUR_MS for name, each in hours.items()}
    assert pack_speakers(durations, 5.0) == [["a", "d"], ["b", "c", "e"]]
    durations = {"a": 5 * HOUR_MS, "b": 3 * HOUR_MS, "c": 2 * HOUR_MS, "d": 2 * HOUR_MS}
    assert pack_speakers(durations, 5.0) == [["a", "d"], ["b", "c"]]
    durations["a"] += 1
    assert pack_speakers(durations, 5.0) == [["a"], ["b"], ["c", "d"]]


@given(SPEAKERS, FILE_HOURS)
def test_the_order_of_speakers_does_not_matter(
    durations: dict[str, int], file_hours: float
) -> None:
    """A retried task packs as the first attempt did."""
    backwards = dict(reversed(durations.items()))
    assert pack_speakers(durations, file_hours) == pack_speakers(backwards, file_hours)


def test_no_speakers_make_no_files() -> None:
    """Nothing to pack is nothing."""
    assert pack_speakers({}, 5.0) == []


def test_a_group_is_closed_when_it_makes_40_files() -> None:
    """Files of an hour: 40 hours are a group, a millisecond less is none; a rest joins the last."""
    enough = 40 * HOUR_MS
    assert group_buckets([enough, enough, enough], 1.0) == [range(1), range(1, 2), range(2, 3)]
    assert group_buckets([enough - 1, 1, enough], 1.0) == [range(2), range(2, 3)]
    assert group_buckets([enough, enough, enough - 1], 1.0) == [range(1), range(1, 3)]
    assert group_buckets([enough - 1, 0], 1.0) == [range(2)]
    assert group_buckets([enough], 1.0) == [range(1)]


@given(st.lists(st.integers(0, 300 * HOUR_MS), min_size=1, max_size=60), FILE_HOURS)
def test_groups_are_neighbours_and_large(durations_ms: list[int], file_hours: float) -> None:
    """Each bucket in one group, in order; a group makes 40 files unless it is the only one."""
    groups = group_buckets(durations_ms, file_hours)
    assert [bucket for group in groups for bucket in group] == list(range(len(durations_ms)))
    for group in groups:
        group_ms = sum(durations_ms[bucket] for bucket in group)
        assert len(groups) == 1 or group_ms >= 40 * file_hours * HOUR_MS


@given(
    seed=st.integers(0, 2**32 - 1),
    num_buckets=st.integers(1, 60),
    speakers_per_file=st.floats(40, 300),
    spread=st.floats(0, 2),
    num_files=st.floats(20, 300),
    is_pareto=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_files_of_all_groups_are_nearly_equal(
    seed: int,
    num_buckets: int,
    speakers_per_file: float,
    spread: float,
    num_files: float,
    is_pareto: bool,
) -> None:
    """Log-normal or Zipf-like speakers, 40 and more a file: at most 1.05 times the global mean."""
    generator = np.random.default_rng(seed)
    num_speakers = int(speakers_per_file * num_files)
    tail = generator.pareto(1.2, num_speakers) + 0.1
    hours = tail if is_pareto else generator.lognormal(0, spread, num_speakers)
    speakers_ms = np.maximum(1, hours * (5 * HOUR_MS * num_files / hours.sum())).astype(int)
    buckets: list[dict[str, int]] = [{} for _ in range(num_buckets)]
    for number, bucket in enumerate(generator.integers(0, num_buckets, num_speakers)):
        buckets[bucket][f"spk-{number}"] = int(speakers_ms[number])
    groups = group_buckets([sum(bucket.values()) for bucket in buckets], 5.0)
    loads_ms, shared_ms = [], [0]
    for group in groups:
        durations = {name: ms for each in group for name, ms in buckets[each].items()}
        files = pack_speakers(durations, 5.0)
        loads_ms += loads_of(files, durations)
        shared_ms += loads_of([file for file in files if len(file) > 1], durations)
    assert sum(loads_ms) == sum(map(sum, (each.values() for each in buckets)))
    assert max(shared_ms) <= MAX_IMBALANCE * mean(loads_ms)


@given(st.lists(st.integers(0, 9)), st.integers(1, 20), st.integers(1, 5))
def test_runs_are_as_long_as_bytes_and_number_allow(
    sizes: list[int], most_bytes: int, most: int
) -> None:
    """Together they are the list; only an element alone has more bytes, and none could be added."""
    runs = [sizes[run] for run in runs_by_bytes(sizes, most_bytes, most)]
    assert [size for run in runs for size in run] == sizes
    assert all(len(run) == 1 or sum(run) <= most_bytes for run in runs)
    assert all(0 < len(run) <= most for run in runs)
    for run, following in pairwise(runs):
        assert len(run) == most or sum(run) + following[0] > most_bytes
