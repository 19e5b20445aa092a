"""No utterance, speaker or audio may be selected for two subsets; metadata has known names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filters import SelectionFilters
from pipeline.runs.engine import Distribute
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import ALL_SUBSETS, selection_step
from pipeline.settings import SelectionConfig
from pipeline.steps.selection import subset_overlap
from pipeline.steps.selection.buckets import require_known_subsets
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.faults.bad_input.small_runs import lines_of, record
from tests.small_corpus import local_store, serially

CONFIG = SelectionConfig(hours=0.0, file_hours=4 / 3600, seed=3)
Run = tuple[ObjectStore, str, str]
PART = "date=2026-01-01/speaker_bucket={bucket}/part-00000.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Four subsets of eight utterances, each of its own four speakers in two buckets."""
    store, run_uri, corpus_uri = local_store(tmp_path)
    for subset in ALL_SUBSETS:
        write(store, corpus_uri, subset, own_records(subset))
    return store, run_uri, corpus_uri


def own_records(subset: str) -> list[tuple[str, str]]:
    return [(f"{subset}-utt-{number}", f"{subset}-spk-{number % 4}") for number in range(8)]


def write(
    store: ObjectStore,
    corpus_uri: str,
    subset: str,
    records: Sequence[tuple[str, str]],
    locales: Mapping[str, str] | None = None,
) -> None:
    """Write utterances of a second, by pairs of utterance and speaker; buckets by speaker."""
    for bucket in "01":
        lines = [
            record(utterance, speaker, 0, locale=(locales or {}).get(utterance, "en-US"))
            for utterance, speaker in records
            if str(int(speaker[-1]) % 2) == bucket
        ]
        uri = join_uri(metadata_uri(corpus_uri, subset), PART.format(bucket=bucket))
        store.put(uri, lines_of(lines))


def select(
    run: Run, subset: str, config: SelectionConfig = CONFIG, distribute: Distribute = serially
) -> None:
    store, run_uri, corpus_uri = run
    uri = metadata_uri(corpus_uri, subset)
    select_utterances(store, run_uri, subset, uri, config, 1.0, distribute)


def is_selected(run: Run, subset: str) -> bool:
    return run[0].exists(manifest_uri(run[1], selection_step(subset)))


