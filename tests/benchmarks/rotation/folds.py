"""Rotate a corpus's speakers: six folds, in which each speaker is held out exactly once.

AN4's speakers are dealt to six groups, women and men apart, in the order of a hash. Fold n holds
group n out and transcribes the next one, some 7 minutes. Three speakers of the group after that
are for development: their transcripts choose acoustic scales, and enter no model. All others are
unlabelled; their transcripts are read by no step but the oracle's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile

from pipeline.runs.names import LANGUAGE_MODEL_FILES, LEXICON_FILE
from pipeline.sampling import sampling_priority

NUM_FOLDS = 6
NUM_DEVELOPMENT = 3


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold: the speakers of each subset of one fold."""

    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...]
    heldout: tuple[str, ...]
    dev: tuple[str, ...]

    def transcribed(self, words: Mapping[str, int]) -> "Fold":
        """Return the fold with the unlabelled speakers transcribed, as the oracle hears it.

        A run needs untranscribed speech, so the speaker of the fewest words remains without.
        """
        fewest = min(self.unlabelled, key=lambda speaker: (words[speaker], speaker))
        known = (*self.labelled, *(each for each in self.unlabelled if each != fewest))
        return Fold(known, (fewest,), self.heldout, self.dev)

    def subsets(self) -> dict[str, tuple[str, ...]]:
        """Return the speakers by the name of their list in a Kaldi data directory."""
        return {name: getattr(self, name) for name in self.__slots__}


def groups_of(speakers: Sequence[str]) -> list[tuple[str, ...]]:
    """Deal the speakers to six groups, women (whose ids begin with f in AN4) before men."""
    order = sorted(
        speakers, key=lambda name: (not name.startswith("f"), sampling_priority(0, name), name)
    )
    return [tuple(order[number::NUM_FOLDS]) for number in range(NUM_FOLDS)]


def fold_of(speakers: Sequence[str], number: int) -> Fold:
    """Return fold `number`, 0 to 5."""
    groups = groups_of(speakers)
    heldout, labelled, third = (groups[(number + step) % NUM_FOLDS] for step in range(3))
    # The last ones are men as well as women, as groups begin with their women.
    dev = third[:1] + third[-(NUM_DEVELOPMENT - 1) :]
    taken = {*heldout, *labelled, *dev}
    unlabelled = tuple(name for group in groups for name in group if name not in taken)
    return Fold(labelled, unlabelled, heldout, dev)


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

    def words(self) -> dict[str, int]:
        """Count the words of each speaker."""
        found = dict.fromkeys(self.speakers, 0)
        for key, speaker in self.speaker_of.items():
            found[speaker] += len(self.text_of[key])
        return found

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
