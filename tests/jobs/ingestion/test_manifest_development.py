"""Of manifests' labelled speakers a share, by a hash of each id alone, is for development."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.records import Tally
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALL_SUBSETS
from pipeline.sampling import sampling_priority
from pipeline.steps.selection.buckets import subsets_of
from tests.job_programs import Said
from tests.jobs.ingestion.manifest_corpus import Corpus, tree, write_lines

pytestmark = pytest.mark.usefixtures("without_spark")

SHARE = 0.25
SPEAKERS = [f"s{number:02d}" for number in range(40)]


def rows(speakers: Iterable[str], day: int = 1) -> list[dict[str, Any]]:
    """Two transcribed utterances a speaker, on a day."""
    return [
        {
            "utterance_id": f"{speaker}-{day}-{number}",
            "speaker": speaker,
            "audio_filepath": f"audio/{speaker}.wav",
            "duration": 1.0 + number,
            "text": "yes",
            "created_at": f"2026-01-0{day}T12:00:00+00:00",
        }
        for speaker in speakers
        for number in range(2)
    ]


def written(corpus: Corpus, name: str, lines: Sequence[dict[str, Any]]) -> str:
    """Write a manifest, and audio that no test decodes."""
    for line in lines:
        (corpus.audio.parent / line["audio_filepath"]).touch()
    return write_lines(corpus.audio.parent / name, lines)


def speakers_of(corpus: Corpus, subset: str) -> set[str]:
    return {record.speaker_id for record in corpus.records(subset)}


def drawn(share: float) -> set[str]:
    """The speakers whose hash, which also ranks those of Kaldi directories, is below the share."""
    return {speaker for speaker in SPEAKERS if sampling_priority(0, speaker) < share * 2**64}


def three_subsets(corpus: Corpus) -> list[str]:
    """Name manifests of labelled, unlabelled and held-out speech; two labelled rows are refused."""
    bad = [{**row, "text": ""} for row in rows(["s00", "s01"], day=2)[::2]]
    given = {
        "labelled": [*rows(SPEAKERS), *bad],
        "unlabelled": rows(f"u{number}" for number in range(20)),
        "heldout": rows(f"h{number}" for number in range(20)),
    }
    named = [
        f"{subset}={written(corpus, f'{subset}.jsonl', lines)}" for subset, lines in given.items()
    ]
    return [part for each in named for part in ("--manifest", each)]


def test_a_share_of_the_labelled_speakers(corpus: Corpus) -> None:
    """Whole speakers go to `dev`, of no other subset; each utterance is counted once."""
    manifest = corpus.ingest(*three_subsets(corpus), "--dev-share", str(SHARE))
    assert speakers_of(corpus, "dev") == drawn(SHARE)
    assert speakers_of(corpus, "labelled") == set(SPEAKERS) - drawn(SHARE)
    assert 5 < len(drawn(SHARE)) < 15
    assert len(corpus.records("unlabelled")) == len(corpus.records("heldout")) == 40
    assert all(record.text == "yes" for record in corpus.records("dev"))
    assert manifest.tally_in.utterances == 82 + 40 + 40
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined
    assert manifest.quarantined.utterances == len(corpus.ledger()) == 2
    num_dev = 2 * len(drawn(SHARE))
    counts = {"dev": num_dev, "heldout": 40, "labelled": 80 - num_dev, "unlabelled": 40}
    assert manifest.statistics == {"utterances": counts}
    assert manifest.config["dev_share"] == SHARE
    assert subsets_of(corpus.store, f"{corpus.run_uri}/corpus") == ALL_SUBSETS


def test_without_a_share_no_speaker_is_set_apart(corpus: Corpus) -> None:
    """All labelled speakers remain labelled, and there is no development subset."""
    corpus.ingest(*three_subsets(corpus))
    assert not any("/dev/" in key for key in tree(corpus))
    assert speakers_of(corpus, "labelled") == set(SPEAKERS)


@pytest.mark.parametrize(
    ("is_drawn", "message"),
    [
        (False, "dev_share = 0.25: by their hashes no labelled speaker is in dev: give a larger"),
        (True, "dev_share = 0.25: by their hashes no labelled speaker is in labelled: give a smal"),
    ],
)
def test_a_share_that_leaves_a_subset_empty_is_refused(
    corpus: Corpus, is_drawn: bool, message: str
) -> None:
    """Each speaker is drawn alone, so few may all be drawn alike; the remedy is named."""
    one = next(speaker for speaker in SPEAKERS if (speaker in drawn(SHARE)) == is_drawn)
    uri = written(corpus, "m.jsonl", rows([one]))
    said = corpus.job("ingest", "--manifest", f"labelled={uri}", "--dev-share", str(SHARE))
    assert said.code == 1
    assert message in said.err
    assert "or a manifest dev=URI in its place, and a new --run" in said.err


def in_chain(corpus: Corpus, run: str, *options: str) -> Said:
    """Ingest into the corpus that a chain of runs shares, beside these."""
    folder = corpus.audio.parent
    corpus.run_uri = str(folder / "runs" / run)
    return corpus.job("ingest", "--set", f'corpus.uri="{folder}/corpus"', *options)


def spoken(corpus: Corpus, subset: str) -> dict[str, set[str]]:
    """Return the shared corpus's utterances of a subset by speaker."""
    found: dict[str, set[str]] = defaultdict(set)
    for record in corpus.records_at(f"{corpus.audio.parent}/corpus", subset):
        found[record.speaker_id].add(record.utterance_id)
    return found


