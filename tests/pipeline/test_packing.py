import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.packing import balance, pack_speakers

HOUR_MS = 3_600_000
SPEAKERS = st.dictionaries(st.text(max_size=4), st.integers(1, 30 * HOUR_MS), max_size=40)
FILE_HOURS = st.floats(0.1, 20)


def many_speakers(num_speakers: int = 3000) -> dict[str, int]:
    hours = np.random.default_rng(0).lognormal(-2, 1, num_speakers)
    return {f"spk-{number}": int(each * HOUR_MS) for number, each in enumerate(hours)}


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
    """The greedy bound: the last speaker went to a file that was below the mean."""
    files = pack_speakers(durations, file_hours)
    result = balance(files, durations)
    for file in files:
        shortest_ms = min(durations[speaker] for speaker in file)
        assert sum(durations[speaker] for speaker in file) <= result.mean_ms + shortest_ms


@given(SPEAKERS, FILE_HOURS)
def test_the_order_of_speakers_does_not_matter(
    durations: dict[str, int], file_hours: float
) -> None:
    """A retried task packs as the first attempt did."""
    backwards = dict(reversed(durations.items()))
    assert pack_speakers(durations, file_hours) == pack_speakers(backwards, file_hours)


def test_files_are_nearly_equal() -> None:
    """Many speakers in files of five hours: the largest is within 5 % of the mean (IV-A3)."""
    durations = many_speakers()
    files = pack_speakers(durations, 5.0)
    result = balance(files, durations)
    assert result.imbalance < 1.05
    assert result.lone_speakers == ()
    assert result.mean_ms == pytest.approx(5 * HOUR_MS, rel=0.02)


def test_a_long_speaker_is_alone_and_reported() -> None:
    """One speaker of 40 hours cannot be split; the report says who it is."""
    durations = many_speakers() | {"marathon": 40 * HOUR_MS}
    files = pack_speakers(durations, 5.0)
    assert ["marathon"] in files
    result = balance(files, durations)
    assert result.lone_speakers == ("marathon",)
    assert result.imbalance > 1.05


def test_few_speakers_make_few_files() -> None:
    """Three speakers fill at most three files."""
    durations = {"a": 9 * HOUR_MS, "b": HOUR_MS, "c": HOUR_MS}
    assert pack_speakers(durations, 0.5) == [["a"], ["b"], ["c"]]


def test_no_speakers_make_no_files() -> None:
    """Nothing to pack is nothing."""
    assert pack_speakers({}, 5.0) == []
    assert balance([], {}).imbalance == 1.0


@pytest.mark.parametrize("file_hours", [0.0, -1.0, float("nan")])
def test_a_file_has_a_positive_length(file_hours: float) -> None:
    """The error names the value."""
    with pytest.raises(ValueError, match=r"file_hours = .*: need more than 0"):
        pack_speakers({"a": 1}, file_hours)
