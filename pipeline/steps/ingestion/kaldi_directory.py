"""Copy a Kaldi data directory into the store as a corpus of audio and metadata.

Needed: wav.scp, text, utt2spk, lexicon.txt, labelled.speakers, heldout.speakers. Optional:
unlabelled.speakers, dev.speakers, utt2placement, utt2time (ISO 8601 with an offset), utt2dur
(seconds), spk2locale or utt2lang, and language_model.txt and language_model.arpa, also with .gz,
which evaluation may use.

Utterances may first be simulated in placements. The whole corpus is planned before anything is
written: metadata objects, audio files, and ledger rows for what cannot be ingested.
"""

import codecs
import errno
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

from infra.log_lines import progress_bar
from infra.prefetch import prefetch
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri
from pipeline.audio.audio_file import reader_of
from pipeline.audio.codecs import max_padding_samples, stated_duration_s
from pipeline.audio.decode import MAX_DURATION_S as MAX_DECODED_S
from pipeline.audio.decode import decode_audio, decode_utterance, duration_tolerance, max_file_bytes
from pipeline.audio.errors import AudioError
from pipeline.audio.placements import Acoustics
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.metadata import read_records
from pipeline.records import (
    CLEAN,
    MAX_DURATION_S,
    MIN_DURATION_S,
    Hypothesis,
    MetadataError,
    Quarantined,
    Tally,
    Utterance,
    stream_order,
    version_id,
)
from pipeline.runs.engine import Loss, LossWatch, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, sha256
from pipeline.runs.names import (
    ALL_SUBSETS,
    AUDIO_FOLDER,
    DEV,
    DEV_SHARE_SETTING,
    HELDOUT,
    INGEST_STEP,
    LABELLED,
    LANGUAGE_MODEL_FILES,
    METADATA_FOLDER,
    UNLABELLED,
)
from pipeline.sampling import sampling_priority
from pipeline.steps.ingestion.kaldi import (
    CHANNELS_OF_RECORDINGS,
    Tables,
    channel_of_side,
    is_command,
    parse_table,
    require_known_tables,
    rows_of,
)
from pipeline.steps.ingestion.manifest_records import (
    ARCHIVE_ENTRY,
    EPOCH,
    OF_ARCHIVE,
    date_folder,
    holds,
    other_corpus,
    put_once,
)
from pipeline.steps.ingestion.manifest_rows import Row, digest_object
from pipeline.steps.ingestion.placed_audio import Simulation, SubsetChoices, placed_flac
from pipeline.steps.ingestion.transcripts import (
    HYPOTHESES,
    UNUSABLE,
    Key,
    Transcripts,
    Unusable,
    join,
    place_key,
    require_joined,
    transcript_settings,
)

UNDETERMINED_LOCALE = "und"
_UNSAFE_IN_KEYS = "/\\%"
_OF_UTTERANCES = ("utt2spk", "text", "utt2placement", "utt2time", "utt2dur", "utt2lang")
_NEEDED = ("wav.scp", "utt2spk", "text")
_TABLES = tuple(dict.fromkeys((*_NEEDED, *_OF_UTTERANCES, "spk2locale", CHANNELS_OF_RECORDINGS)))
_READ = {*_TABLES, *LANGUAGE_MODEL_FILES, "segments", *(f"{each}.speakers" for each in ALL_SUBSETS)}


@dataclass(frozen=True, slots=True)
class KaldiUtterance:
    """KaldiUtterance is one utterance; `text` is always None in the unlabelled subset.

    `created_at` and `declared_duration_s` are None where the directory does not state them.
    `audio_path` may not exist; `listed_path` is its spelling in wav.scp. One that `is_simulated`
    is stored as it sounds in its placement. `stream` names one of several streams of the speaker.
    `hypotheses` are what recognizers heard.
    """

    utterance_id: str
    speaker_id: str
    subset: str
    locale: str
    audio_path: Path
    listed_path: str
    text: str | None
    placement: str | None
    created_at: str | None
    declared_duration_s: float | None
    is_simulated: bool = False
    stream: str | None = None
    hypotheses: tuple[Hypothesis, ...] = ()


@dataclass(frozen=True, slots=True)
class KaldiDirectory:
    """KaldiDirectory holds the utterances by speaker and id, and a count.

    `language_data` holds the files of language models that are there. `num_unlisted` counts the
    utterances of speakers that are in no list.
    """

    utterances: tuple[KaldiUtterance, ...]
    language_data: Mapping[str, bytes]
    num_unlisted: int


