"""Development speakers come from dev.speakers, or are a share of the labelled ones."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from jobs.cli.arguments import Parser, add_dev_share_argument
from pipeline.steps.ingestion.kaldi_directory import read_kaldi_directory
from pipeline.steps.selection.buckets import subsets_of
from tests.jobs.ingestion.conftest import append, copied, write

SPEAKERS = [f"s{number:02d}" for number in range(20)]


def speakers_by_subset(directory: Path, dev_share: float = 0.0) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in read_kaldi_directory(directory, dev_share).utterances:
        found.setdefault(each.subset, set()).add(each.speaker_id)
    return found


def with_labelled(directory: Path, speakers: Iterable[str]) -> None:
    """Add labelled speakers of one utterance each, all of the same audio."""
    for speaker in speakers:
        append(directory, "wav.scp", f"{speaker}-1 audio/ann-1.flac")
        append(directory, "utt2spk", f"{speaker}-1 {speaker}")
        append(directory, "text", f"{speaker}-1 HELLO")
        append(directory, "labelled.speakers", speaker)


def test_a_list_makes_a_fourth_subset(kaldi_dir: Path, tmp_path: Path) -> None:
    """Speakers of dev.speakers have transcripts and metadata of their own, counted apart."""
    with_labelled(kaldi_dir, ["dan"])
    write(kaldi_dir, "labelled.speakers", ["ann"])
    write(kaldi_dir, "dev.speakers", ["dan"])
    corpus = str(tmp_path / "corpus")
    store = ObjectStore((corpus,))
    summary = copied(kaldi_dir, corpus)
    assert summary.plan.statistics["utterances"] == {
        "labelled": 2,
        "unlabelled": 2,
        "heldout": 2,
        "dev": 1,
    }
    (found,) = store.list(f"{corpus}/metadata/dev")
    assert b'"text": "HELLO"' in store.get(found.uri)
    assert subsets_of(store, corpus) == ("labelled", "unlabelled", "heldout", "dev")


@pytest.mark.parametrize(("share", "number"), [(0.001, 1), (0.1, 2), (0.25, 5), (0.5, 10)])
def test_a_share_of_the_labelled_speakers(kaldi_dir: Path, share: float, number: int) -> None:
    """The share is of labelled speakers alone, at least one; no other subset loses a speaker."""
    with_labelled(kaldi_dir, SPEAKERS[1:])
    found = speakers_by_subset(kaldi_dir, share)
    assert len(found["dev"]) == number
    assert found["labelled"] | found["dev"] == {"ann", *SPEAKERS[1:]}
    assert not found["labelled"] & found["dev"]
    assert (found["unlabelled"], found["heldout"]) == ({"bob"}, {"eve"})


def test_a_share_is_by_hash(kaldi_dir: Path) -> None:
    """The order of the lists decides nothing, and a larger share holds the smaller."""
    shuffled = SPEAKERS[1:]
    random.Random(1).shuffle(shuffled)
    with_labelled(kaldi_dir, shuffled)
    before = speakers_by_subset(kaldi_dir, 0.2)["dev"]
    write(kaldi_dir, "labelled.speakers", ["ann", *SPEAKERS[1:]])
    assert speakers_by_subset(kaldi_dir, 0.2)["dev"] == before
    assert speakers_by_subset(kaldi_dir, 0.4)["dev"] > before


def test_a_share_beside_a_list_or_of_one_speaker_is_refused(kaldi_dir: Path) -> None:
    """The share is for corpora without a list, and leaves a speaker to train on."""
    with pytest.raises(ValueError, match=r"labelled\.speakers: lists one speaker: need two"):
        read_kaldi_directory(kaldi_dir, 0.5)
    with_labelled(kaldi_dir, ["dan"])
    write(kaldi_dir, "labelled.speakers", ["ann"])
    write(kaldi_dir, "dev.speakers", ["dan"])
    with pytest.raises(ValueError, match="leave out --dev-share, or remove the list"):
        read_kaldi_directory(kaldi_dir, 0.5)


@pytest.mark.parametrize("share", ["0.0009", "0.51", "-0.1", "nan", "half"])
def test_shares_beyond_their_range_are_refused(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bounds are in the message; those themselves pass."""
    parser = Parser()
    add_dev_share_argument(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--dev-share={share}"])
    assert f"{share}: need 0 (none) or 0.001..0.5" in capsys.readouterr().err
    for bound in ("0", "0.001", "0.5"):
        assert parser.parse_args(["--dev-share", bound]).dev_share == float(bound)


def test_files_of_language_models_are_copied(kaldi_dir: Path, tmp_path: Path) -> None:
    """A text and an ARPA of the directory are in the corpus, where evaluation may read them."""
    write(kaldi_dir, "language_model.txt", ["HELLO HELLO"])
    corpus = str(tmp_path / "corpus")
    store = ObjectStore((corpus,))
    summary = copied(kaldi_dir, corpus)
    assert store.get(f"{corpus}/language_model.txt") == b"HELLO HELLO\n"
    assert "language_model.txt" in {output.key for output in summary.outputs}
    assert not store.exists(f"{corpus}/language_model.arpa")
