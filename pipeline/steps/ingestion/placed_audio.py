"""Store the utterances of manifests as they sound in simulated placements.

The seed and the utterance id choose the placements. The sound of an utterance there depends on its
id, the seed and its audio alone, so no division into tasks changes it. A task holds the audio of a
window of utterances, as extraction's.
"""

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float32

from infra.prefetch import prefetch
from infra.settings import Seed, check_ranges
from infra.store.object_store import ObjectStore, join_uri
from pipeline.audio.decode import decode_utterance
from pipeline.audio.errors import AudioError
from pipeline.audio.placements import Acoustics, record_flac
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.records import (
    CLEAN,
    MAX_NAME_CHARACTERS,
    MIN_DURATION_S,
    Quarantined,
    Utterance,
    version_id,
)
from pipeline.runs.manifest import Output, read_output, sha256
from pipeline.runs.names import ACOUSTICS_FOLDER, AUDIO_FOLDER, DEV, HELDOUT, PLACEMENTS_SETTING
from pipeline.sampling import sampling_priority
from pipeline.settings import NO_CONVERSION, AudioConversion
from pipeline.steps.audio_reads import FoundAudio, require_audio
from pipeline.steps.features import audio_objects
from pipeline.steps.ingestion.manifest_records import output_of


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
    seed: Seed

    __post_init__ = check_ranges

    @property
    def settings(self) -> dict[str, Any]:
        """The setting of the step's manifest."""
        choices = {"training": asdict(self.training), "heldout": asdict(self.heldout)}
        return {PLACEMENTS_SETTING: {**choices, "seed": self.seed}}

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


BLOCK_ROWS = 256
"""So many neighbouring rows are of one task, and the reads of their audio are planned together."""

GETS_IN_FLIGHT = 8
PUTS_IN_FLIGHT = 4
_PLAIN_NAME = re.compile(r"[\w+=@,-][\w.+=@,-]{0,199}", re.ASCII)

Samples: TypeAlias = Float32[np.ndarray, " samples"]

_Choice: TypeAlias = tuple[Utterance, Sequence[str]]
"""An utterance, and the names of the placements in which it is stored."""

_Version: TypeAlias = tuple[Utterance | Quarantined, bytes | None]
"""An utterance in a placement, with the FLAC to store if it is simulated, or a ledger row."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """PlacementRules say in which placements an utterance is stored, and how it sounds there.

    Rooms and noises lie in the corpus, as `acoustics` names them by subset, so that tasks need no
    simulator of rooms.
    """

    choices: SubsetChoices
    conversion: AudioConversion = NO_CONVERSION
    acoustics: Mapping[str, Output] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulation says in which placements utterances are stored, and what sounds there.

    `draw` makes the rooms and noises of some subsets, once there is work for them. `engines` are
    the distributions that decide the bytes.
    """

    choices: SubsetChoices
    draw: Callable[[Collection[str]], Mapping[str, Acoustics]]
    engines: Sequence[str]

    def stored(
        self,
        store: ObjectStore,
        corpus_uri: str,
        subsets: Iterable[str],
        conversion: AudioConversion,
    ) -> PlacementRules:
        """Draw the acoustics of subsets, and store them in the corpus, where tasks read them."""
        placements = {subset: self.choices.choice(subset).placements for subset in subsets}
        simulated = [subset for subset, names in placements.items() if {*names} != {CLEAN}]
        outputs = {}
        for subset, acoustics in self.draw(simulated).items():
            file = io.BytesIO()
            acoustics.save(file)
            data = file.getvalue()
            outputs[subset] = output_of(f"{ACOUSTICS_FOLDER}/{sha256(data)[:16]}.npz", data)
            store.put(join_uri(corpus_uri, outputs[subset].key), data)
        return PlacementRules(self.choices, conversion, outputs)