def read_kaldi_directory(
    path: Path, dev_share: float = 0.0, locale: str = UNDETERMINED_LOCALE
) -> KaldiDirectory:
    """Read the tables of the directory at `path`; a ValueError names the file and the remedy.

    With `dev_share`, that share of the labelled speakers, by a hash of their ids, become
    development speakers. `locale` is that of speakers without one.
    """
    tables = _tables(path)
    subset_of = _read_subsets(path, set(tables["utt2spk"].values()))
    if dev_share:
        subset_of |= dict.fromkeys(_development_speakers(path, subset_of, dev_share), DEV)
    utterances = [
        _utterance(path, tables, row.fields, subset_of[row.fields["speaker_id"]], locale)
        for row in rows_of(tables, str(path))
        if isinstance(row, Row) and row.fields["speaker_id"] in subset_of
    ]
    utterances.sort(key=lambda each: (each.speaker_id, each.utterance_id))
    there = [path / name for name in LANGUAGE_MODEL_FILES if (path / name).exists()]
    return KaldiDirectory(
        utterances=tuple(utterances),
        language_data={
            file.name: file.read_bytes() if file.suffix == ".gz" else _text(file).encode()
            for file in there
        },
        num_unlisted=len(tables["wav.scp"]) - len(utterances),
    )


def _tables(path: Path) -> Tables:
    """Read the tables of the directory, checked against wav.scp."""
    if (path / "segments").exists():
        remedy = "ingest by --manifest DIR --format kaldi, or run Kaldi's extract-segments"
        raise ValueError(f"{path}/segments: recordings are not cut into utterances: {remedy}")
    try:
        require_known_tables(each.name for each in path.iterdir())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tables = {
        name: parse_table(str(path / name), file_bytes(path / name), needs_values=name != "text")
        for name in _TABLES
        if name in _NEEDED or (path / name).exists()
    }
    for key, line in tables.get(CHANNELS_OF_RECORDINGS, {}).items():
        if channel_of_side(line) != "0":
            remedy = "write a file for each side; then remove this table"
            raise ValueError(f"{path / CHANNELS_OF_RECORDINGS}: {key} {line}: {remedy}")
    recordings = tables["wav.scp"]
    for key, value in recordings.items():
        where = f"{path}/wav.scp: {key}"
        if is_command(value):
            remedy = "run the commands once into WAV or FLAC files, and name these"
            raise ValueError(f"{where}: a command ({value[:60]}) is not run: {remedy}")
        if ARCHIVE_ENTRY.search(value):
            raise ValueError(f"{where}: {value[:60]}: {OF_ARCHIVE}")
        if key.startswith(".") or any(mark in key for mark in _UNSAFE_IN_KEYS):
            need = "rename it without / \\ % or leading dot"
            raise ValueError(f"{where}: becomes an object key: {need}")
    for name in _OF_UTTERANCES:
        if unknown := sorted(tables.get(name, {}).keys() - recordings.keys()):
            remedy = "add them there, or remove these lines"
            raise ValueError(f"{path / name}: {_some(unknown)} not in wav.scp: {remedy}")
    if without := sorted(recordings.keys() - tables["utt2spk"].keys()):
        raise ValueError(f"{path}/utt2spk: no speaker for {_some(without)} of wav.scp: add them")
    return tables


def _utterance(
    path: Path, tables: Tables, fields: Mapping[str, object], subset: str, locale: str
) -> KaldiUtterance:
    """Make an utterance of the fields of its row; ValueError for one that is no such value."""

    def text_of(name: str) -> str | None:
        return None if (value := fields.get(name)) is None else str(value)

    utterance_id, speaker_id = str(fields["utterance_id"]), str(fields["speaker_id"])
    text = text_of("text") if subset != UNLABELLED else None
    if subset != UNLABELLED and text is None:
        remedy = f"add it, or take speaker {speaker_id} out of {subset}.speakers"
        raise ValueError(f"{path}/text: no transcript of {utterance_id}: {remedy}")
    created_at, duration_s = text_of("created_at"), fields.get("duration_s")
    if created_at is not None and not _has_offset(created_at):
        bound = "need ISO 8601 with an offset, as 2020-01-31T12:00:00+00:00"
        raise ValueError(f"{path}/utt2time: {utterance_id} {created_at}: {bound}")
    is_time = isinstance(duration_s, float) and 0 < duration_s < math.inf
    if duration_s is not None and not is_time:
        stated = tables["utt2dur"][utterance_id]
        raise ValueError(f"{path}/utt2dur: {utterance_id} {stated}: need seconds above 0")
    listed_path = str(fields["audio_uri"])
    return KaldiUtterance(
        utterance_id=utterance_id,
        speaker_id=speaker_id,
        subset=subset,
        locale=text_of("locale") or locale,
        audio_path=path / listed_path,
        listed_path=listed_path,
        text=text,
        placement=text_of("placement"),
        created_at=created_at,
        declared_duration_s=duration_s if isinstance(duration_s, float) else None,
    )


