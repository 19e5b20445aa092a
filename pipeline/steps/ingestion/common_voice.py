"""Read the tables of Common Voice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined
from pipeline.steps.ingestion.manifest_format import (
    ABOUT_SPEAKERS,
    ABOUT_TEXTS,
    Look,
    ManifestFormat,
)
from pipeline.steps.ingestion.manifest_rows import (
    DELIMITED,
    KnownFields,
    Piece,
    Row,
    csv_rows,
    folder_of_object,
    list_objects,
    split_unquoted,
    whole,
)

_CLIP_DURATIONS = "clip_durations.tsv"
_DURATION_COLUMNS = ("clip", "duration[ms]")
_CLIP_COLUMNS = {
    "speaker_id": "client_id",
    "text": "sentence",
    "locale": "locale",
}
COMMON_VOICE_HARMLESS = (*ABOUT_SPEAKERS, *ABOUT_TEXTS)


@dataclass(frozen=True, slots=True)
class CommonVoice(ManifestFormat):
    """CommonVoice reads tables such as train.tsv, beside clips/ and maybe clip_durations.tsv."""

    names: ClassVar[Mapping[str, str]] = {
        "audio_uri": "path",
        "utterance_id": "path",
        **_CLIP_COLUMNS,
    }
    looks: ClassVar[Sequence[Look]] = (
        Look(
            "a table of Common Voice",
            "give --format common_voice",
            frozenset({"client_id", "path", "sentence"}),
            re.compile(r"(validated|clip_durations)\.tsv"),
        ),
    )
    contents: ClassVar[Sequence[str]] = (DELIMITED,)

    def prefixes(self, uri: str) -> tuple[str, ...]:
        """Return the table and its folder, where the table of durations lies."""
        return uri, uri.rpartition("/")[0]

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the table, with the table of durations where there is one."""
        found, *others = list_objects(store, uri, (".tsv",))
        if others:
            tables = [found.uri, *(each.uri for each in others)]
            train = [each for each in tables if each.endswith("/train.tsv")]
            need = f"name one of them, such as {[*train, *tables][0]}"
            raise ValueError(f"{uri} holds {len(tables)} tables: {need}")
        folder = folder_of_object(found.uri)
        durations = [e for e in store.list(folder) if e.uri == join_uri(folder, _CLIP_DURATIONS)]
        yield whole([found, *durations], folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each clip; a client is a speaker."""
        table, *others = piece.uris
        seconds = _clip_seconds(store, others[0]) if others else {}
        known = KnownFields(
            ("path", *_CLIP_COLUMNS.values()), COMMON_VOICE_HARMLESS, self.options.ignored
        )
        for row in csv_rows(store, table, split_unquoted, known):
            if isinstance(row, Quarantined):
                yield row
                continue
            path = str(row.fields.get("path", ""))
            found = {
                "utterance_id": path.rpartition(".")[0] or path or None,
                **{name: row.fields.get(column) for name, column in _CLIP_COLUMNS.items()},
                "duration_s": seconds.get(path),
                "audio_uri": f"clips/{path}" if path else None,
            }
            fields = {name: value for name, value in found.items() if value is not None}
            yield Row(fields, row.num_bytes)


def _clip_seconds(store: ObjectStore, uri: str) -> dict[str, float]:
    """Read the milliseconds that Common Voice states of each clip."""
    seconds = {}
    for row in csv_rows(store, uri, split_unquoted, KnownFields(_DURATION_COLUMNS)):
        if not isinstance(row, Quarantined):
            clip, milliseconds = (str(row.fields.get(name, "")) for name in _DURATION_COLUMNS)
            with suppress(ValueError):
                seconds[clip] = float(milliseconds) / 1000
    return seconds
