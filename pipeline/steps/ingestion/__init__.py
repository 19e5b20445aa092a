"""Ingestion of corpora, and the table of their formats, by the values of --format.

The table says where the reader of each one is, and this module imports none, so that `--help` is
quick.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.steps.ingestion.manifest_format import ManifestFormat


FORMATS: Mapping[str, tuple[str, str]] = {
    "nemo": ("tables", "Nemo"),
    "lhotse": ("lhotse", "Lhotse"),
    "shar": ("lhotse", "Shar"),
    "kaldi": ("kaldi", "Kaldi"),
    "librispeech": ("kaldi", "LibriSpeech"),
    "common_voice": ("tables", "CommonVoice"),
    "table": ("tables", "Table"),
}
"""The module of this package and the class of each format's reader."""

DEFAULT_FORMAT = "nemo"

TRANSCRIPTS = "--transcripts"
"""The option that names a recognizer's transcripts beside manifests or a directory."""

COLUMNS, IGNORE_COLUMNS, RECORDINGS = "--columns", "--ignore-columns", "--recordings"
"""The options of which each format takes some."""


def reader_of(name: str) -> "type[ManifestFormat]":
    """Return the reader of the format of this name."""
    module, reader = FORMATS[name]
    found: type[ManifestFormat] = getattr(import_module(f"{__package__}.{module}"), reader)
    return found
