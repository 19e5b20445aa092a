"""Simulate a Kaldi directory's utterances in the placements that are chosen for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from infra.settings import Seed, check_ranges
from jobs.ingestion.kaldi_directory import KaldiDirectory, KaldiUtterance
from pipeline.records import CLEAN, version_id
from pipeline.steps.ingestion.placed_audio import PlacementChoice, SubsetChoices

Simulate = Callable[[KaldiUtterance, bytes], bytes]
"""Makes the FLAC of an utterance in its placement from the bytes of its audio file."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Placing chooses placements for each subset and simulates them."""

    training: PlacementChoice
    heldout: PlacementChoice
    seed: Seed
    simulate: Simulate

    __post_init__ = check_ranges

    @property
    def choices(self) -> SubsetChoices:
        """The placements by subset, without what simulates them."""
        return SubsetChoices(self.training, self.heldout, self.seed)

    def place(self, directory: KaldiDirectory) -> KaldiDirectory:
        """Return the directory with each utterance once a placement, under an id of its own.

        Speakers keep their ids, so that a speaker is in one subset. Each placement is a stream of
        its own, as the device stays there. ValueError where the directory has placements itself.
        """
        placed = [each.utterance_id for each in directory.utterances if each.placement is not None]
        if placed:
            remedy = "remove utt2placement, or ingest without --placements"
            raise ValueError(f"utt2placement: {placed[0]} is in a placement already: {remedy}")
        versions = [
            self._version(utterance, name)
            for utterance in directory.utterances
            for name in self.choices.of(utterance.subset, utterance.utterance_id)
        ]
        return replace(directory, utterances=tuple(versions))

    def _version(self, utterance: KaldiUtterance, name: str) -> KaldiUtterance:
        # No two versions share an id, as each ends with one of the names after its own.
        key = version_id(utterance.utterance_id, name)
        version = replace(utterance, utterance_id=key, placement=name, stream=name)
        if name == CLEAN:
            return version
        return replace(version, simulate=partial(self.simulate, version))