def _has_offset(moment: str) -> bool:
    try:
        return datetime.fromisoformat(moment).tzinfo is not None
    except ValueError:
        return False


def _read_subsets(path: Path, speakers: Collection[str]) -> dict[str, str]:
    subset_of: dict[str, str] = {}
    for subset in ALL_SUBSETS:
        file = path / f"{subset}.speakers"
        if subset in (DEV, UNLABELLED) and not file.exists():
            continue
        lines = (line.strip(" \t\r") for line in _text(file).split("\n"))
        listed = [line for line in lines if line]
        if unknown := sorted(set(listed) - set(speakers)):
            raise ValueError(f"{file}: {_some(unknown)} not in utt2spk: remove from the list")
        for speaker_id in listed:
            if subset_of.setdefault(speaker_id, subset) != subset:
                other = f"{subset_of[speaker_id]}.speakers"
                raise ValueError(f"{file}: {speaker_id} also in {other}: leave it in one")
        if not listed:
            raise ValueError(f"{file}: lists no speaker: need at least one")
    return subset_of


def _development_speakers(path: Path, subset_of: Mapping[str, str], share: float) -> list[str]:
    """Return this share of the labelled speakers, at least one: those of the lowest hashes."""
    if DEV in subset_of.values():
        remedy = "leave out --dev-share, or remove the list"
        raise ValueError(f"{path}/{DEV}.speakers lists the development speakers: {remedy}")
    labelled = [speaker for speaker, subset in subset_of.items() if subset == LABELLED]
    if len(labelled) < 2:
        remedy = "need two, one for training and one for development"
        raise ValueError(f"{path}/{LABELLED}.speakers: lists one speaker: {remedy}")
    number = min(max(round(share * len(labelled)), 1), len(labelled) - 1)
    return sorted(labelled, key=lambda speaker: (sampling_priority(0, speaker), speaker))[:number]


def _text(file: Path) -> str:
    try:
        return file_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}: convert it") from error


