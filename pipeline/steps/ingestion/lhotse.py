"""Read lhotse's manifests: cuts, supervisions with their recordings, and Shar's tars."""

import operator
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeAlias, TypeGuard

from infra.settings import shown
from infra.store.object_store import ObjectStore
from pipeline.records import MAX_START_S, PRED_TEXT, Quarantined
from pipeline.steps.ingestion import IGNORE_COLUMNS, RECORDINGS
from pipeline.steps.ingestion.manifest_format import FIELDS, Look, ManifestFormat, refused, renamed
from pipeline.steps.ingestion.manifest_rows import (
    JSON_LINES,
    KnownFields,
    Piece,
    Row,
    each_row,
    json_pieces,
    json_rows,
    whole,
)

JOINED_ROWS = 20_000
"""So many supervisions are in memory while their recordings are looked up."""

FRAME_S = 0.01
"""A supervision may begin so long before its cut, or end so long after it: lhotse rounds times."""

CUT = ("id", "type", "start", "duration", "channel", "recording", "supervisions")
MIXTURE = ("tracks", "transforms")
PADDING = (
    *("sampling_rate", "feat_value", "num_frames", "num_features", "frame_shift", "num_samples"),
    "video",
)
CUT_HARMLESS = ("features", "custom")
SUPERVISION = (
    *("id", "recording_id", "start", "duration", "channel", "text", "speaker", "language"),
)
SUPERVISION_HARMLESS = ("gender", "custom", "alignment")
RECORDING = ("id", "sources", "duration", "channel_ids", "transforms")
RECORDING_HARMLESS = ("sampling_rate", "num_samples", "custom")
SOURCE = ("type", "channels", "source")
SOURCE_HARMLESS = ("video",)

_CUTS_FILE = re.compile(r"(?P<folder>.*)/cuts\.(?P<shard>[^/]*\.)?jsonl(\.gz)?$")
_WITHOUT_AUDIO = (".json", ".nodata", ".nometa")
_NAMES = {
    "audio_uri": "recording.sources.source",
    "utterance_id": "id",
    "duration_s": "duration",
    "start_s": "start",
    "text": "supervisions.text",
    "speaker_id": "supervisions.speaker",
    "locale": "supervisions.language",
}
CUTS = (
    Look(
        "lhotse's cuts",
        "give --format lhotse, or --format shar for the folder that SharWriter wrote",
        frozenset({"id", "start", "duration", "channel", "supervisions"}),
    ),
    Look("lhotse's mixtures of cuts", "give --format lhotse", frozenset({"id", "tracks"})),
)
SUPERVISIONS = Look(
    "lhotse's supervisions",
    "give --format lhotse, and their recordings by --recordings URI",
    frozenset({"id", "recording_id", "start", "duration"}),
)
RECORDINGS_ALONE = Look(
    "lhotse's recordings, which name no utterance",
    "give cuts by --format lhotse, or supervisions with --recordings URI",
    frozenset({"id", "sources", "sampling_rate"}),
    is_read=False,
)
Fields: TypeAlias = Mapping[str, Any]
_OURS = {name: name for name in (*FIELDS, "folder")}


class _RefusedError(Exception):
    """_RefusedError says why a row is no utterance of one recording."""