class PlacedAudio:
    """PlacedAudio makes the versions of one task's utterances; `outputs` are the FLACs it stored.

    `subset_of` returns the subset of a speaker.
    """

    def __init__(
        self,
        store: ObjectStore,
        corpus_uri: str,
        rules: PlacementRules,
        subset_of: Callable[[str], str],
    ) -> None:
        self._store, self._corpus_uri = store, corpus_uri
        self._rules, self._subset_of = rules, subset_of
        self._acoustics: dict[str, Acoustics] = {}
        self.outputs: list[Output] = []

    def versions(
        self, records: Iterable[Utterance | Quarantined]
    ) -> Iterator[Utterance | Quarantined]:
        """Yield each utterance once a placement, or a ledger row; clean audio stays where it is.

        Each placement is a stream of its own, as the device stays there. StoreError where the
        store fails, not the utterance.
        """
        remaining = iter(records)
        while block := list(islice(remaining, BLOCK_ROWS)):
            chosen = [self._chosen(each) for each in block]
            for _, (record, output) in prefetch(self._stored, self._made(chosen), PUTS_IN_FLIGHT):
                if output is not None:
                    self.outputs.append(output)
                yield record

    def _chosen(self, record: Utterance | Quarantined) -> _Choice | Quarantined:
        if isinstance(record, Quarantined):
            return record
        if record.placement is not None:
            said = f"placement = {record.placement!r}: it is in a placement already"
            remedy = "leave the field out, or ingest without --placements"
            return Quarantined.of(record, "bad_field", f"{said}: {remedy}")
        subset = self._subset_of(record.speaker_id)
        names = self._rules.choices.of(subset, record.utterance_id)
        longest = max(len(version_id(record.utterance_id, name)) for name in names)
        if longest > MAX_NAME_CHARACTERS:
            said = f"utterance_id with a placement has {longest} characters"
            need = f"need at most {MAX_NAME_CHARACTERS}"
            return Quarantined.of(record, "bad_field", f"{said}: {need}")
        return record, names

    def _made(self, chosen: Sequence[_Choice | Quarantined]) -> Iterator[_Version]:
        # Without a simulated placement the audio is not read: extraction judges it.
        simulated = [
            each[0]
            for each in chosen
            if not isinstance(each, Quarantined) and {*each[1]} != {CLEAN}
        ]
        # Ledger rows are permanent, so refusals are confirmed first.
        audio = audio_objects(
            self._store, self._corpus_uri, simulated, GETS_IN_FLIGHT, self._rules.conversion
        ).read_decided()
        for each in chosen:
            if isinstance(each, Quarantined):
                yield each, None
                continue
            record, names = each
            heard = self._heard(record, next(audio)) if {*names} != {CLEAN} else None
            for name in names:
                yield self._version(record, name, heard)
        next(audio, None)  # the end of the readers' threads

    def _heard(self, record: Utterance, found: FoundAudio) -> Samples | Quarantined:
        """Decode an utterance as extraction would; the checksum of a FLAC is compared here."""
        num_bytes = 0
        try:
            data = require_audio(found).data
            num_bytes = len(data)
            return decode_utterance(
                data, record.utterance_id, record.duration_s, "kaldi", self._rules.conversion
            ).samples
        except AudioError as error:
            return Quarantined.of(record, error.reason, error.detail, num_bytes)

    def _version(
        self, record: Utterance, name: str, heard: Samples | Quarantined | None
    ) -> _Version:
        key = version_id(record.utterance_id, name)
        stream = name if record.stream is None else f"{record.stream}-{name}"
        version = replace(record, utterance_id=key, placement=name, stream=stream)
        if name == CLEAN:
            return version, None
        assert heard is not None, "the audio of simulated placements is read"
        if isinstance(heard, Quarantined):
            return replace(heard, utterance_id=key), None
        subset = self._subset_of(record.speaker_id)
        if subset not in self._acoustics:
            output = self._rules.acoustics[subset]
            data = read_output(self._store, self._corpus_uri, output)
            self._acoustics[subset] = Acoustics.load(io.BytesIO(data))
        flac = placed_flac(heard, key, name, self._acoustics[subset], self._rules.choices.seed)
        duration_s = round(max(len(heard) / SAMPLE_RATE_HZ, MIN_DURATION_S), 6)
        return replace(version, duration_s=duration_s, part=None), flac

    def _stored(self, version: _Version) -> tuple[Utterance | Quarantined, Output | None]:
        record, data = version
        if data is None or isinstance(record, Quarantined):
            return record, None
        output = output_of(audio_key(record.utterance_id, sha256(data)), data)
        self._store.put(join_uri(self._corpus_uri, output.key), data)
        # Relative, so that a corpus and its digests are the same wherever it lies.
        return replace(record, audio_uri=output.key), output


def placed_flac(
    samples: Samples, utterance_id: str, placement: str, acoustics: Acoustics, seed: int
) -> bytes:
    """Record an utterance in a placement; by its id each version has its own room and noise."""
    return record_flac(samples, placement, acoustics, sampling_priority(seed, utterance_id))


def audio_key(utterance_id: str, digest: str) -> str:
    """Name a stored FLAC by its utterance and its bytes.

    Two rows of one id may have other audio, so that no attempt or row replaces another's.
    """
    name = utterance_id
    if not _PLAIN_NAME.fullmatch(name):
        name = blake2b(name.encode(), digest_size=16).hexdigest()
    # S3 limits the rate of requests by prefix, so the hash comes early in the key.
    place = blake2b(utterance_id.encode(), digest_size=1).hexdigest()
    return f"{AUDIO_FOLDER}/{place}/{name}-{digest[:16]}.flac"