@pytest.mark.parametrize(
    "order",
    [
        ("labelled", "unlabelled", "heldout"),
        ("heldout", "labelled", "unlabelled"),
        ("unlabelled", "dev", "labelled"),
        ("heldout", "unlabelled", "dev"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(("kind", "range_utterances"), [("utterance", 3), ("speaker", 20_000_000)])
def test_what_two_subsets_share_is_refused_in_any_order(
    run: Run, order: tuple[str, ...], kind: str, range_utterances: int
) -> None:
    """The later of the two has no manifest; the message counts, and names subset and example."""
    store, _, corpus_uri = run
    first, second, third = order
    shared = {
        "utterance": (f"{first}-utt-5", f"{third}-spk-9"),
        "speaker": (f"{third}-utt-9", f"{first}-spk-2"),
    }[kind]
    write(store, corpus_uri, third, [*own_records(third), shared])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subset_overlap, "_RANGE_UTTERANCES", range_utterances)
        select(run, first)
        select(run, second)
        name = shared[0] if kind == "utterance" else shared[1]
        message = (
            rf"selection/{third} shares 1 {kind}\(s\) with selection/{first}, such as '{name}'"
        )
        with pytest.raises(ValueError, match=message):
            select(run, third)
    assert is_selected(run, second)
    assert not is_selected(run, third)


WHOLE: dict[str, Any] = {}


def put_audio(run: Run, subset: str, audio_uri: str, fields: Mapping[str, Any]) -> None:
    """Write one utterance of a speaker of its own, with this audio."""
    store, _, corpus_uri = run
    line = record(f"{subset}-x", f"{subset}-0", 0, audio_uri=audio_uri) | fields
    uri = join_uri(metadata_uri(corpus_uri, subset), PART.format(bucket="0"))
    store.put(uri, lines_of([line]))


def member(offset: int) -> dict[str, Any]:
    return {"member_offset": offset, "member_bytes": 1000}


def segment(start_s: float, duration_s: float = 1.0) -> dict[str, Any]:
    return {"start_s": start_s, "duration_s": duration_s}


@pytest.mark.parametrize(
    ("uri", "fields", "other_uri", "other_fields", "is_shared"),
    [
        ("a.wav", WHOLE, "a.wav", WHOLE, True),
        ("a.wav", WHOLE, "{corpus}/a.wav", WHOLE, True),
        ("a.wav", WHOLE, "file://{corpus}/a.wav", WHOLE, True),
        ("{corpus}/a.wav", WHOLE, "{corpus}//a.wav", WHOLE, True),
        ("a.wav", WHOLE, "b.wav", WHOLE, False),
        ("s3://bucket/a/x", WHOLE, "s3://bucket/a/x", WHOLE, True),
        ("s3://bucket/a/x", WHOLE, "s3://bucket/a//x", WHOLE, False),  # two keys of S3
        ("s3://bucket/a%20x", WHOLE, "s3://bucket/a x", WHOLE, False),
        ("a.wav", WHOLE, "a.wav", segment(7_000.0), True),
        ("a.wav", segment(2.0), "a.wav", segment(2.99), True),
        ("a.wav", segment(2.0, 9.0), "a.wav", segment(4.0), True),
        ("a.wav", segment(4.0), "a.wav", segment(2.0, 9.0), True),
        ("a.wav", segment(2.0), "a.wav", segment(3.0), False),
        ("a.wav", segment(0.2345, 1.0), "a.wav", segment(1.2345), False),
        ("a.tar", member(512), "a.tar", member(512), True),
        ("a.tar", member(512), "a.tar", member(2048), False),
    ],
)
def test_the_same_audio_under_other_ids_is_refused(
    tmp_path: Path,
    uri: str,
    fields: Mapping[str, Any],
    other_uri: str,
    other_fields: Mapping[str, Any],
    is_shared: bool,
) -> None:
    """However its URI is spelt, by both ids; segments that do not overlap are other audio."""
    _, _, corpus_uri = run = local_store(tmp_path)
    put_audio(run, "labelled", uri.format(corpus=corpus_uri), fields)
    put_audio(run, "heldout", other_uri.format(corpus=corpus_uri), other_fields)
    select(run, "labelled")
    if is_shared:
        said = (
            r"selection/heldout shares the audio of 1 utterance\(s\) with selection/labelled, such "
            r"as '.*', which is 'heldout-x' here and 'labelled-x' there: need"
        )
        with pytest.raises(ValueError, match=said):
            select(run, "heldout")
    else:
        select(run, "heldout")
    assert is_selected(run, "heldout") is not is_shared


def test_overlaps_are_those_of_each_pair() -> None:
    """Of random spans of a few recordings, as found one by one."""
    generator = np.random.default_rng(0)

    def spans(count: int) -> np.ndarray:
        found = np.empty(count, subset_overlap.SPAN)
        found["audio"] = generator.integers(5, size=count) * 2**62
        found["start_ms"] = generator.integers(100_000, size=count)
        found["duration_ms"] = generator.integers(1, 2_000, size=count)
        return found

    def are_shared(one: np.void, two: np.void) -> bool:
        ends = [int(each["start_ms"]) + int(each["duration_ms"]) for each in (one, two)]
        common = min(ends) - max(int(one["start_ms"]), int(two["start_ms"]))
        return bool(one["audio"] == two["audio"]) and common > 1

    own, others = spans(200), spans(100)
    expected = [any(are_shared(one, two) for two in others) for one in own]
    assert 20 < sum(expected) < 180
    assert subset_overlap.overlapping(own, others).tolist() == expected


def test_all_that_is_shared_is_counted(run: Run) -> None:
    """Both kinds with both other subsets, each with its number and an example."""
    store, _, corpus_uri = run
    write(store, corpus_uri, "heldout", [*own_records("labelled"), *own_records("unlabelled")[:1]])
    select(run, "labelled")
    select(run, "unlabelled")
    with pytest.raises(ValueError, match="8 utterance") as refused:
        select(run, "heldout")
    for part in (
        "4 speaker(s) with selection/labelled, such as 'labelled-spk-",
        "8 utterance(s) with selection/labelled, such as 'labelled-utt-",
        "the audio of 8 utterance(s) with selection/labelled, such as 'audio/labelled-utt-",
        "1 speaker(s) with selection/unlabelled, such as 'unlabelled-spk-0'",
        "1 utterance(s) with selection/unlabelled, such as 'unlabelled-utt-0'",
    ):
        assert part in str(refused.value)


def test_a_selection_without_manifest_counts(run: Run) -> None:
    """Of two selections at the same time, neither of which has its manifest, one sees the other."""
    store, run_uri, corpus_uri = run
    write(store, corpus_uri, "heldout", own_records("labelled"))
    select(run, "labelled")
    store.delete(manifest_uri(run_uri, selection_step("labelled")))
    with pytest.raises(ValueError, match="8 utterance"):
        select(run, "heldout")
    with pytest.raises(ValueError, match="8 utterance"):
        select(run, "labelled")


def test_what_is_not_selected_may_be_shared(run: Run) -> None:
    """A filter that leaves out a held-out speaker's records keeps training and test apart."""
    store, _, corpus_uri = run
    shared = ("heldout-utt-1", "heldout-spk-1")
    records = [*own_records("unlabelled"), shared]
    write(store, corpus_uri, "unlabelled", records, {"heldout-utt-1": "fr-FR"})
    select(run, "heldout")
    filters = SelectionFilters(locales=("en-US",))
    select(run, "unlabelled", SelectionConfig(0.0, CONFIG.file_hours, CONFIG.seed, filters))
    assert is_selected(run, "unlabelled")


def test_metadata_of_unknown_name_is_refused(run: Run) -> None:
    """The message names the object and the known suffixes, and nothing is selected."""
    store, run_uri, corpus_uri = run
    for name in (
        *("part.json", "part.ndjson", "part.jsonl.bz2", "part.parquet", "part", "part.JSONL"),
        *("part.jsonl.zst", "_temporary/part.json", "jsonl", "part.jsonl.tmp", "manifest.csv"),
    ):
        uri = join_uri(metadata_uri(corpus_uri, "labelled"), name)
        store.put(uri, b"{}\n")
        message = rf"{name} is no metadata by its name: need .jsonl or .jsonl.gz"
        with pytest.raises(ValueError, match=message):
            select(run, "labelled")
        store.delete(uri)
    assert store.list(run_uri + "/selection") == []


def test_marks_of_writers_are_no_metadata(run: Run) -> None:
    """Marks that Hadoop's writers leave beside their files are passed over."""
    store, _, corpus_uri = run
    for name in ("_SUCCESS", ".part.jsonl.crc", ".hidden", "date=2026_$folder$", "a/_SUCCESS"):
        store.put(join_uri(metadata_uri(corpus_uri, "labelled"), name), b"")
    select(run, "labelled")
    assert is_selected(run, "labelled")


def test_metadata_in_no_subset_is_refused(run: Run) -> None:
    """A misspelt folder would never be read."""
    store, _, corpus_uri = run
    store.put(join_uri(corpus_uri, "metadata", "_SUCCESS"), b"")
    require_known_subsets(store, corpus_uri)
    store.put(join_uri(corpus_uri, "metadata", "labeled", "part.jsonl"), b"{}\n")
    message = "labeled/part.jsonl is in no subset's folder: need .* labelled, unlabelled, heldout"
    with pytest.raises(ValueError, match=message):
        require_known_subsets(store, corpus_uri)


CAP = SelectionFilters(max_speaker_hours=2 / 3600)


@pytest.mark.parametrize(
    ("filters", "locale", "duration_s", "is_refused"),
    [
        (SelectionFilters(), "fr-FR", 1.0, True),
        (SelectionFilters(locales=("en-US",)), "en-US", 1.0, True),
        (SelectionFilters(locales=("en-US",)), "fr-FR", 1.0, False),
        (CAP, "en-US", 1.0, True),
        (CAP, "en-US", 2.5, False),
    ],
)
def test_a_record_that_filters_leave_out_splits_no_speaker(
    tmp_path: Path, filters: SelectionFilters, locale: str, duration_s: float, is_refused: bool
) -> None:
    """A speaker is in two buckets if both hold records of theirs that may be selected."""
    store, _, corpus_uri = run = local_store(tmp_path)
    write(store, corpus_uri, "unlabelled", [("a", "spk-0"), ("b", "spk-1")])
    line = record("c", "spk-0", 0, locale=locale, duration_s=duration_s)
    uri = join_uri(metadata_uri(corpus_uri, "unlabelled"), PART.format(bucket="2"))
    store.put(uri, lines_of([line]))
    config = SelectionConfig(0.0, 1.0, CONFIG.seed, filters)
    if is_refused:
        with pytest.raises(ValueError, match="1 speakers have records in several"):
            select(run, "unlabelled", config)
    else:
        select(run, "unlabelled", config)
    assert is_selected(run, "unlabelled") is not is_refused