def test_an_increment_leaves_speakers_where_they_are(corpus: Corpus) -> None:
    """A new day of known and of new speakers: each is in one subset, as the hash has it."""
    share = ("--dev-share", str(SHARE))
    first = written(corpus, "1.jsonl", rows(SPEAKERS[:30]))
    second = written(corpus, "2.jsonl", rows(SPEAKERS, day=2))
    assert in_chain(corpus, "1", "--manifest", f"labelled={first}", *share).code == 0
    before = {subset: spoken(corpus, subset) for subset in ("labelled", "dev")}
    extends = ("--extends", corpus.run_uri)
    said = in_chain(corpus, "2", "--manifest", f"labelled={second}", *share, *extends)
    assert said.code == 0, said.err
    after = {subset: spoken(corpus, subset) for subset in ("labelled", "dev")}
    assert set(after["dev"]) == drawn(SHARE)
    assert set(after["labelled"]) == set(SPEAKERS) - drawn(SHARE)
    for subset, speakers in before.items():
        assert speakers.keys() == after[subset].keys() & set(SPEAKERS[:30])
        for speaker, utterances in speakers.items():
            added = {f"{speaker}-2-{number}" for number in range(2)}
            assert after[subset][speaker] == utterances | added


def test_an_increment_has_its_bases_share(corpus: Corpus) -> None:
    """Another share would move speakers; speech that has no share is no matter."""
    first = written(corpus, "1.jsonl", rows(SPEAKERS))
    second = written(corpus, "2.jsonl", rows(SPEAKERS, day=2))
    share, labelled = ("--dev-share", str(SHARE)), ("--manifest", f"labelled={second}")
    assert in_chain(corpus, "1", "--manifest", f"labelled={first}", *share).code == 0
    base = corpus.run_uri
    assert in_chain(corpus, "2", "--manifest", second, "--extends", base).code == 0
    extends = ("--extends", corpus.run_uri)
    for options in ((), ("--dev-share", "0.5")):
        said = in_chain(corpus, "3", *labelled, *options, *extends)
        assert said.code == 2
        assert f"{base} has 0.25, and a speaker is in one subset: give 0.25" in said.err
    assert in_chain(corpus, "3", *labelled, *share, *extends).code == 0


def test_a_directory_s_development_speakers_are_not_drawn_again(
    corpus: Corpus, kaldi_dir: Path
) -> None:
    """A directory ranks its speakers, so a manifest's hashes could move them."""
    base = in_chain(corpus, "1", "--kaldi-dir", str(kaldi_dir))
    assert base.code == 0, base.err
    labelled = f"labelled={written(corpus, 'm.jsonl', rows(SPEAKERS))}"
    options = ("--manifest", labelled, "--extends", corpus.run_uri)
    said = in_chain(corpus, "2", *options, "--dev-share", "0.25")
    assert said.code == 2
    assert "ingested a Kaldi directory, whose speakers have their subsets: ingest" in said.err
    assert in_chain(corpus, "2", *options).code == 0


def test_each_subset_is_selected(corpus: Corpus) -> None:
    """Development speech that a share drew is selected as a subset of its own; counts balance."""
    manifest = corpus.ingest(*three_subsets(corpus), "--dev-share", str(SHARE))
    said = corpus.job("select_utterances")
    assert said.code == 0, said.err
    selected = [
        read_manifest(corpus.store, corpus.run_uri, f"selection/{subset}") for subset in ALL_SUBSETS
    ]
    assert sum((each.tally_in for each in selected), Tally()) == manifest.tally_out