@dataclass(frozen=True, slots=True)
class Lhotse(ManifestFormat):
    """Lhotse reads MonoCuts, each of one file's audio; a mixture is a ledger row.

    With recordings at another URI it reads supervisions, each a segment of its recording.
    """

    names: ClassVar[Mapping[str, str]] = _NAMES
    looks: ClassVar[Sequence[Look]] = (*CUTS, SUPERVISIONS, RECORDINGS_ALONE)
    contents: ClassVar[Sequence[str]] = (JSON_LINES,)
    takes: ClassVar[Collection[str]] = (RECORDINGS, IGNORE_COLUMNS)

    def prefixes(self, uri: str) -> tuple[str, ...]:
        """Return the manifest, and the recordings that it is joined with."""
        return (uri, self.options.recordings_uri) if self.options.recordings_uri else (uri,)

    def reads(self, look: Look) -> bool:
        """Return whether the look is that of cuts, or of supervisions if there are recordings."""
        return look == SUPERVISIONS if self.options.recordings_uri else look in CUTS

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines, and whole archives."""
        return json_pieces(store, uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each cut or supervision as a segment, or as the whole object if it is that.

        A batch of supervisions is joined by one pass over the recordings.
        """
        if not self.options.recordings_uri:
            cuts = cut_rows(store, piece, self.options.ignored)
            yield from each_row(lambda cut: _accepted(cut, piece.uri), cuts)
            return
        known = KnownFields(SUPERVISION, SUPERVISION_HARMLESS, self.options.ignored)
        remaining = _known_rows(store, piece, known)
        while batch := list(islice(remaining, JOINED_ROWS)):
            recordings = self._recordings(store, batch)

            def joined(
                row: Row, recordings: Mapping[str, tuple[Fields, str]] = recordings
            ) -> Row | Quarantined:
                named = row.fields.get("recording_id")
                if (found := recordings.get(str(named))) is None:
                    said = f"recording_id = {named!r}: no such recording, or several"
                    return refused(row, piece.uri, said)
                recording, folder = found
                # Its start is within the recording, as a cut's is; a cut's supervisions have
                # theirs within the cut.
                itself = {**row.fields, "start": 0.0}
                of_cut = {"supervisions": [itself], "recording": recording, "custom": None}
                fields = {**row.fields, **of_cut, "folder": folder}
                return _accepted(Row(fields, row.num_bytes), piece.uri)

            yield from each_row(joined, batch)

    def _recordings(
        self, store: ObjectStore, batch: Sequence[Row | Quarantined]
    ) -> Mapping[str, tuple[Fields, str]]:
        """Read the recordings of a batch of supervisions by their ids, each with its folder."""
        rows = [row for row in batch if isinstance(row, Row)]
        wanted = {str(row.fields.get("recording_id")) for row in rows}
        found, twice = dict[str, tuple[Fields, str]](), set[str]()
        for piece in json_pieces(store, self.options.recordings_uri) if wanted else ():
            for row in json_rows(store, piece):
                if isinstance(row, Row) and (named := str(row.fields.get("id"))) in wanted:
                    recording = row.fields, piece.folder
                    twice |= {named} if found.setdefault(named, recording) != recording else set()
        return {name: each for name, each in found.items() if name not in twice}


def cut_rows(
    store: ObjectStore, piece: Piece, ignored: Collection[str]
) -> Iterator[Row | Quarantined]:
    """Yield the cuts, with the ledger rows of those with keys that are not known."""
    known = KnownFields((*CUT, *MIXTURE, *PADDING), CUT_HARMLESS, ignored)
    return _known_rows(store, piece, known)


def _known_rows(
    store: ObjectStore, piece: Piece, known: KnownFields
) -> Iterator[Row | Quarantined]:
    """Yield the rows without the keys that are ignored, of supervisions too."""

    def kept(value: Any) -> Any:  # noqa: ANN401 - as it came
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name not in known.ignored}

    def without(row: Row) -> Row:
        fields = kept(row.fields)
        if isinstance(supervisions := fields.get("supervisions"), list):
            fields["supervisions"] = [kept(each) for each in supervisions]
        return Row(fields, row.num_bytes)

    rows = json_rows(store, piece, known)
    return each_row(without, rows) if known.ignored else rows


@dataclass(frozen=True, slots=True)
class Shar(ManifestFormat):
    """Shar reads folders of cuts.N.jsonl.gz beside recording.N.tar, whose members are the audio.

    Of one shard N may be absent. lhotse's indexed readers need plain cuts.N.jsonl, which is read,
    and write cuts.N.jsonl.idx beside, which is not.
    """

    names: ClassVar[Mapping[str, str]] = _NAMES
    looks: ClassVar[Sequence[Look]] = (
        Look("lhotse's Shar", "give --format shar", file=re.compile(r"recording\.\d+\.tar")),
    )

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield a piece for each pair of cuts and recordings."""
        there = {each.uri: each for each in store.list(uri)}
        cuts = [found for name in there if (found := _CUTS_FILE.match(name))]
        if not cuts:
            raise ValueError(f"{uri} holds no cuts.*.jsonl.gz: need a folder that SharWriter wrote")
        for found in cuts:
            folder, name = found["folder"], found[0]
            tar = f"{folder}/recording.{found['shard'] or ''}tar"
            if tar not in there:
                raise ValueError(f"{tar}: missing beside {name}: a compressed tar is not read")
            yield whole([there[name], there[tar]], folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each cut as the member with its id."""
        tar = piece.uris[1]
        members = _members(store, tar)

        def placed(cut: Row) -> Row | Quarantined:
            if (member := members.get(str(cut.fields.get("id")))) is None:
                said = f"{tar} has no plain file with the id of this cut, or several"
                return refused(cut, tar, said)
            duration_s = cut.fields.get("duration")
            place = {"audio_uri": tar, "duration_s": duration_s, **member}
            return _accepted(cut, tar, place)

        # Rows are those of a piece's first object.
        return each_row(placed, cut_rows(store, piece, self.options.ignored))


