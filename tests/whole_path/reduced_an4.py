"""Write a few speakers and utterances of AN4 as a Kaldi data directory with linked audio."""

from pathlib import Path

from pipeline.runs.names import ALL_SUBSETS, DEV, LABELLED

SIZES = {"labelled": (3, 10), "unlabelled": (6, 5), "heldout": (2, 4), "dev": (1, 4)}
"""Speakers of each of the corpus's own splits, and utterances of each speaker.

The development speaker is one more of the labelled ones.
"""


def write_reduced_an4(an4_dir: Path, directory: Path) -> Path:
    """Write the directory: speakers stay in their split, and one unlabelled file is cut short."""
    directory.mkdir()
    tables = {name: read_table(an4_dir / name) for name in ("wav.scp", "text", "utt2spk")}
    kept: list[str] = []
    for subset in ALL_SUBSETS:
        num_speakers, num_each = SIZES[subset]
        of = LABELLED if subset == DEV else subset
        first = SIZES[LABELLED][0] if subset == DEV else 0
        speakers = (an4_dir / f"{of}.speakers").read_text().split()[first : first + num_speakers]
        (directory / f"{subset}.speakers").write_text("".join(f"{name}\n" for name in speakers))
        for speaker in speakers:
            theirs = [key for key, name in tables["utt2spk"].items() if name == speaker]
            kept += theirs[:num_each]
        if subset == "unlabelled":
            whole = (an4_dir / tables["wav.scp"][kept[-1]]).read_bytes()
            (directory / "truncated.flac").write_bytes(whole[: len(whole) // 2])
            tables["wav.scp"][kept[-1]] = "truncated.flac"
    for name, table in tables.items():
        (directory / name).write_text("".join(f"{key} {table[key]}\n" for key in kept))
    (directory / "lexicon.txt").write_bytes((an4_dir / "lexicon.txt").read_bytes())
    (directory / "audio").symlink_to((an4_dir / "audio").resolve())
    return directory


def read_table(path: Path) -> dict[str, str]:
    """Read a Kaldi table: utterance to the rest of its line."""
    return dict(line.split(" ", 1) for line in path.read_text().splitlines())
