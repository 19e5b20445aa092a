"""Read tables: JSON lines, CSV or Parquet with a column for each field, NeMo's, Common Voice's."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import PRED_TEXT, Quarantined
from pipeline.steps.ingestion import COLUMNS, IGNORE_COLUMNS
from pipeline.steps.ingestion.manifest_format import (
    ABOUT_SPEAKERS,
    ABOUT_TEXTS,
    CHANNEL,
    FIELDS,
    HARMLESS,
    Look,
    ManifestFormat,
    renamed_rows,
)
from pipeline.steps.ingestion.manifest_rows import (
    CSV_SUFFIXES,
    DELIMITED,
    JSON_LINES,
    JSON_SUFFIXES,
    PARQUET,
    PARQUET_SUFFIXES,
    KnownFields,
    Piece,
    Row,
    csv_rows,
    folder_of_object,
    json_pieces,
    json_rows,
    list_objects,
    parquet_rows,
    split_by_commas,
    split_by_tabs,
    split_lines,
    split_row_groups,
    split_unquoted,
    whole,
)


@dataclass(frozen=True, slots=True)
class Table(ManifestFormat):
    """Table reads JSON lines, CSV or Parquet, with columns that are our fields."""

    contents: ClassVar[Sequence[str]] = (JSON_LINES, DELIMITED, PARQUET)
    takes: ClassVar[Collection[str]] = (COLUMNS, IGNORE_COLUMNS)
    names_channels: ClassVar[bool] = True

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines and of row groups, and whole CSVs."""
        for found in list_objects(store, uri, (*JSON_SUFFIXES, *CSV_SUFFIXES, *PARQUET_SUFFIXES)):
            folder = folder_of_object(found.uri)
            if found.uri.endswith(PARQUET_SUFFIXES):
                yield from split_row_groups(store, found, folder)
            elif found.uri.endswith(CSV_SUFFIXES):
                yield whole([found], folder)
            else:
                yield from split_lines(found, folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows, each field from its column."""
        columns = {name: self.columns.get(name, name) for name in (*FIELDS, CHANNEL)}
        known = KnownFields(columns.values(), HARMLESS, self.options.ignored)
        rows: Iterator[Row | Quarantined]
        if piece.uri.endswith(PARQUET_SUFFIXES):
            rows = parquet_rows(store, piece, known)
        elif piece.uri.endswith(CSV_SUFFIXES):
            is_tabbed = piece.uri.endswith((".tsv", ".tsv.gz"))
            rows = csv_rows(
                store, piece.uri, split_by_tabs if is_tabbed else split_by_commas, known
            )
        else:
            rows = json_rows(store, piece, known)
        return renamed_rows(rows, columns, self.options.ignored)


NEMO_COLUMNS = {
    "audio_uri": "audio_filepath",
    "duration_s": "duration",
    "start_s": "offset",
    "text": "text",
    "utterance_id": "utterance_id",
    "speaker_id": "speaker",
    "locale": "lang",
    "created_at": "created_at",
    PRED_TEXT: PRED_TEXT,
    "score": "score",
    CHANNEL: "channel_selector",
}
NEMO_HARMLESS = (
    *HARMLESS,
    *("wer", "cer", "confidence", "taskname", "task", "source_lang"),
    *("target_lang", "pnc", "itn", "timestamp", "diarize", "prompt_format", "decodercontext"),
    *("num_segments", "num_speakers", "label", "answer", "context", "question", "emotion"),
    *("text_pc", "text_no_preprocessing", "normalized_text", "orig_sr", "seq_label"),
    *("rttm_filepath", "uem_filepath", "ctm_filepath"),
    *("timestamps_char", "timestamps_word", "timestamps_segment", "pred_lang", "pred_lang_chars"),
    *("beams", "token_confidence", "word_confidence"),
)
"""What NeMo's tools add to a manifest: error rates, prompts, labels, times, other tasks' files."""

TARRED = Look(
    "NeMo's tarred data set",
    "its members are not read: unpack the tars, and give a manifest of the files",
    frozenset({"tarred_audio_filepaths"}),
    re.compile(r".*_OP_\d+\.\.\d+_CL_.*"),
    is_read=False,
)


@dataclass(frozen=True, slots=True)
class Nemo(ManifestFormat):
    """Nemo reads NeMo's JSON lines: audio_filepath, duration, text, offset, and some others."""

    names: ClassVar[Mapping[str, str]] = NEMO_COLUMNS
    names_channels: ClassVar[bool] = True
    looks: ClassVar[Sequence[Look]] = (
        TARRED,
        Look("NeMo's", "give --format nemo", frozenset({"audio_filepath"})),
    )
    contents: ClassVar[Sequence[str]] = (JSON_LINES,)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines."""
        return json_pieces(store, uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows; with an offset, also of 0, the utterance is a segment."""
        known = KnownFields(NEMO_COLUMNS.values(), NEMO_HARMLESS, self.options.ignored)
        return renamed_rows(json_rows(store, piece, known), NEMO_COLUMNS, self.options.ignored)


_CLIP_DURATIONS = "clip_durations.tsv"
_DURATION_COLUMNS = ("clip", "duration[ms]")
_CLIP_COLUMNS = {"speaker_id": "client_id", "text": "sentence", "locale": "locale"}
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
        seconds = _clip_seconds(store, others[0], self.options.ignored) if others else {}
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


def _clip_seconds(store: ObjectStore, uri: str, ignored: Collection[str]) -> dict[str, float]:
    """Read the milliseconds that Common Voice states of each clip."""
    seconds = {}
    known = KnownFields(_DURATION_COLUMNS, ignored=ignored)
    for row in csv_rows(store, uri, split_unquoted, known):
        if not isinstance(row, Quarantined):
            clip, milliseconds = (str(row.fields.get(name, "")) for name in _DURATION_COLUMNS)
            with suppress(ValueError):
                seconds[clip] = float(milliseconds) / 1000
    return seconds
