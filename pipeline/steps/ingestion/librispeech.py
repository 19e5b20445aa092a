"""Read LibriSpeech's folders."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined
from pipeline.steps.ingestion.kaldi import read_table
from pipeline.steps.ingestion.manifest_format import Look, ManifestFormat
from pipeline.steps.ingestion.manifest_rows import (
    Piece,
    Row,
    folder_of_object,
    list_objects,
    whole,
)

_TRANSCRIPTS = ".trans.txt"
_LISTS_PER_PIECE = 64  # each is of a chapter


@dataclass(frozen=True, slots=True)
class LibriSpeech(ManifestFormat):
    """LibriSpeech reads SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, beside the FLACs it names."""

    takes: ClassVar[Collection[str]] = ()
    looks: ClassVar[Sequence[Look]] = (
        Look(
            "LibriSpeech's",
            "give --format librispeech and the folder above the chapters",
            file=re.compile(r".*\.trans\.txt"),
        ),
    )

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield some chapters' transcripts at a time."""
        found = list_objects(store, uri, (_TRANSCRIPTS,))
        lists = [each for each in found if each.uri.endswith(_TRANSCRIPTS)]
        for start in range(0, len(lists), _LISTS_PER_PIECE):
            yield whole(lists[start : start + _LISTS_PER_PIECE], uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each utterance; its speaker is what its id begins with."""
        for uri in piece.uris:
            folder = folder_of_object(uri)
            for key, text in read_table(store, uri).items():
                fields = {"utterance_id": key, "speaker_id": key.partition("-")[0], "text": text}
                audio_uri = join_uri(folder, f"{key}.flac")
                yield Row({**fields, "locale": "en", "audio_uri": audio_uri}, len(key) + len(text))
