"""Choose the placements in which utterances are ingested, by seed and utterance id."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.records import CLEAN
from pipeline.runs.names import DEV, HELDOUT
from pipeline.sampling import sampling_priority


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """PlacementChoice takes `count` of its placements for each utterance."""

    placements: tuple[str, ...]
    count: int

    @classmethod
    def parse(cls, text: str, known: Sequence[str]) -> "PlacementChoice":
        """Read names, such as clean,DP3, which are all taken, or how many of `known` to draw.

        Both together, such as 2:clean,DP1,DP3, draw so many of the names.
        """
        number, colon, listed = text.partition(":")
        if not (colon or text.isdecimal()):
            names = _names(text, known)
            return cls(names, len(names))
        names = _names(listed, known) if colon else tuple(known)
        if not (number.isdecimal() and 1 <= int(number) <= len(names)):
            raise ValueError(f"placements = {text}: need 1..{len(names)} to draw, or names")
        return cls(names, int(number))

    def of(self, utterance_id: str, seed: int) -> list[str]:
        """Return the placements of one utterance; each is as likely as any other."""

        def priority(name: str) -> int:
            return sampling_priority(seed, f"{name} {utterance_id}")

        taken = sorted(self.placements, key=priority)[: self.count]
        return [name for name in self.placements if name in taken]


@dataclass(frozen=True, slots=True)
class SubsetChoices:
    """SubsetChoices hold the placements of training, and those of held-out speakers.

    Development speakers take those of `heldout`, so that models are tuned for what scores them.
    """

    training: PlacementChoice
    heldout: PlacementChoice
    seed: int

    def of(self, subset: str, utterance_id: str) -> list[str]:
        """Return the placements of an utterance of the subset."""
        return self.choice(subset).of(utterance_id, self.seed)

    def choice(self, subset: str) -> PlacementChoice:
        """Return the choice for the utterances of a subset."""
        return self.heldout if subset in (HELDOUT, DEV) else self.training


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    names_known = (CLEAN, *known)
    if unknown := [name for name in names if name not in names_known]:
        need = f"need a number, or some of {', '.join(names_known)}"
        raise ValueError(f"placements = {unknown[0]!r}: {need}")
    if len(set(names)) < len(names):
        raise ValueError(f"placements = {text}: need each name once")
    return names