def file_bytes(file: Path) -> bytes:
    """Read a file of a directory without its byte-order mark; ValueError if it is missing."""
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError as error:
        needed = "text, utt2spk, wav.scp, lexicon.txt, labelled.speakers, heldout.speakers"
        raise ValueError(f"{file}: missing; a data directory needs {needed}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


NUM_SPEAKER_BUCKETS = 4
MAX_NAME_BYTES = 255
"""The longest name of a file on Linux."""
MAX_FILE_BYTES = max_file_bytes(float(MAX_DECODED_S))
"""Extraction refuses larger files too; several are in memory at a time."""
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class DirectoryIngestion:
    """DirectoryIngestion says which directory is copied, and how its utterances become records.

    `dev_share` is the share of the labelled speakers that become development speakers. `locale` is
    that of speakers without one. `transcripts` of recognizers are joined with the utterances.
    """

    path: Path
    dev_share: float = 0.0
    locale: str = UNDETERMINED_LOCALE
    simulation: Simulation | None = None
    transcripts: Sequence[Transcripts] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the corpus beside the directory."""
        return {
            **(self.simulation.choices.settings if self.simulation else {}),
            **transcript_settings(self.transcripts),
            DEV_SHARE_SETTING: self.dev_share,
            "locale": self.locale,
        }


@dataclass(frozen=True, slots=True)
class _Audio:
    """_Audio is an utterance's file as it was read, its key in the corpus and its length if known.

    `sha256` is that of the file; where the utterance is simulated, another one is stored.
    """

    utterance: KaldiUtterance
    key: str
    sha256: str
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """PlannedCopy holds what is to be written, and the ledger rows of what is not.

    `num_unlisted` utterances are of speakers that are in no list. Simulated utterances sound in the
    `acoustics` of their subset. Each recognizer's transcripts are `joined` with so many.
    """

    copies: Sequence[tuple[_Audio, Utterance]]
    language_data: Mapping[str, bytes]
    quarantined: Sequence[Quarantined]
    num_unlisted: int
    acoustics: Mapping[str, Acoustics]
    seed: int
    joined: Mapping[str, int]

    @property
    def records(self) -> dict[str, list[Utterance]]:
        """The records by subset; development and unlabelled speakers need not be there."""
        by_subset: dict[str, list[Utterance]] = {subset: [] for subset in ALL_SUBSETS}
        for audio, record in self.copies:
            by_subset[audio.utterance.subset].append(record)
        return {s: some for s, some in by_subset.items() if some or s in (LABELLED, HELDOUT)}

    @property
    def statistics(self) -> dict[str, Any]:
        """The counts of the step's manifest.

        Unreadable utterances are in the corpus, for extraction to quarantine; unlisted ones are
        not.
        """
        tallies = {subset: Tally.of(some) for subset, some in self.records.items()}
        return {
            "utterances": {subset: each.utterances for subset, each in tallies.items()},
            "hours": {subset: round(each.hours, 4) for subset, each in tallies.items()},
            "unreadable": sum(audio.duration_s is None for audio, _ in self.copies),
            "unlisted": self.num_unlisted,
            **({HYPOTHESES: dict(sorted(self.joined.items()))} if self.joined else {}),
        }

    def write(self, store: ObjectStore, corpus_uri: str) -> tuple[Output, ...]:
        """Compare what is there, then write what is not; records last, as they name the audio.

        The lexicon is not copied: it is no input of ingest, and steps that read it have its
        digest. Audio counts no utterance: the metadata objects do. ValueError if `corpus_uri`
        holds another corpus, or a file is no longer the one that was planned with.
        """
        uri = normalize_uri(corpus_uri)
        there = {info.uri: info for info in store.list(join_uri(uri, AUDIO_FOLDER))}

        def found(audio: _Audio) -> ObjectInfo | None:
            return there.get(join_uri(uri, audio.key))

        def put_all(verb: str, files: Sequence[_Audio]) -> list[Output]:
            done = prefetch(
                lambda audio: put_once(store, uri, audio.key, self._data(audio), found(audio)),
                files,
            )
            seen = progress_bar(done, description=verb, total=len(files), unit="file")
            return [output for _, output in seen]

        metadata = _metadata(self.records)
        stored = put_all("compare", [audio for audio, _ in self.copies if found(audio)])
        for info in store.list(join_uri(uri, METADATA_FOLDER)):
            ours = metadata.get(info.uri.removeprefix(f"{uri}/"))
            if ours is None or not holds(store, info, ours[0]):
                raise other_corpus(info.uri)
        texts = [put_once(store, uri, key, data) for key, data in self.language_data.items()]
        stored += put_all("copy", [audio for audio, _ in self.copies if not found(audio)])
        records = [
            put_once(store, uri, key, data, tally=tally) for key, (data, tally) in metadata.items()
        ]
        return (*sorted(stored, key=lambda output: output.key), *texts, *records)

    def _data(self, audio: _Audio) -> bytes:
        """Read what to store; ValueError if the file is no longer the one that was planned with."""
        utterance = audio.utterance
        data = utterance.audio_path.read_bytes()
        if sha256(data) != audio.sha256:
            said = "changed while it was ingested: run the step again"
            raise ValueError(f"{utterance.audio_path}: {said}")
        if not utterance.is_simulated:
            return data
        placement, acoustics = utterance.placement, self.acoustics[utterance.subset]
        assert placement is not None, "it is simulated in one"
        samples = decode_audio(data)
        return placed_flac(samples, utterance.utterance_id, placement, acoustics, self.seed)


def ingest_directory(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    ingestion: DirectoryIngestion,
    loss_budget: float,
) -> StepResult:
    """Copy a directory, unless it was done; LossBudgetExceededError if too much of it is faulty."""
    digests = {
        path.name: sha256(path.read_bytes())
        for path in sorted(ingestion.path.iterdir())
        if path.name in _READ
    }
    for each in ingestion.transcripts:
        digests |= {uri: digest_object((each.store, uri)) for p in each.pieces for uri in p.uris}

    def make(step: StepRun) -> Manifest:
        planned = plan_copy(ingestion)
        tally_out = Tally.of([record for _, record in planned.copies])
        lost = Tally.of(planned.quarantined)
        ledger = step.context.put_ledger(INGEST_STEP, planned.quarantined)
        if ledger:
            loss = Loss(INGEST_STEP, Counter(ledger.reasons), ledger.key)
            LossWatch(loss_budget, (tally_out + lost).utterances).check(loss)
        return step.manifest(
            outputs=planned.write(store, corpus_uri),
            tally_in=tally_out + lost,
            tally_out=tally_out,
            ledgers=(ledger,) if ledger else (),
            quarantined=lost,
            statistics=planned.statistics,
        )

    engines = ingestion.simulation.engines if ingestion.simulation else ()
    spec = StepSpec(
        store, run_uri, INGEST_STEP, ingestion.settings, digests=digests, engines=engines
    )
    return run_step(spec, make)


def plan_copy(ingestion: DirectoryIngestion) -> PlannedCopy:
    """Read all audio, make all records, and read each record as selection will.

    With a simulation, each utterance is stored once for each of its placements. Durations are the
    files' own; those of unreadable files are utt2dur's, or else 1 ms. Without utt2time, a speaker's
    utterances follow one another from 1970-01-01, by id. An absent file, a record that its reader
    refuses, and audio of which no placement can be simulated make ledger rows. ValueError for a
    fault in the directory.
    """
    directory = read_kaldi_directory(ingestion.path, ingestion.dev_share, ingestion.locale)
    joined = Counter[str]()
    utterances, quarantined = list[KaldiUtterance](), list[Quarantined]()
    heard = join(ingestion.transcripts, directory.utterances, _keys_of, joined)
    for utterance, found in zip(directory.utterances, heard, strict=True):
        if isinstance(found, Unusable):
            quarantined.append(_ledger_row(utterance, UNUSABLE, found.detail))
        else:
            utterances.append(found)
    require_joined(ingestion.transcripts, joined)
    acoustics, seed = dict[str, Acoustics](), 0
    if simulation := ingestion.simulation:
        seed = simulation.choices.seed
        utterances = list(_versions(utterances, simulation.choices))
        simulated = {each.subset for each in utterances if each.is_simulated}
        acoustics.update(simulation.draw(simulated))
    copies: list[tuple[_Audio, Utterance]] = []
    spoken: dict[str, timedelta] = defaultdict(timedelta)
    looked = prefetch(_look, utterances)
    progress = progress_bar(looked, description="read", total=len(utterances), unit="utterance")
    for utterance, audio in progress:
        if isinstance(audio, Quarantined):
            quarantined.append(audio)
            continue
        duration_s = audio.duration_s or utterance.declared_duration_s or MIN_DURATION_S
        begin = EPOCH + spoken[utterance.speaker_id]
        line = _record(audio, duration_s, begin).to_json().encode()
        ((_, record),) = read_records(line, audio.key)
        if isinstance(record, Quarantined):
            quarantined.append(record)
        else:
            copies.append((audio, record))
            spoken[utterance.speaker_id] += timedelta(seconds=duration_s)
    return PlannedCopy(
        copies,
        directory.language_data,
        quarantined,
        directory.num_unlisted,
        acoustics,
        seed,
        joined,
    )


def _keys_of(utterance: KaldiUtterance) -> list[Key]:
    path = normalize_uri(str(utterance.audio_path))
    return [("id", utterance.utterance_id), place_key(path)]


def _versions(
    utterances: Iterable[KaldiUtterance], choices: SubsetChoices
) -> Iterator[KaldiUtterance]:
    """Yield each utterance once a placement, under an id of its own.

    Speakers keep their ids, so that a speaker is in one subset. Each placement is a stream of its
    own, as the device stays there. ValueError where the directory has placements itself.
    """
    for each in utterances:
        if each.placement is not None:
            remedy = "remove utt2placement, or ingest without --placements"
            said = f"{each.utterance_id} is in a placement already"
            raise ValueError(f"utt2placement: {said}: {remedy}")
        for name in choices.of(each.subset, each.utterance_id):
            # No two versions share an id, as each ends with one of the names after its own.
            yield replace(
                each,
                utterance_id=version_id(each.utterance_id, name),
                placement=name,
                stream=name,
                is_simulated=name != CLEAN,
            )


def _look(utterance: KaldiUtterance) -> _Audio | Quarantined:
    """Read an utterance's file; what cannot be stored, or not simulated from, is a ledger row."""
    key = _audio_key(utterance)
    declared_s = utterance.declared_duration_s
    try:
        if (num_bytes := len(key.rpartition("/")[2].encode())) > MAX_NAME_BYTES:
            said = f"its object's name has {num_bytes} bytes: need at most {MAX_NAME_BYTES}"
            raise MetadataError("bad_field", said)
        if (size := _size_of(utterance.audio_path)) is None:
            said = f"there is no such file as wav.scp names: {utterance.listed_path!r}"
            raise MetadataError("missing_object", said)
        if size > MAX_FILE_BYTES:
            need = f"need at most {MAX_FILE_BYTES}, an hour in any format"
            raise MetadataError("too_large", f"{size} bytes: {need}")
        data = utterance.audio_path.read_bytes()
        duration_s = stated_duration_s(reader_of(data), len(data))
        if utterance.is_simulated:
            # A new file has a checksum of its own, so damage is looked for in the given one.
            decoded = decode_utterance(data, utterance.utterance_id, duration_s or 0.0, "kaldi")
            duration_s = len(decoded.samples) / SAMPLE_RATE_HZ
        if duration_s is None or duration_s > MAX_DURATION_S:
            return _Audio(utterance, key, sha256(data), None)
        stated_s = declared_s or duration_s
        missing_s, surplus_s = duration_tolerance(stated_s, max_padding_samples(SAMPLE_RATE_HZ))
        if not -missing_s <= duration_s - stated_s <= surplus_s:
            said = f"the file lasts {duration_s:.3f} s, utt2dur says {stated_s:.3f} s"
            raise MetadataError("duration_mismatch", said)
        return _Audio(utterance, key, sha256(data), duration_s)
    except (AudioError, MetadataError) as error:
        return _ledger_row(utterance, error.reason, error.detail)


def _audio_key(utterance: KaldiUtterance) -> str:
    suffix = ".flac" if utterance.is_simulated else utterance.audio_path.suffix.lower()
    name = f"{utterance.utterance_id}{suffix if _SUFFIX.fullmatch(suffix) else ''}"
    # S3 limits the rate of requests by prefix, so the hash comes early in the key.
    return f"{AUDIO_FOLDER}/{_hash(utterance.utterance_id):02x}/{name}"


def _ledger_row(utterance: KaldiUtterance, reason: str, detail: str) -> Quarantined:
    declared_s = utterance.declared_duration_s
    usable_s = declared_s if declared_s and declared_s <= MAX_DURATION_S else 0.0
    about = utterance.utterance_id, _audio_key(utterance), reason, detail
    return Quarantined(*about, num_bytes=0, duration_ms=round(usable_s * 1000))


def _size_of(path: Path) -> int | None:
    """Return a readable file's size; None if there is none, as with a name too long for one."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except PermissionError as error:
        raise ValueError(f"{path}: permission denied: check its owner and mode") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise


def _record(audio: _Audio, duration_s: float, default_time: datetime) -> Utterance:
    utterance = audio.utterance
    return Utterance(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_s=round(max(duration_s, MIN_DURATION_S), 6),
        created_at=utterance.created_at or default_time.isoformat(timespec="milliseconds"),
        locale=utterance.locale,
        # Relative, so that a corpus and its digests are the same wherever it lies.
        audio_uri=audio.key,
        text=utterance.text,
        placement=utterance.placement,
        stream=utterance.stream,
        hypotheses=utterance.hypotheses,
    )


def _metadata(records: Mapping[str, Iterable[Utterance]]) -> dict[str, tuple[bytes, Tally]]:
    """Return the metadata objects by their keys, each with the tally of its records."""
    members: dict[str, list[Utterance]] = defaultdict(list)
    for subset, some in records.items():
        for record in sorted(some, key=stream_order):
            bucket = f"speaker_bucket={_hash(record.speaker_id) % NUM_SPEAKER_BUCKETS:02d}"
            folder = f"{METADATA_FOLDER}/{subset}/{date_folder(record)}/{bucket}"
            members[f"{folder}/part-00000.jsonl"].append(record)
    return {
        key: ("".join(f"{record.to_json()}\n" for record in some).encode(), Tally.of(some))
        for key, some in sorted(members.items())
    }


def _hash(name: str) -> int:
    return blake2b(name.encode(), digest_size=1).digest()[0]
