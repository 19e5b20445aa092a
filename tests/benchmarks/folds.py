"""Read a corpus as Kaldi writes it, and divide its speakers into the subsets of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile

from pipeline.runs.names import LANGUAGE_MODEL_FILES, LEXICON_FILE


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold: the speakers of each subset of a run."""

    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...]
    heldout: tuple[str, ...]
    dev: tuple[str, ...]

    def subsets(self) -> dict[str, tuple[str, ...]]:
        """Return the speakers by the name of their list in a Kaldi data directory."""
        return {name: getattr(self, name) for name in self.__slots__}


class Corpus:
    """Corpus reads the tables of a Kaldi data directory, and writes it with other subsets.

    Of each speaker it has every n-th utterance, from the first on.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        self.folder = folder
        seen = Counter[str]()
        self.speaker_of: dict[str, str] = {}
        for key, speaker in self._table("utt2spk").items():
            if seen[speaker] % every == 0:
                self.speaker_of[key] = speaker
            seen[speaker] += 1
        texts, paths = self._table("text"), self._table("wav.scp")
        self.text_of = {key: texts[key].split() for key in self.speaker_of if key in texts}
        self.path_of = {key: (folder / paths[key]).resolve() for key in self.speaker_of}
        self.speakers = tuple(sorted(set(self.speaker_of.values())))

    def hours(self, speakers: Sequence[str]) -> float:
        """Return the hours of some speakers."""
        paths = [self.path_of[key] for key, name in self.speaker_of.items() if name in speakers]
        return sum(float(soundfile.info(path).duration) for path in paths) / 3600

    def write(self, fold: Fold, folder: Path) -> None:
        """Write the data directory of a fold; the audio remains where it is."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LEXICON_FILE, *LANGUAGE_MODEL_FILES):
            if (self.folder / name).exists():
                (folder / name).write_bytes((self.folder / name).read_bytes())
        tables: dict[str, Mapping[str, object]] = {
            "text": {key: " ".join(words) for key, words in self.text_of.items()},
            "utt2spk": self.speaker_of,
            "wav.scp": self.path_of,
        }
        for name, table in tables.items():
            lines = [f"{key} {value}\n" for key, value in table.items()]
            (folder / name).write_text("".join(lines))
        for subset, speakers in fold.subsets().items():
            lines = [f"{speaker}\n" for speaker in speakers]
            (folder / f"{subset}.speakers").write_text("".join(lines))

    def _table(self, name: str) -> dict[str, str]:
        lines = (self.folder / name).read_text().splitlines()
        pairs = (line.partition(" ") for line in lines)
        return {key: value.strip() for key, _, value in pairs}
