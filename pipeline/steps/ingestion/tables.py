"""Read tables: JSON lines, CSV or Parquet with a column for each of our fields, and NeMo's."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined
from pipeline.steps.ingestion.formats import COLUMNS, IGNORE_COLUMNS
from pipeline.steps.ingestion.manifest_format import (
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
            is_tabbed = ".tsv" in piece.uri.rpartition("/")[2]
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
    CHANNEL: "channel_selector",
}
NEMO_HARMLESS = (
    *HARMLESS,
    *("pred_text", "wer", "cer", "score", "confidence", "taskname", "task", "source_lang"),
    *("target_lang", "pnc", "itn", "timestamp", "diarize", "prompt_format", "decodercontext"),
    *("num_segments", "num_speakers", "label", "answer", "context", "question", "emotion"),
    *("text_pc", "text_no_preprocessing", "normalized_text", "orig_sr", "seq_label"),
    *("rttm_filepath", "uem_filepath", "ctm_filepath"),
)
"""What NeMo's tools add to a manifest: hypotheses, prompts, labels, and files of other tasks."""

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
