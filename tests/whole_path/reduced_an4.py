"""A few speakers and utterances of AN4, as a Kaldi data directory with links to its audio."""

from pathlib import Path

from pipeline.steps.manifest import SUBSETS

SIZES = {"labelled": (3, 10), "unlabelled": (6, 5), "heldout": (2, 4)}
"""Speakers of each of the corpus's own splits, and utterances of each speaker."""


def write_reduced_an4(an4_dir: Path, directory: Path) -> Path:
    """Write the directory: speakers stay in their split, utterances are each speaker's first."""
    directory.mkdir()
    kept: list[str] = []
    speaker_of = read_table(an4_dir / "utt2spk")
    for subset in SUBSETS:
        num_speakers, num_each = SIZES[subset]
        speakers = (an4_dir / f"{subset}.speakers").read_text().split()[:num_speakers]
        (directory / f"{subset}.speakers").write_text("".join(f"{name}\n" for name in speakers))
        for speaker in speakers:
            kept += [utt for utt, name in speaker_of.items() if name == speaker][:num_each]
    for name in ("wav.scp", "text", "utt2spk"):
        table = read_table(an4_dir / name)
        (directory / name).write_text("".join(f"{utt} {table[utt]}\n" for utt in kept))
    (directory / "lexicon.txt").write_bytes((an4_dir / "lexicon.txt").read_bytes())
    (directory / "audio").symlink_to(an4_dir / "audio")
    return directory


def read_table(path: Path) -> dict[str, str]:
    """A Kaldi table: utterance to the rest of its line."""
    lines = path.read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)