def _members(store: ObjectStore, uri: str) -> dict[str, dict[str, int]]:
    """Read where the members of a tar lie, by their names without suffix."""
    members: dict[str, dict[str, int]] = {}
    twice: set[str] = set()
    try:
        with closing(store.open(uri)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                stem, _, suffix = member.name.rpartition(".")
                # A sparse member's bytes lie there without its zeros.
                is_whole = member.isreg() and not member.issparse()
                if is_whole and f".{suffix}" not in _WITHOUT_AUDIO:
                    twice |= {stem} & members.keys()
                    size = {"member_offset": member.offset_data, "member_bytes": member.size}
                    members[stem] = size
    except tarfile.TarError as error:
        raise ValueError(f"{uri}: no whole tar: {error}; write it again") from error
    return {stem: each for stem, each in members.items() if stem not in twice}


def _accepted(row: Row, uri: str, place: Fields | None = None) -> Row | Quarantined:
    """Return an utterance's fields; its audio is at `place`, or where its recording says."""
    cut = row.fields
    try:
        if (kind := cut.get("type", "MonoCut")) != "MonoCut":
            raise _RefusedError(f"type = {shown(kind)}: need MonoCut, of one recording")
        if given := [name for name in MIXTURE if cut.get(name)]:
            raise _RefusedError(f"{given[0]} of a MonoCut: save the audio first")
        fields = {**(place or _place(cut)), **_supervised(cut), "utterance_id": cut.get("id")}
        return renamed(Row(fields, row.num_bytes), _OURS)
    except _RefusedError as error:
        return refused(row, uri, str(error))


def _require_known(name: str, given: Fields, used: Sequence[str], harmless: Sequence[str]) -> None:
    """Refuse a key of a nested object that is neither used nor harmless; null is no key."""
    known = (*used, *harmless)
    unknown = [key for key, value in given.items() if key not in known and value is not None]
    if unknown:
        remedy = f"remove it, or in supervisions pass over it by {IGNORE_COLUMNS}"
        raise _RefusedError(f"{name}: {shown(unknown[0])} is not known: {remedy}")


def _place(row: Fields) -> dict[str, Any]:
    """Return the audio's object, and the time within it unless it is the whole recording."""
    recording = row.get("recording")
    if not isinstance(recording, dict):
        raise _RefusedError("no recording: need cuts with recordings")
    _require_known("recording", recording, RECORDING, RECORDING_HARMLESS)
    sources = recording.get("sources")
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
        raise _RefusedError("sources: need one file of the recording")
    source = sources[0]
    if source.get("type") == "shar":
        raise _RefusedError("audio in a Shar: give --format shar and the folder of the cuts")
    _require_known("sources", source, SOURCE, SOURCE_HARMLESS)
    if source.get("type") not in ("file", "url"):
        raise _RefusedError(f"source of type {source.get('type')!r}: need file or url")
    for channels in (source.get("channels") or [0], recording.get("channel_ids") or [0]):
        if not isinstance(channels, list) or len(channels) > 1:
            raise _RefusedError(f"channels {shown(channels)}: need one; write a file for each")
    [channel] = source.get("channels") or [0]
    if _channel(row) not in (None, channel):
        said = f"channel {shown(row['channel'])} of a file of channel {shown(channel)}"
        raise _RefusedError(f"{said}: write a file for each channel")
    if recording.get("transforms"):
        raise _RefusedError("transforms: the audio in the store is another: save the audio first")
    place = {"audio_uri": source.get("source"), "duration_s": row.get("duration")}
    if row.get("folder"):  # a joined recording's paths are relative to its own manifest
        place["folder"] = row["folder"]
    is_whole = row.get("start") == 0 and row.get("duration") == recording.get("duration")
    return place if is_whole else {**place, "start_s": row.get("start")}


def _channel(row: Fields) -> object:
    """Return a cut's or a supervision's channel; lhotse writes one or a list."""
    named = row.get("channel")
    return named[0] if isinstance(named, list) and len(named) == 1 else named


def _supervised(cut: Fields) -> dict[str, Any]:
    """Return speaker, text and language; an utterance has one of each, and all of its words."""
    supervisions = cut.get("supervisions") or []
    is_list = isinstance(supervisions, list)
    if not is_list or not all(isinstance(each, dict) for each in supervisions):
        raise _RefusedError("supervisions: need a list of objects")
    for each in supervisions:
        _require_known("supervisions", each, SUPERVISION, SUPERVISION_HARMLESS)
    remedy = "cut it by trim_to_supervisions(keep_overlapping=False)"
    about = {"speaker_id": "speaker", "locale": "language"}
    values = {ours: [each.get(name) for each in supervisions] for ours, name in about.items()}
    if len(set(map(str, values["speaker_id"]))) > 1:
        raise _RefusedError(f"speakers {shown(values['speaker_id'])} in a cut: need one: {remedy}")
    languages = {str(each) for each in values["locale"] if each is not None}
    if len(languages) > 1:
        raise _RefusedError(f"{len(languages)} languages in a cut: need one: {remedy}")
    channels = [each for each in map(_channel, (cut, *supervisions)) if each is not None]
    if any(each != channels[0] for each in channels):
        named = " and ".join(sorted({shown(each) for each in channels}))
        raise _RefusedError(f"channels {named} in a cut: need one: write a file for each")
    spoken = [each for each in supervisions if each.get("text")]
    for each in spoken:
        _require_within_cut(cut, each)
    in_order = sorted(spoken, key=lambda each: float(each["start"]))
    found = {name: next((v for v in some if v is not None), None) for name, some in values.items()}
    texts = [_text(each["text"]) for each in in_order]
    return {**found, **({"text": " ".join(texts)} if texts else {}), **_heard(cut, supervisions)}


def _text(value: object) -> str:
    """Return a text to join with others, which would make words of anything else."""
    if not isinstance(value, str):
        raise _RefusedError(f"text = {shown(value)}: need text")
    return value


def _heard(cut: Fields, supervisions: Sequence[Fields]) -> dict[str, Any]:
    """Return what a recognizer heard, of the custom fields of a cut, or of its supervisions.

    Texts of several are joined in order of time, as transcripts are; the score is the mean over
    the words, if each has one.
    """
    spoken = [cut]
    if not _has_pred_text(cut):
        spoken = [each for each in supervisions if _has_pred_text(each)]
        for each in spoken:
            _require_within_cut(cut, each)
        spoken.sort(key=lambda each: float(each["start"]))
    customs = [each["custom"] for each in spoken]
    if len(customs) < 2:
        return {name: own.get(name) for own in customs for name in (PRED_TEXT, "score")}
    texts = [_text(own[PRED_TEXT]) for own in customs]
    heard: dict[str, Any] = {PRED_TEXT: " ".join(texts)}
    lengths, scores = [len(text.split()) for text in texts], [own.get("score") for own in customs]
    for score in scores:
        if score is not None and not _is_number(score):
            raise _RefusedError(f"score = {shown(score)}: need a finite number")
    if sum(lengths) and None not in scores:
        heard["score"] = sum(map(operator.mul, lengths, scores)) / sum(lengths)
    return heard


def _has_pred_text(of: Fields) -> bool:
    custom = of.get("custom")
    return isinstance(custom, dict) and custom.get(PRED_TEXT) is not None


def _require_within_cut(cut: Fields, supervision: Fields) -> None:
    """Refuse a supervision whose words are not all spoken in the cut."""
    times = supervision.get("start"), supervision.get("duration"), cut.get("duration")
    numbers = [float(each) for each in times if _is_number(each)]
    if len(numbers) < len(times):
        raise _RefusedError("supervisions: need the start and the duration of each with a text")
    start_s, duration_s, cut_s = numbers
    end_s = start_s + duration_s
    most = FRAME_S + 1e-6
    if start_s < -most or end_s > cut_s + most:
        said = f"a supervision from {start_s:g} to {end_s:g} s of a cut of {cut_s:g} s"
        remedy = "cut by trim_to_supervisions(keep_overlapping=False), or drop_supervisions()"
        raise _RefusedError(f"{said}: its words are not all spoken there: {remedy}")


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MAX_START_S <= value <= MAX_START_S  # NaN is in no range
